"""Module rules in compiled code: they hold where they hold in eager code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampkit
from ampkit import autocast, float32_region
from tests.helpers.compiling import (
    MODULES,
    RULES,
    TORCH,
    Net,
    _fresh,  # noqa: F401  (for every test)
    assert_same,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:bf16 and fp16 are mixed")


def test_modules_compiled_one_by_one_in_a_region_with_module_rules() -> None:
    """`module.compile()` inside an eager model: paths still count from the model."""
    net, x = nn.Sequential(nn.Linear(8, 8), Net()), torch.randn(5, 8)
    policy = TORCH.for_modules({"1.norm": "float32", "1.last": torch.float16, "last": "float32"})
    with pytest.warns(UserWarning, match="the pattern 'last' .* means no module of Sequential, .*; nearest: 1.last"):
        with autocast("cpu", policy=policy):
            wanted = net(x)
    net[1].compile(backend="aot_eager", fullgraph=True)
    with autocast("cpu", policy=policy), torch.no_grad():
        got = net(x)
    assert_same([got], [wanted.detach()])
    assert got.dtype is torch.float16


def test_module_rules_of_a_region_in_and_of_one_around_a_compiled_function() -> None:
    """The innermost region that has module rules decides, as in an eager run."""
    net, x, inner = Net(), torch.randn(5, 8), TORCH.for_modules({"last": "float32"})

    def function(net: nn.Module, x: Tensor) -> list[Tensor]:
        found = [net(x)]
        with autocast("cpu", policy=inner):
            found.append(net(x))
        with autocast("cpu", torch.float16):
            found.append(net(x))
        return found

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with autocast("cpu", policy=MODULES):
        wanted, got = function(net, x), compiled(net, x)
    assert_same(got, wanted)
    assert [t.dtype for t in got] == [torch.float16, torch.float32, torch.float16]


def test_a_wrapped_module_compiles() -> None:
    net, x = ampkit.wrap_forward(Net(), "cpu", policy=MODULES), torch.randn(5, 8)
    wanted = net(x)
    assert wanted.dtype is torch.float16
    assert_same([torch.compile(net, backend="aot_eager", fullgraph=True)(x)], [wanted])


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


class Outer(nn.Module):
    """A module whose `last` runs in a region inside, and once more outside of it."""

    def __init__(self, region: Callable[[], Any]) -> None:
        super().__init__()
        self.inner, self.last, self.region = Inner(), nn.Linear(8, 8), region

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        before = self.inner(x)
        with self.region():
            inside = self.last(x)
        return (*before, inside, self.last(x))


LAST = {"last": torch.float16}
NESTED = {
    "a rule": TORCH.for_modules(LAST),
    "a policy without rules": TORCH.for_modules({"inner": RULES, "inner.a": torch.float16, **LAST}),
    "a policy with rules": TORCH.for_modules({"inner": RULES.for_modules({"inner.a": "float16"}), **LAST}),
    "a dtype": TORCH.for_modules({"inner": "float32", "inner.a": torch.float16, **LAST}),
}
INNER_REGIONS: dict[str, Callable[[], Any]] = {
    "the same policy": lambda: autocast("cpu"),
    "an island": lambda: autocast("cpu", enabled=False),
    "torch's island": lambda: torch.autocast("cpu", enabled=False),
    "another policy": lambda: autocast("cpu", policy=TORCH),
    "another dtype": lambda: autocast("cpu", torch.float16),
    "float32": lambda: float32_region("cpu"),
}


@pytest.mark.parametrize("inside", INNER_REGIONS)
@pytest.mark.parametrize("rules", NESTED)
def test_module_rules_hold_in_compiled_code_where_they_hold_in_eager_code(rules: str, inside: str) -> None:
    """Inside a module whose rule is a policy, and inside regions within the region, rules are no longer the outer."""
    net, x = Outer(INNER_REGIONS[inside]), torch.randn(3, 8)

    def function(x: Tensor) -> Any:
        with autocast("cpu", policy=NESTED[rules]):
            return net(x)

    wanted = list(function(x))
    assert_same(list(torch.compile(function, backend="eager", fullgraph=True)(x)), wanted)
    torch._dynamo.reset()
    with autocast("cpu", policy=NESTED[rules]):
        assert_same(list(torch.compile(lambda x: net(x), backend="eager", fullgraph=True)(x)), wanted)


def test_module_rules_made_in_compiled_code() -> None:
    def function(net: nn.Module, x: Tensor) -> Tensor:
        with autocast("cpu", policy=TORCH.for_modules(LAST)):
            return net(x)

    with pytest.raises(Exception, match="call for_modules outside of it"):
        torch.compile(function, backend="eager", fullgraph=True)(Net(), torch.randn(5, 8))
