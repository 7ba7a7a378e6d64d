"""Drawn programs: any order of operators and nested contexts computes what it computes under torch.autocast."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampkit
from ampkit import Policy

WIDTH = 6


class Weights(nn.Module):
    """What the operators of a program use: parameters, one of them frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.conv, self.cell = nn.Conv1d(4, 4, 3, padding=1), nn.GRUCell(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2, requires_grad=False)
        self.table = nn.Embedding(8, WIDTH)
        self.shift: Tensor
        self.register_buffer("shift", torch.randn(4, WIDTH))


# Every operator takes and gives (4, WIDTH).
OPERATORS: dict[str, Callable[[Weights, Tensor], Tensor]] = {
    "linear": lambda w, x: w.linear(x),
    "matmul": lambda w, x: x @ w.linear.weight.T,
    "matmul_frozen": lambda w, x: x @ w.frozen,
    "addmm": lambda w, x: torch.addmm(w.linear.bias, x, w.frozen),
    "einsum": lambda w, x: torch.einsum("ij,kj->ik", x, w.linear.weight),
    "bmm": lambda w, x: torch.bmm(x[None], w.linear.weight[None])[0],
    "conv1d": lambda w, x: w.conv(x[None])[0],
    "attention": lambda w, x: F.scaled_dot_product_attention(x[None], x[None], w.shift[None])[0],
    "gru_cell": lambda w, x: w.cell(x),
    "layer_norm": lambda w, x: w.norm(x),
    "softmax": lambda w, x: x.softmax(-1),
    "log_softmax": lambda w, x: x.log_softmax(-1),
    "exp": lambda w, x: torch.exp(-x.abs()),
    "cumsum": lambda w, x: x.cumsum(0) / 4,
    "add_buffer": lambda w, x: x + w.shift,
    "add_parameter": lambda w, x: x + w.linear.bias,
    "embed": lambda w, x: x + w.table(torch.tensor([1, 0, 1, 5])),
    "cat": lambda w, x: torch.cat([x, w.shift])[2:6],
    "stack": lambda w, x: torch.stack([w.shift, x]).mean(0),
    "addcmul": lambda w, x: torch.addcmul(x, w.shift, x, value=0.1),
    "index_put": lambda w, x: x.index_put((torch.tensor([0]),), x[1]),
    "norm": lambda w, x: x / (1 + x.norm()),
    "mse": lambda w, x: x / (1 + F.mse_loss(x, w.shift)),
    "gelu": lambda w, x: F.gelu(x),
    "relu_": lambda w, x: F.relu(x.clone(), inplace=True),
    "view": lambda w, x: x.t().contiguous().t(),
    "to_float": lambda w, x: x.float(),
    "to_bfloat16": lambda w, x: x.bfloat16(),
    "detach": lambda w, x: x.detach(),
}


Lane = Callable[..., contextlib.AbstractContextManager[Any]]       # how one side opens a region


def native(**options: Any) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", **options)


def ours(**options: Any) -> contextlib.AbstractContextManager[Any]:
    return ampkit.autocast("cpu", policy=Policy.torch("cpu"), **options)


Step = tuple[str, Any]      # an operator's name and None, or a context's name and the steps inside it
CONTEXTS = (
    "region", "disabled", "uncached", "torch_region", "torch_disabled", "no_grad", "enable_grad", "inference",
    "checkpoint", "reentrant",
)


def programs() -> st.SearchStrategy[list[Step]]:
    """Lists of steps, nested up to three contexts deep."""
    operator = st.tuples(st.sampled_from(sorted(OPERATORS)), st.none())
    steps: st.SearchStrategy[list[Step]] = st.lists(operator, min_size=1, max_size=4)
    for _ in range(3):
        context = st.tuples(st.sampled_from(CONTEXTS), steps)
        steps = st.lists(operator | context, min_size=1, max_size=4)
    return steps


def run(steps: list[Step], weights: Weights, x: Tensor, lane: Lane, dtype: torch.dtype) -> Tensor:
    """The value after all steps."""
    for name, inner in steps:
        if inner is None:
            x = OPERATORS[name](weights, x)
        elif name in ("checkpoint", "reentrant"):
            def body(x: Tensor, inner: list[Step] = inner) -> Tensor:
                return run(inner, weights, x, lane, dtype)

            x = checkpoint(body, x, use_reentrant=name == "reentrant")  # pyright: ignore[reportAssignmentType]
        else:
            context = {
                "region": lambda: lane(dtype=dtype),
                "disabled": lambda: lane(enabled=False),
                "uncached": lambda: lane(dtype=dtype, cache_enabled=False),
                "torch_region": lambda: torch.autocast("cpu", dtype),
                "torch_disabled": lambda: torch.autocast("cpu", enabled=False),
                "no_grad": torch.no_grad,
                "enable_grad": torch.enable_grad,
                "inference": torch.inference_mode,
            }[name]
            with context():
                x = run(inner, weights, x, lane, dtype)
    return x


def outcome(steps: list[Step], lane: Lane, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]] | RuntimeError:
    """The value and the gradients of a program in a region, or what it raised."""
    weights = Weights()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    try:
        with lane(dtype=dtype):
            y = run(steps, weights, x, lane, dtype)
        if y.requires_grad:
            y.float().sum().backward()
    except RuntimeError as error:
        # Its traceback would keep torch's checkpoint alive, and with it, before torch 2.13, hooks on saved tensors.
        return RuntimeError(str(error))
    grads = {name: p.grad for name, p in [("x", x), *weights.named_parameters()] if p.grad is not None}
    return y.detach(), grads


def names_in(steps: list[Step]) -> set[str]:
    """Every operator and context of a program."""
    return {name for name, _ in steps}.union(*(names_in(inner) for _, inner in steps if inner is not None))


def may_share_other_casts(steps: list[Step]) -> bool:
    """Whether two uses of a weight can share a cast on one side and not on the other.

    The gradients of a shared cast are added in low precision, those of two casts in float32. It takes a region that is
    opened again inside an disabled or a recompute: torch has one cache for all, ampkit one for each recompute.
    """
    names = names_in(steps)
    opened = names & {"region", "torch_region", "uncached"}
    return bool(opened and names & {"disabled", "checkpoint", "reentrant"})


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@settings(max_examples=200)
@given(steps=programs())
def test_drawn_programs_have_torchs_bits(dtype: torch.dtype, steps: list[Step]) -> None:
    expected = outcome(steps, native, dtype)
    got = outcome(steps, ours, dtype)
    if isinstance(expected, RuntimeError):
        return      # torch cannot run it: mixed dtypes in an disabled, say
    assert not isinstance(got, RuntimeError), got
    assert got[0].dtype is expected[0].dtype
    assert torch.equal(got[0], expected[0])
    assert got[1].keys() == expected[1].keys()
    bound = 0.02 if may_share_other_casts(steps) else 0.0
    for name, grad in expected[1].items():
        assert got[1][name].dtype is grad.dtype
        assert (got[1][name] - grad).norm() <= bound * grad.norm(), name
