"""Graph capture ahead of time: torch.export, make_fx and torch.jit.trace record the casts; scripts obey the region."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ampkit import Policy, Rule, autocast
from tests.helpers.compiled_regions import INSIDE, TORCH, Net, assert_same
from tests.helpers.regions import like_torch

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit",
    "ignore:.*TracerWarning",
    "ignore:.isinstance.treespec:FutureWarning",
    "ignore:While compiling, we found certain side effects:UserWarning",  # strict, with module rules: their hooks
)


class Exported(nn.Module):
    """A function of a net, as the module that export takes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = Net()
        self.function = INSIDE[name](self.net)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.net, x)


# Strict export traces by Dynamo, as tests of compiled code do for all of them: here one of each kind.
@pytest.mark.parametrize(
    ("name", "strict"),
    [*((name, False) for name in INSIDE), *((name, True) for name in ("for_modules", "decorated", "made inside"))],
)
def test_export_records_the_region(name: str, strict: bool) -> None:
    """The exported program has the region's casts in it and nothing of ampkit, also once decomposed and reloaded."""
    module, x = Exported(name), torch.randn(3, 8)
    program = torch.export.export(module, (x,), strict=strict)
    assert_same(program.module()(x), module(x))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    torchs_own = name == "disabled_regions"  # `torch.autocast` inside is a higher-order operator
    assert torchs_own or all(isinstance(target, torch._ops.OpOverload) for target in targets)
    assert_same(program.run_decompositions().module()(x), module(x))


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
    net, x = Net(), torch.randn(3, 8)
    with autocast("cpu", torch.float16, policy=TORCH):
        program = torch.export.export(net, (x,))
        wanted = net(x)
    assert wanted.dtype is torch.float16
    assert_same(program.module()(x), wanted)


def test_pre_dispatch_tracing_outside_a_region_is_untouched() -> None:
    """Outside regions and in disabled ones, `make_fx` records the operators that it records without ampkit."""
    weight, x = torch.randn(8, 4), torch.randn(3, 8)

    def disabled_region(x: Tensor) -> Tensor:
        with autocast("cpu"), autocast("cpu", enabled=False):
            return x @ weight

    functions: list[Callable[[Tensor], Tensor]] = [lambda x: x @ weight, disabled_region]
    for function in functions:
        graph = make_fx(function, pre_dispatch=True)(x)
        assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [torch.ops.aten.matmul.default]


def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(torch.mm(x, w), -1)


@pytest.mark.parametrize("policy", [TORCH, None, TORCH.with_rules({"aten::softmax.int": Rule.FLOAT32})], ids=str)
def test_a_scripted_function_obeys_the_region(policy: Policy | None) -> None:
    """Also after the executor has specialized it, and outside again."""
    scripted, x, w = torch.jit.script(product), torch.randn(3, 4), torch.randn(4, 4)
    for _ in range(4):
        with autocast("cpu", policy=policy):
            assert torch.equal(scripted(x, w), product(x, w))
            assert scripted(x, w).dtype is product(x, w).dtype
        assert torch.equal(scripted(x, w), product(x, w))


def test_a_trace_of_float32_products_can_be_saved_and_trained() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    with autocast("cpu", policy=TORCH.with_rules({"aten::linear": Rule.LOWER_FLOAT32_OUT})):
        wanted, traced = layer(x), torch.jit.trace(layer, x)
    torch.jit.save(traced, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(x), wanted)
    traced(x).sum().backward()
    assert layer.weight.grad is not None


def test_trace_inside_a_region() -> None:
    """With its cache on, torch.amp cannot trace a module twice used; ours steps aside while tracing."""
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    twice = nn.Sequential(layer, layer)
    with torch.autocast("cpu"):
        layer(x)
        with pytest.raises(RuntimeError, match="Tensor that requires grad as a constant"):
            torch.jit.trace(twice, x, check_trace=False)
    for options in ({"cache_enabled": False}, {}):
        with like_torch(**options):
            wanted = twice(x)
            traced = torch.jit.trace(twice, x)
        assert torch.equal(traced(x), wanted)
        assert traced(x).dtype is torch.bfloat16
        with torch.no_grad():
            layer.weight.mul_(0.5)
        assert not torch.equal(traced(x), wanted), "a cast weight was baked into the trace"
