"""Higher-order operators in regions, eager and compiled.

The oracle is torch.autocast around the same call: equal dtypes and equal values, of outputs and of gradients.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch.nn.attention.flex_attention import flex_attention

from ampkit import Policy, autocast

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit",
    "ignore:flex_attention called without torch.compile",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
TORCH = Policy.torch("cpu")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert not any(torch.is_autocast_enabled(device) for device in torch._C._autocast_supported_devices())


def branches(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda a, b: a @ b, lambda a, b: (a @ b) * 2, (x, w))


def loop(x: Tensor, w: Tensor) -> Tensor:
    return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, torch.tanh(a @ w).float()), (torch.tensor(0), x))[1]


def scanned(x: Tensor, w: Tensor) -> Tensor:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(row.unsqueeze(0) @ w).squeeze(0).float()
        return carry + y, y

    return scan(step, torch.zeros(8), x)[1]


def summed(x: Tensor, w: Tensor) -> Tensor:
    return associative_scan(lambda a, b: a + b, x @ w, 0, combine_mode="generic")


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cond": branches, "while_loop": loop, "scan": scanned, "associative_scan": summed,
}


def gradients(call: Callable[[Tensor, Tensor], Tensor], *, inside: Any = None) -> list[Tensor]:
    """A call's output and its gradients; `inside` is a region that holds the call, and not backward."""
    torch.manual_seed(0)
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    if inside is None:
        out = call(x, w)
    else:
        with inside:
            out = call(x, w)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, w])]


def assert_same(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert [t.dtype for t in got] == [t.dtype for t in wanted]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_eager(name: str) -> None:
    """Backward is called outside the region, and recomputes what these operators recompute as the forward was."""
    call = FUNCTIONS[name]
    wanted = gradients(call, inside=torch.autocast("cpu"))
    got = gradients(call, inside=autocast("cpu", policy=TORCH))
    assert_same(got, wanted)
    assert not torch.equal(got[1], gradients(call)[1]), "nothing was cast"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled(name: str) -> None:
    """In a region inside the compiled function, and in one around its call."""
    call = FUNCTIONS[name]
    if name == "scan":      # torch 2.11's AOTAutograd cannot differentiate this one, in whatever region or none
        try:
            gradients(torch.compile(call, backend="aot_eager", fullgraph=True))
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if "scan might be aliasing" not in str(error):
                raise
            pytest.skip("this torch does not differentiate a compiled scan without a region either")

    def inside(x: Tensor, w: Tensor) -> Tensor:
        with autocast("cpu", policy=TORCH):
            return call(x, w)

    wanted = gradients(call, inside=autocast("cpu", policy=TORCH))
    assert_same(gradients(torch.compile(inside, backend="aot_eager", fullgraph=True)), wanted)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert_same(gradients(compiled, inside=autocast("cpu", policy=TORCH)), wanted)


@pytest.mark.parametrize("policy", [TORCH, Policy.default("cpu")], ids=str)
def test_flex_attention(policy: Policy) -> None:
    """Its list entry is torch's: the inputs are cast as for any attention."""
    q = torch.randn(1, 2, 16, 16)
    with torch.autocast("cpu"):
        wanted = flex_attention(q, q, q)
    with autocast("cpu", policy=policy):
        got = flex_attention(q, q, q)
    assert got.dtype is wanted.dtype is torch.bfloat16
    assert torch.equal(got, wanted)
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    with autocast("cpu", policy=policy):
        assert compiled(q, q, q).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("function", [lambda x: x / 3.1, lambda x: 3.1 / x, lambda x: (x * 3.1).sum() * 0.5])
def test_numbers_that_autograd_saves_under_a_transform(function: Any, dtype: torch.dtype) -> None:
    """Once a policy of the process names the operator, in regions of others too."""
    named = Policy.torch("cpu").with_rules({"aten::div": "keep", "aten::mul": "keep"})
    x, results = torch.linspace(0.5, 2.0, 6).to(dtype), []
    for region in (torch.autocast("cpu"), autocast("cpu", policy=named), autocast("cpu", policy=Policy.torch("cpu"))):
        with region:
            results.append(torch.func.grad(lambda x: function(x).sum())(x))
    assert all(torch.equal(result, results[0]) for result in results[1:])
