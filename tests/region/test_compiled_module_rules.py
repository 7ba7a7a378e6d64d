"""Module rules in compiled code: they hold where they hold in eager code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampkit
from ampkit import Policy, autocast
from tests.helpers.compiling import (
    RULES,
    TORCH,
    Net,
    _fresh,  # noqa: F401  (for every test)
    assert_same,
    module_rules,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:bf16 and fp16 are mixed")


def test_modules_compiled_one_by_one_in_a_region_with_module_rules() -> None:
    """Modules of one class share their code; what was compiled for one without a rule is not run for one with."""
    net, x = nn.Sequential(*(Inner() for _ in range(4))), torch.randn(5, 8)
    policy = TORCH.for_modules(net, {"1": "float32", "3.a": torch.float16})
    for module in net:
        module.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with autocast("cpu", policy=policy):
            found = [module(x, more={"x": x})[0].dtype for module in net]
        assert found == [torch.bfloat16, torch.float32, torch.bfloat16, torch.float16]
        with autocast("cpu", policy=TORCH):
            assert {module(x, more={"x": x})[0].dtype for module in net} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:none of the modules that this policy's rules bind")     # in the third
def test_a_compiled_function_called_with_another_model() -> None:
    net, other, x = Net(), Net(), torch.randn(5, 8)
    compiled = torch.compile(lambda net, x: net(x), backend="eager", fullgraph=True)
    policy = TORCH.for_modules(net, {"last": "float32"}).for_modules(other, {"first": torch.float16})
    for _ in range(2):
        for model in (other, net, Net()):
            with autocast("cpu", policy=policy):
                assert_same([compiled(model, x)], [model(x)])
        with autocast("cpu", policy=TORCH.for_modules(other, {"last": "float32"})):
            assert compiled(net, x).dtype is torch.bfloat16
            assert compiled(other, x).dtype is torch.float32


def test_a_wrapped_module_compiles() -> None:
    net, x = Net(), torch.randn(5, 8)
    ampkit.wrap_forward(net, "cpu", policy=module_rules(net))
    wanted = net(x)
    assert wanted.dtype is torch.float16
    assert_same([torch.compile(net, backend="aot_eager", fullgraph=True)(x)], [wanted])


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, *, more: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return self.a(x), self.b(x), more["x"] * more["x"]


class Outer(nn.Module):
    """A module whose `last` runs before, in a region inside, and once more outside of it."""

    def __init__(self, region: Callable[[], Any]) -> None:
        super().__init__()
        self.inner, self.last, self.region = Inner(), nn.Linear(8, 8), region

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        before = self.inner(x, more={"x": x.bfloat16()})
        with self.region():
            inside = self.last(x)
        return (*before, inside, self.last(x))


LAST = {"last": torch.float16}
NESTED: dict[str, Callable[[nn.Module], Policy]] = {
    "a rule": lambda net: TORCH.for_modules(net, LAST),
    "a policy": lambda net: TORCH.for_modules(net, {"inner": RULES, "inner.a": torch.float16, **LAST}),
    "a dtype": lambda net: TORCH.for_modules(net, {"inner": "float32", "inner.a": torch.float16, **LAST}),
}
INNER_REGIONS: dict[str, Callable[[], Any]] = {
    "the same policy": lambda: autocast("cpu"),
    "disabled": lambda: autocast("cpu", enabled=False),
    "torch's, disabled": lambda: torch.autocast("cpu", enabled=False),
    "another policy": lambda: autocast("cpu", policy=TORCH),
    "another dtype": lambda: autocast("cpu", torch.float16),
}


@pytest.mark.parametrize("inside", INNER_REGIONS)
@pytest.mark.parametrize("rules", NESTED)
def test_module_rules_hold_in_compiled_code_where_they_hold_in_eager_code(rules: str, inside: str) -> None:
    """Inside a module whose rule is a policy, and inside regions within the region, rules are no longer the outer."""
    if rules == "a dtype" and torch.__version__.startswith("2.11."):
        pytest.skip("Dynamo of torch 2.11 cannot compare dictionaries by identity")
    net, x = Outer(INNER_REGIONS[inside]), torch.randn(3, 8)
    policy = NESTED[rules](net)

    def function(x: Tensor) -> Any:
        outside = net(x)
        with autocast("cpu", policy=policy):
            return (*net(x), *outside)

    wanted = list(function(x))
    assert_same(list(torch.compile(function, backend="eager", fullgraph=True)(x)), wanted)
    torch._dynamo.reset()
    with autocast("cpu", policy=policy):
        got = list(torch.compile(lambda x: net(x), backend="eager", fullgraph=True)(x))
    assert_same(got, wanted[: len(got)])


def test_a_module_that_raises_in_compiled_code_takes_its_region_along() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise LookupError

    net, x = nn.Sequential(Raises(), nn.Linear(4, 4)), torch.randn(2, 4)
    policy = TORCH.for_modules(net, {"0": "float32"})

    def function(x: Tensor) -> Tensor:
        try:
            with autocast("cpu", policy=policy):
                net[0](x)
        except LookupError:
            pass
        with autocast("cpu", policy=policy):
            return net[1](x)

    assert torch.compile(function, backend="eager")(x).dtype is function(x).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_module_rules_made_in_compiled_code() -> None:
    def function(net: nn.Module, x: Tensor) -> Tensor:
        with autocast("cpu", policy=TORCH.for_modules(net, LAST)):
            return net(x)

    with pytest.raises(Exception, match="for_modules was called in the function that is compiled; call it outside"):
        torch.compile(function, backend="eager", fullgraph=True)(Net(), torch.randn(5, 8))
