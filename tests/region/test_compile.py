"""Regions and torch.compile: compiled code computes what the eager region computes, forward and backward.

The oracle is the same function run eagerly: equal dtypes and equal bits under `eager` and `aot_eager`; under inductor,
which fuses and so rounds less often, equal dtypes and values within the region's precision.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampkit
from ampkit import Policy, Rule, autocast
from tests.helpers.compiling import (
    EXACT,
    RULES,
    TORCH,
    Net,
    _fresh,  # noqa: F401  (for every test)
    assert_same,
    module_rules,
    outputs,
    policies,
    step,
)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:bf16 and fp16 are mixed")


def plain(policy: Policy | None, dtype: torch.dtype | None = None) -> Callable[..., Any]:
    def function(net: nn.Module, x: Tensor) -> Any:
        with autocast("cpu", dtype, policy=policy):
            return outputs(net, x)

    return function


def disabled_regions(net: Any, x: Tensor) -> Any:
    """Regions in a region: other dtypes, disabled, and torch's own."""
    with autocast("cpu", torch.bfloat16):
        y = net.first(x)
        with autocast("cpu", enabled=False):
            y = net.norm(y.float())
        with autocast("cpu", torch.float16):
            half = net.last(y)
        with torch.autocast("cpu", enabled=False):
            plain = net.last(y)
        with torch.autocast("cpu", dtype=torch.float16):
            ours = net.last(y)
    return half, plain, ours


@autocast("cpu", policy=RULES)
def decorated(net: nn.Module, x: Tensor) -> Any:
    return outputs(net, x)


def made_inside(net: nn.Module, x: Tensor) -> Any:
    with autocast("cpu", policy=Policy.torch("cpu")):
        return outputs(net, x)


# Each makes the function for a net.
INSIDE: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "torch": lambda net: plain(TORCH),
    "torch fp16": lambda net: plain(TORCH, torch.float16),
    "default": lambda net: plain(None),
    "with_rules": lambda net: plain(RULES),
    "for_modules": lambda net: plain(module_rules(net)),
    "for_modules by class": lambda net: plain(
        Policy.default("cpu").for_modules(net, {nn.LayerNorm: torch.float16, nn.Linear: "float32"})
    ),
    "a policy for a module": lambda net: plain(TORCH.for_modules(net, {"last": RULES})),
    "disabled_regions": lambda net: disabled_regions,
    "decorated": lambda net: decorated,
    "made inside": lambda net: made_inside,
}


@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("name", INSIDE)
def test_a_region_in_a_compiled_function_is_the_eager_region(name: str, backend: str) -> None:
    net, x = Net(), torch.randn(5, 8)
    function = INSIDE[name](net)
    wanted = step(function, net, x)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(2):
        assert_same(step(compiled, net, x), wanted)


@pytest.mark.parametrize("name", ["default", "for_modules", "decorated"])
def test_inductor_gives_the_eager_dtypes(name: str) -> None:
    net, x = Net(), torch.randn(5, 8)
    function = INSIDE[name](net)
    compiled = torch.compile(function, fullgraph=True)
    assert_same(step(compiled, net, x), step(function, net, x), exact=False)


def test_the_policies_of_these_tests_differ() -> None:
    """Otherwise the tests above would pass with one policy in place of all."""
    net, x = Net(), torch.randn(5, 8)
    seen = [[t.dtype for t in step(plain(policy), net, x)][:2] for policy in (TORCH, None)]
    assert seen[0] != seen[1]
    values = [step(plain(policy), net, x)[0] for policy in (TORCH, RULES, module_rules(net))]
    assert not torch.equal(values[0], values[1])
    assert values[2].dtype is torch.float16


@torch._dynamo.config.patch(recompile_limit=16)
@pytest.mark.parametrize("backend", EXACT)
def test_a_compiled_function_called_in_regions_never_serves_another_region(backend: str) -> None:
    """Two regions that differ in policy alone, in dtype, or in being there at all, each get code of their own."""
    net, x = Net(), torch.randn(5, 8)
    compiled = torch.compile(outputs, backend=backend, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        for policy in policies(net):
            for dtype in (torch.bfloat16, torch.float16) if policy is RULES else (torch.bfloat16,):
                with autocast("cpu", dtype, policy=policy, cache_enabled=False):
                    wanted, got = step(outputs, net, x), step(compiled, net, x)
                assert_same(got, wanted)
        with autocast("cpu", policy=RULES):
            with autocast("cpu", enabled=False):
                assert_same(step(compiled, net, x), step(outputs, net, x))
        assert_same(step(compiled, net, x), step(outputs, net, x))
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert counted <= len(policies(net)) + 3, "the second round compiled again"


def test_backward_after_the_region_is_that_of_the_eager_run() -> None:
    net, x = Net(), torch.randn(5, 8)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    gradients = []
    for function in (net, compiled):
        with autocast("cpu", policy=RULES):
            loss = function(x).float().square().sum()
        gradients.append(torch.autograd.grad(loss, list(net.parameters())))
    assert_same(list(gradients[0]), list(gradients[1]))


def test_register_op_is_seen_by_code_compiled_before() -> None:
    with torch.library._scoped_library("ampkit_compile_test", "FRAGMENT") as library:
        library.define("product(Tensor a, Tensor b) -> Tensor")
        library.impl("product", torch.mm, "CompositeExplicitAutograd")
        product = torch.ops.ampkit_compile_test.product.default

        def inside(a: Tensor, b: Tensor) -> Tensor:
            with autocast("cpu"):
                return product(a, b)

        def around(a: Tensor, b: Tensor) -> Tensor:
            return product(a, b)

        a, b = torch.randn(2, 3), torch.randn(3, 2)
        compiled_inside = torch.compile(inside, backend="aot_eager", fullgraph=True)
        compiled_around = torch.compile(around, backend="aot_eager", fullgraph=True)

        def dtypes() -> list[torch.dtype]:
            with autocast("cpu"):
                return [compiled_around(a, b).dtype, compiled_inside(a, b).dtype]

        try:
            assert dtypes() == [torch.float32, torch.float32]
            ampkit.register_op(product, Rule.LOWER)
            assert dtypes() == [torch.bfloat16, torch.bfloat16]
        finally:
            ampkit.policy.policy._Registered.rules.pop(product, None)
            ampkit.policy.policy._Registered.changes += 1


def test_equal_policies_share_compiled_code() -> None:
    """Policies are compared by what they say: a new object with the same rules costs no compilation."""
    net, x = Net(), torch.randn(5, 8)
    compiled = torch.compile(outputs, backend="eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        with autocast("cpu", policy=TORCH.with_rules({"aten::gelu": Rule.FLOAT32})):
            compiled(net, x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
