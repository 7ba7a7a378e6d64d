"""Random programs: operators, contexts and transforms in any order have torch.amp's bits under `Policy.torch`.

Gradients of a tensor with several uses are added up in the order in which autograd recorded them, so the order of the
casts shows in the last bits. Tensors here are given twice to one operator, shared by operators and used again
afterwards; contexts are up to three deep; transforms are those of `torch.func`.
"""

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from ampkit import record_casts
from tests.helpers.regions import like_torch as ours
from tests.helpers.training import native

N = 4  # every tensor is (N, N, N) before the transforms

# Each takes tensors of shape (N, N, N) and gives one.
OPERATORS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "bmm": (2, torch.bmm),
    "matmul": (2, torch.matmul),
    "baddbmm": (3, torch.baddbmm),
    "addbmm": (3, lambda a, b, c: torch.addbmm(a[0], b, c).expand(N, N, N)),
    "addmm": (3, lambda a, b, c: torch.addmm(a[0], b[1], c[2]).expand(N, N, N)),
    "mm": (2, lambda a, b: torch.mm(a[1], b[1]).expand(N, N, N)),
    "linear": (2, lambda a, b: F.linear(a, b[0])),
    "linear_bias": (3, lambda a, b, c: F.linear(a, b[0], c[0, 0])),
    "einsum": (2, lambda a, b: torch.einsum("bij,bkj->bik", a, b)),
    "attention": (3, F.scaled_dot_product_attention),
    "attention by keywords": (
        4,
        lambda a, b, c, d: F.scaled_dot_product_attention(query=a, key=b, value=c, attn_mask=d),
    ),
    "conv1d": (3, lambda a, b, c: F.conv1d(a, b, c[0, 0], padding=2)[..., :N]),
    "conv_transpose1d": (2, lambda a, b: F.conv_transpose1d(a, b)[..., :N]),
    "prelu": (2, lambda a, b: F.prelu(a, b[0, 0])),
    "cdist": (2, lambda a, b: torch.cdist(a, b)),
    "mse": (2, lambda a, b: a + F.mse_loss(a, b)),
    "smooth_l1": (2, lambda a, b: b + F.smooth_l1_loss(a, b)),
    "cross_entropy": (2, lambda a, b: a + F.cross_entropy(a, b)),
    "kl": (2, lambda a, b: a + F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")),
    "cat": (3, lambda a, b, c: torch.cat([a, b, c])[1 : N + 1]),
    "stack": (2, lambda a, b: torch.stack([a, b]).sum(0)),
    "index_copy": (2, lambda a, b: torch.index_copy(a, 0, torch.tensor([1, 0]), b[:2])),
    "index_put": (2, lambda a, b: a.index_put((torch.tensor([0]),), b[1])),
    "embed": (2, lambda a, b: a + F.embedding(torch.tensor([1, 0, 1, 3]), b[0])),
    "addcmul": (3, lambda a, b, c: torch.addcmul(a, b, c, value=0.1)),
    "gru_cell": (
        3,
        lambda a, b, c: torch.gru_cell(a[0], b[0], c.reshape(-1, N)[: 3 * N], a.reshape(-1, N)[: 3 * N]).expand(
            N, N, N
        ),
    ),
    "add": (2, torch.add),
    "mul": (2, torch.mul),
    "tanh": (1, torch.tanh),
    "gelu": (1, F.gelu),
    "relu_": (1, lambda a: F.relu(a.clone(), inplace=True)),
    "exp": (1, lambda a: torch.exp(-a.abs())),
    "cumsum": (1, lambda a: a.cumsum(0) / N),
    "copy": (1, lambda a: a * 1.0),
    "transposed": (1, lambda a: a.transpose(0, 1).contiguous().transpose(0, 1)),
    "detach": (1, torch.Tensor.detach),
    "layer_norm": (1, lambda a: F.layer_norm(a, (N,))),
    "norm": (1, lambda a: a / (1 + a.norm())),
    "softmax": (1, lambda a: a.softmax(-1)),
    "log_softmax": (1, lambda a: a.log_softmax(-1)),
    "low": (1, lambda a: a.to(torch.get_autocast_dtype("cpu"))),
    "float": (1, torch.Tensor.float),
}
# These fail under transforms in torch itself, or batch other dimensions.
PLAIN_ONLY = {"index_copy", "index_put", "embed", "gru_cell", "cdist", "kl", "cross_entropy", "relu_"}

