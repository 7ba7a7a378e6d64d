"""`Rule.LOWER_FLOAT32_OUT`: products of rounded operands that are not rounded again, with LOWER's gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import Policy, Rule, WeightCache, autocast, record_casts
from ampkit.region.float32_out import product
from tests.helpers.float8 import same, step

OPERATORS = ("aten::linear", "aten::mm", "aten::addmm", "aten::matmul", "aten::bmm", "aten::baddbmm")
LOWER = Policy.default("cpu")
POLICY = LOWER.with_rules(dict.fromkeys(OPERATORS, Rule.LOWER_FLOAT32_OUT))
BF16 = torch.bfloat16
_draw = torch.Generator().manual_seed(0)
X, W, B = (torch.randn(shape, generator=_draw) for shape in ((3, 5, 8), (6, 8), (6,)))

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
PRODUCTS: dict[str, Call] = {
    "linear": F.linear,
    "linear without a bias": lambda x, w, b: F.linear(x, w),
    "linear of a vector": lambda x, w, b: F.linear(x[0, 0], w, b),
    "linear of no rows": lambda x, w, b: F.linear(x[:0], w, b),
    "mm": lambda x, w, b: torch.mm(x[0], w.t()),
    "addmm": lambda x, w, b: torch.addmm(b, x[0], w.t()),
    "addmm with alpha": lambda x, w, b: torch.addmm(b, x[0], w.t(), alpha=0.5, beta=0),
    "matmul with a matrix": lambda x, w, b: x @ w.t(),
    "matmul of batches": lambda x, w, b: x @ x.mT,
    "matmul of broadcast batches": lambda x, w, b: x[None] @ x.mT,
    "bmm": lambda x, w, b: torch.bmm(x, x.mT),
    "baddbmm": lambda x, w, b: torch.baddbmm(b[:5], x, x.mT),
}


def results(call: Call, policy: Policy, dtype: torch.dtype, grad: Tensor | None = None) -> list[Any]:
    """The result in a region, and the gradients of operands for the gradient of the result."""
    given = [each.clone().requires_grad_() for each in (X, W, B)]
    with autocast("cpu", dtype, policy=policy):
        y = call(*given)
    if grad is not None:
        y.backward(grad.to(y.dtype))
    return [y.detach(), *(each.grad for each in given)]


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_results_are_float32_products_of_rounded_operands(name: str, dtype: torch.dtype) -> None:
    """Gradients have the bits of LOWER's, apart from biases' and of what float32 copies compute."""
    call = PRODUCTS[name]
    want = call(*(each.to(dtype).float() for each in (X, W, B)))
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, lower = results(call, POLICY, dtype, grad), results(call, LOWER, dtype, grad)
    assert found[0].dtype is torch.float32
    torch.testing.assert_close(found[0], want, rtol=1e-6, atol=1e-6)
    if want.numel():
        assert not torch.equal(found[0], lower[0].float())     # which was rounded
    for ours, theirs in zip(found[1:], lower[1:], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and name not in ("linear of a vector", "addmm with alpha", "matmul of broadcast batches"):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if ours.dim() > 1 else 0.05)
        elif ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


def test_what_is_not_lowered_is_left_alone() -> None:
    with autocast("cpu", BF16, policy=POLICY):
        assert F.linear(X.double(), W.double()).dtype is torch.float64
        assert torch.mm(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64)).dtype is torch.int64
        mapped = torch.vmap(lambda x: F.linear(x, W, B))(X)
        assert torch.equal(mapped, F.linear(X, W, B))
        assert torch.func.jvp(lambda x: F.linear(x, W), (X,), (X,))[1].dtype is torch.float32
    with pytest.raises(ValueError, match=r"'aten::softmax.int' cannot follow LOWER_FLOAT32_OUT: it has no form with"):
        POLICY.with_rules({"aten::softmax.int": Rule.LOWER_FLOAT32_OUT})


class Tied(nn.Module):
    """An embedding whose weight is the head's too, behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x + self.embedding.weight[:1]))


def test_the_head_of_a_model_with_tied_weights() -> None:
    """Casts of its weight are LOWER's and cached; a record shows the rule; compiled code has the same bits."""
    model, x, grad = Tied(), torch.randn(4, 8), torch.randn(4, 16).to(BF16)
    policy = LOWER.for_modules(model, {"head": POLICY})
    assert [layer.rule for layer in policy.check(model).layers] == ["LOWER", "LOWER_FLOAT32_OUT"]
    cache = WeightCache()
    with record_casts() as record, autocast("cpu", BF16, policy=policy, cache=cache):
        logits = model(x)
        F.linear(logits, model.head.weight.t())      # LOWER, of a view
        model.head(x)
        with autocast("cpu", BF16, policy=LOWER):
            F.linear(x, model.head.weight)
    assert logits.dtype is torch.float32
    calls = [call for call in record.calls if call.op == "aten::linear"]
    assert [(call.rule.name, call.computed_in[0], call.cached) for call in calls[1:]] == [
        ("LOWER_FLOAT32_OUT", BF16, 0), ("LOWER", BF16, 0), ("LOWER_FLOAT32_OUT", BF16, 1), ("LOWER", BF16, 1)
    ]
    want = step(model, x, grad, autocast("cpu", BF16, policy=policy))
    lower = step(model, x, grad, autocast("cpu", BF16, policy=LOWER))
    assert same(want[1:], lower[1:])
    torch._dynamo.reset()
    region = autocast("cpu", BF16, policy=LOWER.for_modules(model, {"head": POLICY}))
    compiled: Any = region(model.forward)
    compiled = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    found = compiled(x)
    found.backward(grad.float())
    assert torch.equal(found, want[0])
    assert same([parameter.grad for parameter in model.parameters()], want[2:])
    torch._dynamo.reset()


def test_backward_in_a_region_and_of_itself() -> None:
    """The region would give backward's products float32 results."""
    x, w = X[0].clone().requires_grad_(), W.clone().requires_grad_()
    with autocast("cpu", BF16, policy=POLICY):
        y = F.linear(x, w).square().sum()
        inside, = torch.autograd.grad(y, x, retain_graph=True)
        twice, = torch.autograd.grad(torch.autograd.grad(y, x, create_graph=True)[0].sum(), w, retain_graph=True)
    outside, = torch.autograd.grad(y, x)
    assert torch.equal(inside, outside)
    exact = W.double().requires_grad_()
    wanted = (2 * (X[0].double() @ exact.t()) @ exact).sum()
    assert torch.allclose(twice.double(), torch.autograd.grad(wanted, exact)[0], rtol=0.05, atol=0.5)


@pytest.mark.parametrize(("op", "shapes", "called"), [
    (torch.ops.aten.linear.default, ((2, 3, 8), (4, 8)), "aten::mm.dtype"),
    (torch.ops.aten.bmm.default, ((2, 3, 8), (2, 8, 4)), "aten::bmm.dtype"),
])
def test_cuda_multiplies_16_bit_matrices(op: Any, shapes: Any, called: str) -> None:
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        operands = [torch.empty(shape, dtype=BF16, device="cuda") for shape in shapes]
        with Names():
            assert product(op, BF16, *operands).dtype is torch.float32
    assert called in names
    assert "aten::_to_copy" not in names
