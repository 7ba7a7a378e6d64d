"""Graph capture ahead of time: torch.export, make_fx and torch.jit.trace record the casts; scripts obey the region."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ampkit import Policy, Rule, WeightCache, autocast
from tests.helpers.regions import like_torch

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit",
    "ignore:.*TracerWarning",
    "ignore:.isinstance.treespec:FutureWarning",
    "ignore:While compiling, we found certain side effects:UserWarning",     # strict, with module rules: their hooks
)
TORCH = Policy.torch("cpu")
POLICIES = {
    "torch": TORCH,
    "default": None,
    "with_rules": TORCH.with_rules({"aten::softmax.int": Rule.FLOAT32, "aten::linear": Rule.KEEP}),
    "for_modules": TORCH,
}


class Net(nn.Module):
    """Two products and a softmax, in a region of its own."""

    def __init__(self, policy: Policy | None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.policy, self.dtype = policy, dtype

    def bind(self) -> None:
        """Give the policy a rule for a module of this net."""
        assert self.policy is not None
        self.policy = self.policy.for_modules(self, {"last": "float32"})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with autocast("cpu", self.dtype, policy=self.policy):
            y = self.last(torch.relu(self.first(x)))
            with autocast("cpu", enabled=False):
                z = torch.softmax(y.float(), -1) @ self.last.weight
            return torch.softmax(y, -1), z


def assert_same(got: Any, wanted: Any) -> None:
    assert [t.dtype for t in got] == [t.dtype for t in wanted]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_export_records_the_region(name: str, strict: bool) -> None:
    """The exported program has the region's casts in it and nothing of ampkit, also once decomposed and reloaded."""
    net, x = Net(POLICIES[name]), torch.randn(3, 8)
    if name == "for_modules":
        net.bind()
        assert net(x)[0].dtype is torch.float32
    program = torch.export.export(net, (x,), strict=strict)
    assert_same(program.module()(x), net(x))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert all(isinstance(target, torch._ops.OpOverload) for target in targets)
    assert_same(program.run_decompositions().module()(x), net(x))


def test_strict_export_refuses_torchs_autocast_inside_a_region() -> None:
    """It records that one and does not run it, so the exported casts would be wrong in silence."""

    class Rotary(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            with autocast("cpu"):
                input = super().forward(input)
                with torch.autocast("cpu", enabled=False):
                    return super().forward(input.float())

    net, x = Rotary(4, 4), torch.randn(2, 4)
    assert_same([torch.export.export(net, (x,), strict=False).module()(x)], [net(x)])
    with pytest.raises(Exception, match="strict=False"):
        torch.export.export(net, (x,), strict=True)


def test_a_region_around_export_is_recorded() -> None:
    lin, x = nn.Linear(8, 4), torch.randn(3, 8)
    with autocast("cpu", torch.float16, policy=TORCH):
        program = torch.export.export(lin, (x,))
        wanted = lin(x)
    assert_same([program.module()(x)], [wanted])
    assert wanted.dtype is torch.float16


def test_pre_dispatch_tracing_outside_a_region_is_untouched() -> None:
    """The look-up that the mode goes before stays what it was where no region is open, or in a disabled region."""
    weight, x = torch.randn(8, 4), torch.randn(3, 8)

    def product(x: Tensor) -> Tensor:
        return x @ weight

    def disabled_region(x: Tensor) -> Tensor:
        with autocast("cpu"), autocast("cpu", enabled=False):
            return product(x)

    functions: list[Callable[[Tensor], Tensor]] = [product, disabled_region]
    for function in functions:
        graph = make_fx(function, pre_dispatch=True)(x)
        assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [torch.ops.aten.matmul.default]


def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(torch.mm(x, w), -1)


@pytest.mark.parametrize("policy", [TORCH, None, TORCH.with_rules({"aten::softmax.int": Rule.FLOAT32})], ids=str)
def test_a_scripted_function_obeys_the_region(policy: Policy | None) -> None:
    """Also after the executor has specialised it, and outside again."""
    scripted, x, w = torch.jit.script(product), torch.randn(3, 4), torch.randn(4, 4)
    for _ in range(4):
        with autocast("cpu", policy=policy):
            assert torch.equal(scripted(x, w), product(x, w))
            assert scripted(x, w).dtype is product(x, w).dtype
        assert torch.equal(scripted(x, w), product(x, w))


def test_trace_inside_a_region() -> None:
    """With its cache on, torch.amp cannot trace a module twice used; ours steps aside while tracing."""
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    twice = nn.Sequential(layer, layer)
    with torch.autocast("cpu"):
        layer(x)
        with pytest.raises(RuntimeError, match="Tensor that requires grad as a constant"):
            torch.jit.trace(twice, x, check_trace=False)
    for options in ({"cache_enabled": False}, {}, {"cache": WeightCache()}):
        with like_torch(**options):
            wanted = twice(x)
            traced = torch.jit.trace(twice, x)
        assert torch.equal(traced(x), wanted)
        assert traced(x).dtype is torch.bfloat16
        with torch.no_grad():
            layer.weight.mul_(0.5)
        assert not torch.equal(traced(x), wanted), "a cast weight was baked into the trace"
