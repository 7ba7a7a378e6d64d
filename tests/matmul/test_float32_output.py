"""`Rule.LOWER_FLOAT32_OUT`: products of rounded operands that are not rounded again, with LOWER's gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from ampkit import Policy, Rule, autocast, record_casts
from ampkit.dispatch.casting import cast_to
from ampkit.matmul import float8_layers
from ampkit.matmul.float32_output import product
from tests.helpers.float8 import step

OPERATORS = ("aten::linear", "aten::mm", "aten::addmm", "aten::matmul", "aten::bmm", "aten::baddbmm")
LOWER = Policy.default("cpu")
POLICY = LOWER.with_rules(dict.fromkeys(OPERATORS, Rule.LOWER_FLOAT32_OUT))
BF16 = torch.bfloat16
_draw = torch.Generator().manual_seed(0)
X, W, B = (torch.randn(shape, generator=_draw) for shape in ((3, 5, 8), (6, 8), (6,)))

# For each call, whether its gradients have the bits of LOWER's: those of float32 copies do not.
Call = Callable[[Tensor, Tensor, Tensor], Tensor]
PRODUCTS: dict[str, tuple[Call, bool]] = {
    "linear": (F.linear, True),
    "linear without a bias": (lambda x, w, b: F.linear(x, w), True),
    "linear of a vector": (lambda x, w, b: F.linear(x[0, 0], w, b), False),
    "mm": (lambda x, w, b: torch.mm(x[0], w.t()), True),
    "addmm": (lambda x, w, b: torch.addmm(b, x[0], w.t()), True),
    "addmm with alpha": (lambda x, w, b: torch.addmm(b, x[0], w.t(), alpha=0.5, beta=0), False),
    "matmul with a matrix": (lambda x, w, b: x @ w.t(), True),
    "matmul of broadcast batches": (lambda x, w, b: x[None] @ x.mT, False),
    "matmul of many batches": (lambda x, w, b: x[None, None] @ x.mT[None, None], True),
    "bmm": (lambda x, w, b: torch.bmm(x, x.mT), True),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b[:5], x, x.mT), True),
    "vmap": (lambda x, w, b: torch.vmap(lambda row: F.linear(row, w, b))(x), False),
}


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_results_are_float32_products_of_rounded_operands(name: str, dtype: torch.dtype) -> None:
    call, has_bits = PRODUCTS[name]
    want = call(*(each.to(dtype).float() for each in (X, W, B)))
    results = []
    for policy in (POLICY, LOWER):
        operands = [each.clone().requires_grad_() for each in (X, W, B)]
        with autocast("cpu", dtype, policy=policy):
            y = call(*operands)
        y.backward(torch.ones_like(y))
        results.append((y, *(torch.zeros(()) if each.grad is None else each.grad for each in operands)))
    ours, lower = results
    assert ours[0].dtype is torch.float32
    torch.testing.assert_close(ours[0], want, rtol=1e-6, atol=1e-6)
    assert not torch.equal(ours[0], lower[0].float()), "the result was rounded to 16 bits"
    for found, wanted in zip(ours[1:], lower[1:], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0 if has_bits else 0.02, atol=0 if has_bits else 0.02)


def test_ineligible_tensors_are_left_alone_and_other_operators_refuse_the_rule() -> None:
    with autocast("cpu", BF16, policy=POLICY):
        assert F.linear(X.double(), W.double()).dtype is torch.float64
        assert torch.mm(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64)).dtype is torch.int64
        assert torch.func.jvp(lambda x: F.linear(x, W), (X,), (X,))[1].dtype is torch.float32
    with pytest.raises(ValueError, match=r"'aten::softmax.int' cannot follow LOWER_FLOAT32_OUT: it has no form with"):
        POLICY.with_rules({"aten::softmax.int": Rule.LOWER_FLOAT32_OUT})


@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        (torch.mm, [(2, 3, 4), (4, 3)]),
        (torch.bmm, [(2, 3, 4), (4, 3)]),
        (torch.mm, [(3, 5), (4, 3)]),
        (torch.addmm, [(6, 3), (1, 4), (4, 3)]),
        (torch.addmm, [(2, 5, 3), (5, 4), (4, 3)]),
        (torch.baddbmm, [(1, 2, 5, 3), (2, 5, 4), (2, 4, 3)]),
        (F.linear, [(1, 4), (3, 4), (5, 3)]),
    ],
)
def test_shapes_that_lower_refuses_raise(call: Callable[..., Tensor], shapes: list[tuple[int, ...]]) -> None:
    for policy in (POLICY, LOWER):
        with autocast("cpu", BF16, policy=policy), pytest.raises(RuntimeError):
            call(*map(torch.ones, shapes))


def test_results_can_be_written_in_place_and_other_devices_are_left_alone() -> None:
    factor = torch.ones(6, requires_grad=True)
    for name in ("linear", "mm", "bmm", "matmul of many batches"):
        with autocast("cpu", BF16, policy=POLICY):
            PRODUCTS[name][0](X, W.clone().requires_grad_(), B).detach_()
            with torch.no_grad():
                y = PRODUCTS[name][0](X, W, B)
            y.mul_(factor[:1])
    with autocast("xpu", BF16, policy=Policy.default("xpu").with_rules({"aten::mm": Rule.LOWER_FLOAT32_OUT})):
        assert torch.mm(X[0].to(BF16), W.t().to(BF16)).dtype is BF16


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
    assert float8_layers(policy, model) == ["layer (8, 8) LOWER", "head (16, 8) LOWER_FLOAT32_OUT"]
    with record_casts() as record, autocast("cpu", BF16, policy=policy):
        logits = model(x)
        F.linear(x, model.head.weight)
    assert logits.dtype is torch.float32
    calls = [call for call in record.calls if call.op == "aten::linear"]
    assert [(call.rule.name, call.cached) for call in calls] == [("LOWER", 0), ("LOWER_FLOAT32_OUT", 0), ("LOWER", 1)]
    assert {dtype for call in calls for dtype in call.computed_in} == {BF16}
    want, lower = (step(model, x, grad, autocast("cpu", BF16, policy=each)) for each in (policy, LOWER))
    torch.testing.assert_close(want[1:], lower[1:], rtol=0, atol=0)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="global hooks"):  # torch's, of rules for modules
        found = step(compiled, x, grad, autocast("cpu", BF16, policy=policy))
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_backward_in_a_region_and_of_itself() -> None:
    """The region would give backward's products float32 results."""
    x, w, exact = X[0].clone().requires_grad_(), W.clone().requires_grad_(), W.double().requires_grad_()
    with autocast("cpu", BF16, policy=POLICY):
        y = F.linear(x, w).square().sum()
        (inside,) = torch.autograd.grad(y, x, create_graph=True)
        (twice,) = torch.autograd.grad(inside.sum(), w, retain_graph=True)
    assert torch.equal(inside, torch.autograd.grad(y, x)[0])
    (wanted,) = torch.autograd.grad((2 * (X[0].double() @ exact.t()) @ exact).sum(), exact)
    torch.testing.assert_close(twice.double(), wanted, rtol=0.05, atol=0.5)


def test_torchs_own_product_has_no_derivative() -> None:
    """As README.md says; on no device, so that the meta device shows it."""
    left, right = (torch.empty(4, 4, dtype=BF16, device="meta", requires_grad=True) for _ in range(2))
    with pytest.raises(RuntimeError, match="derivative for aten::mm is not implemented"):
        torch.mm(left, right, out_dtype=torch.float32).sum().backward()


def test_cuda_multiplies_16_bit_matrices() -> None:
    """As a graph has it that is made without a GPU."""

    def both(x: Tensor, w: Tensor, batches: Tensor) -> tuple[Tensor, Tensor]:
        cast = cast_to("cuda", BF16)
        return product(torch.ops.aten.linear.default, cast, x, w), product(torch.ops.aten.bmm.default, cast, x, batches)

    with torch.no_grad(), FakeTensorMode():
        operands = [torch.empty(shape, dtype=BF16, device="cuda") for shape in ((2, 3, 8), (4, 8), (2, 8, 4))]
        graph = make_fx(both)(*operands).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert {name for name in called if "mm" in name or "copy" in name} == {"aten.mm.dtype", "aten.bmm.dtype"}