Region = Callable[..., contextlib.AbstractContextManager[Any]]
Step = tuple[str, Any]  # an operator and the numbers of its arguments, or a context, its input and its steps


CONTEXTS: dict[str, Callable[[Region, torch.dtype], Any]] = {
    "region": lambda region, dtype: region(dtype),
    "disabled": lambda region, dtype: region(enabled=False),
    "uncached": lambda region, dtype: region(dtype, cache_enabled=False),
    "torch_region": lambda region, dtype: torch.autocast("cpu", dtype),
    "torch_disabled": lambda region, dtype: torch.autocast("cpu", enabled=False),
    "no_grad": lambda region, dtype: torch.no_grad(),
    "enable_grad": lambda region, dtype: torch.enable_grad(),
    "inference": lambda region, dtype: torch.inference_mode(),
}
CHECKPOINTS = ("checkpoint", "reentrant")


class Program:
    """Operators with the numbers of the tensors that each gets: leaves and inputs first, then results."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.seed = seed
        self.dtype = draw.choice((torch.bfloat16, torch.float16))
        self.transform = draw.choice(("none", "vmap", "grad", "jvp", "vmap_of_grad", *["contexts"] * 3))
        self.n_leaves = 2 if "vmap" in self.transform else 3
        self.names: set[str] = set()
        self.given_twice: set[str] = set()
        self.steps, n = self.drawn(self.n_leaves + 2, draw.randint(2, 6), 3)
        self.reused = [draw.randrange(n) for _ in range(draw.randint(1, 4))]  # after the transform, or at its end

    def drawn(self, n: int, length: int, depth: int) -> tuple[list[Step], int]:
        """Steps that may use `n` values, and how many values there are after them."""
        draw, steps = self.draw, list[Step]()
        operators = [name for name in OPERATORS if self.transform in ("none", "contexts") or name not in PLAIN_ONLY]
        for _ in range(length):
            few = [draw.randrange(n) for _ in range(draw.randint(1, 2))]  # so that some are given twice
            if self.transform == "contexts" and depth and draw.random() < 0.4:
                name = draw.choice((*CONTEXTS, *CHECKPOINTS))
                # A reentrant checkpoint may use leaves and its input: through others it would go backward once more.
                known = self.n_leaves if name in CHECKPOINTS else n
                steps.append((name, (few[0], self.drawn(known + 1, draw.randint(1, 4), depth - 1)[0])))
            else:
                name = draw.choice(operators)
                places = tuple(draw.choice(few) for _ in range(OPERATORS[name][0]))
                steps.append((name, places))
                if len(set(places)) < max(len(places), 2):
                    self.given_twice.add(name)
            self.names.add(name)
            n += 1
        return steps, n

    def __repr__(self) -> str:
        return f"{self.transform} of {self.steps}, then {self.reused}, {self.dtype}, seed {self.seed}"

    @property
    def may_share_other_casts(self) -> bool:
        """Whether two uses of a weight can share a cast on one side and not on the other.

        The gradients of a shared cast are added in low precision, those of two casts in float32. It takes a region
        that is opened again inside a disabled one or a recompute: torch has one cache for all, ampkit one for each.
        """
        opened = self.names & {"region", "torch_region", "uncached"}
        return bool(opened and self.names & {"disabled", "torch_disabled", *CHECKPOINTS})

    def run_steps(self, steps: list[Step], values: list[Tensor], region: Region) -> list[Tensor]:
        """The values, and those of the steps."""
        for name, places in steps:
            if name in OPERATORS:
                values = [*values, OPERATORS[name][1](*(values[place] for place in places))]
                continue
            place, inner = places
            if name in CHECKPOINTS:
                body = functools.partial(self.last_of, inner, values[: self.n_leaves], region)
                result: Any = checkpoint(body, values[place], use_reentrant=name == "reentrant")
            else:
                with CONTEXTS[name](region, self.dtype):
                    result = self.last_of(inner, values, region, values[place])
            values = [*values, result]
        return values

    def last_of(self, steps: list[Step], values: list[Tensor], region: Region, x: Tensor) -> Tensor:
        return self.run_steps(steps, [*values, x], region)[-1]

    def body(self, leaves: Sequence[Tensor], x: Tensor, region: Region) -> Tensor:
        values = self.run_steps(self.steps, [*leaves, x, x * 1.0], region)
        return torch.stack([values[place].float() for place in self.reused]).sum(0) + values[-1].float()

    def run(self, region: Region) -> list[Tensor]:
        """The result and the gradients of the leaves."""
        torch.manual_seed(self.seed)
        leaves = [torch.randn(N, N, N, requires_grad=True) for _ in range(2)]
        if self.n_leaves == 3:
            leaves.append(torch.nn.Parameter(torch.randn(N, N, N), requires_grad=False))
        x = torch.randn(N, N, N, requires_grad=True)
        with region(self.dtype):
            out = self.transformed(leaves, x, functools.partial(self.body, region=region))
            out = out + torch.bmm(leaves[0], out) + out @ leaves[1]
        (out.float().sin().sum() * 8).backward()
        return [out.detach(), *(torch.zeros(1) if each.grad is None else each.grad for each in (*leaves, x))]

    def transformed(self, leaves: Sequence[Tensor], x: Tensor, body: Callable[..., Tensor]) -> Tensor:
        rest = leaves[1:]
        if self.transform == "vmap":
            return vmap(lambda row: body(leaves, row))(torch.stack([x, x * 2]))[1]
        if self.transform == "grad":
            of_leaf, of_x = grad(lambda leaf, x: body((leaf, *rest), x).sum(), (0, 1))(leaves[0], x)
            return of_leaf + of_x
        if self.transform == "jvp":
            return sum(jvp(lambda x: body(leaves, x), (x,), (x.detach().cos(),)), torch.zeros(()))
        if self.transform == "vmap_of_grad":
            per_sample = vmap(grad(lambda leaf, x: body((leaf, *rest), x).sum()), (None, 0))
            return per_sample(leaves[0], torch.stack([x, x * 2]))[1]
        return body(leaves, x)


def check(program: Program) -> bool:
    """Compare a program's bits; False if torch.amp refuses it: mixed 16-bit types, no batching rule, inference."""
    try:
        expected = program.run(native)
    except RuntimeError:
        return False
    # The second time with the general handlers, which a region has while its casts are recorded.
    for around in (contextlib.nullcontext, record_casts):
        try:
            with around():
                got = program.run(ours)
        except RuntimeError as error:
            raise AssertionError(f"only ours raises, {around.__name__}: {program!r}") from error
        for n, (a, b) in enumerate(zip(expected, got, strict=True)):
            assert a.dtype is b.dtype
            a, b = a.nan_to_num(7.0), b.nan_to_num(7.0)
            near = n > 0 and program.may_share_other_casts and (a - b).norm() <= 0.02 * a.norm()
            assert near or torch.equal(a, b), (
                f"{f'gradient {n - 1}' if n else 'the result'} differs, {around.__name__}: {program!r}"
            )
    return True


@pytest.mark.filterwarnings("ignore")  # of torch's: fallbacks of vmap, casts of scalars
def test_random_programs() -> None:
    programs = [Program(seed) for seed in range(400)]
    compared = [program for program in programs if check(program)]
    assert len(compared) > len(programs) * 0.7
    assert {name for program in compared for name in program.given_twice} == set(OPERATORS)
    assert {name for program in compared for name in program.names} == {*OPERATORS, *CONTEXTS, *CHECKPOINTS}
    assert sum(not program.may_share_other_casts for program in compared) > len(compared) * 0.6
