"""Regions and torch.compile: compiled code computes what the eager region computes, forward and backward.

The oracle is the same function run eagerly: equal dtypes and equal bits under `eager` and `aot_eager`; under inductor,
which fuses and so rounds less often, equal dtypes and values within the region's precision.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch._functorch import config as functorch_config
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch.nn.attention.flex_attention import flex_attention

import ampkit
from ampkit import Policy, Rule, autocast
from ampkit.dispatch import dynamo_guard
from ampkit.region.stack import thread
from tests.helpers.compiled_regions import INSIDE, RULES, TORCH, Net, assert_same, module_rules, outputs, step
from tests.helpers.models import CASES
from tests.helpers.regions import BF16, FP16, FP32, product, state

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:bf16 and fp16 are mixed")

EXACT = ("eager", "aot_eager")


def policies(net: nn.Module) -> tuple[Policy, ...]:
    """Policies that differ in what a `Net` computes."""
    return TORCH, Policy.default("cpu"), RULES, module_rules(net), TORCH.for_modules(net, {"last": "float32"})


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "aot_eager") for name in INSIDE), *((name, "eager") for name in ("for_modules", "disabled_regions"))],
)
def test_a_region_in_a_compiled_function_is_the_eager_region(name: str, backend: str) -> None:
    """Dynamo traces alike for both backends: with `eager` one function that casts, and one with nested regions."""
    net, x = Net(), torch.randn(5, 8)
    function = INSIDE[name](net)
    wanted = step(function, net, x)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(2):
        assert_same(step(compiled, net, x), wanted)


@torch.no_grad()
def test_inductor_gives_the_eager_dtypes() -> None:
    """Forward alone: what the compiler gets is compared below, for both."""
    net, x = Net(), torch.randn(5, 8)
    function = INSIDE["for_modules"](net)
    assert_same(list(torch.compile(function, fullgraph=True)(net, x)), list(function(net, x)), exact=False)


@torch._dynamo.config.patch(recompile_limit=16)
@pytest.mark.parametrize("backend", EXACT)
def test_a_compiled_function_called_in_regions_never_serves_another_region(backend: str) -> None:
    """Two regions that differ in policy alone, in dtype, or in being there at all, each get code of their own."""
    net, x = Net(), torch.randn(5, 8)
    compiled = torch.compile(outputs, backend=backend, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        for policy in policies(net):
            for dtype in (BF16, FP16) if policy is RULES else (BF16,):
                region = autocast("cpu", dtype, policy=policy, cache_enabled=False)
                assert_same(step(region(compiled), net, x), step(region(outputs), net, x))
        with autocast("cpu", policy=RULES):
            with autocast("cpu", enabled=False):
                assert_same(step(compiled, net, x), step(outputs, net, x))
        assert_same(step(compiled, net, x), step(outputs, net, x))
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert counted <= len(policies(net)) + 3, "the second round compiled again"


class RegionInside(nn.Module):
    """A module that calls its layer in an enabled region without a policy, which inherits the outer region's policy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with autocast("cpu", BF16):
            return self.layer(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_region_in_compiled_code_inherits_the_policy_of_a_disabled_region(backend: str) -> None:
    """Rules for modules too; and code that was compiled under one policy never serves another."""
    model, x = RegionInside(), torch.ones(2, 4)
    default = Policy.default("cpu")
    policies = [
        None,
        default.for_modules(model, {"layer": torch.float32}),
        default.with_rules({"aten::linear": Rule.FLOAT32}),
        Policy.torch("cpu"),
    ]
    for order in (policies, policies[::-1]):
        torch._dynamo.reset()
        compiled = torch.compile(model.forward, backend=backend)
        dtypes = []
        for policy in order:
            with autocast("cpu", enabled=False, policy=policy):
                assert torch.equal(compiled(x), model(x))
                dtypes.append(model(x).dtype)
        assert set(dtypes) == {FP32, BF16}


def test_register_op_is_seen_by_code_compiled_before() -> None:
    with torch.library._scoped_library("ampkit_compile_test", "FRAGMENT") as library:
        library.define("product(Tensor a, Tensor b) -> Tensor")
        library.impl("product", torch.mm, "CompositeExplicitAutograd")
        op = torch.ops.ampkit_compile_test.product.default
        around = torch.compile(lambda x: op(x, x), backend="aot_eager", fullgraph=True)
        inside = torch.compile(autocast("cpu")(lambda x: op(x, x)), backend="aot_eager", fullgraph=True)

        def dtypes() -> list[torch.dtype]:
            with autocast("cpu"):
                return [around(torch.ones(2, 2)).dtype, inside(torch.ones(2, 2)).dtype]

        assert dtypes() == [FP32, FP32]
        ampkit.register_op(op, Rule.LOWER)
        assert dtypes() == [BF16, BF16]


# State, failures, and what keeps code compiled for one policy from running under another


@pytest.mark.parametrize("backend", EXACT)
def test_a_graph_break_in_a_region(backend: str) -> None:
    net, x = Net(), torch.randn(5, 8)

    def function(net: Any, x: Tensor) -> Any:
        with autocast("cpu", policy=RULES):
            y = net.norm(net.first(x))
            torch._dynamo.graph_break()
            return net.last(F.gelu(y)), torch.softmax(y, -1)

    assert_same(step(torch.compile(function, backend=backend), net, x), step(function, net, x))


@pytest.mark.parametrize("n_digits", [1, 2])
def test_an_operator_that_fails_in_compiled_code_leaves_nothing_open(
    n_digits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """backend="eager" runs the region in the graph, and skips its end when an operator before that raises."""
    with monkeypatch.context() as patch:
        rules = (("cpu", RULES),)
        taken: dict[Any, str] = {}
        for _ in range(n_digits):  # the second time another policy has the tag of one digit
            patch.setattr(dynamo_guard, "_texts", dict(taken))
            patch.setattr(dynamo_guard, "_tags", {})
            dynamo_guard._tag_of.cache_clear()
            taken[dynamo_guard.tag_of(rules)] = "another policy"
        thread.modes.clear()
        assert len(dynamo_guard.tag_of(rules)) == n_digits
        _check_an_operator_that_fails()
        dynamo_guard._tag_of.cache_clear()
        thread.modes.clear()


def _check_an_operator_that_fails() -> None:
    def function(x: Tensor, index: Tensor) -> Tensor:
        with autocast("cpu", FP16, policy=RULES, cache_enabled=False):
            return (x @ x.T)[index]

    compiled, x = torch.compile(function, backend="eager", fullgraph=True), torch.randn(3, 8)
    compiled(x, torch.tensor([1]))
    with autocast("cpu"):
        inside = state()
        for _ in range(2):
            with pytest.raises(IndexError):
                compiled(x, torch.tensor([7]))
        with autocast("cpu"):
            assert state()[:-1] == inside[:-1]
            assert (x @ x.T).dtype is BF16


@pytest.mark.parametrize("backend", EXACT)
def test_a_trace_that_fails_in_a_region_leaves_nothing_open(backend: str) -> None:
    banned = TORCH.with_rules({"aten::gelu": Rule.BANNED})

    def function(net: nn.Module, x: Tensor) -> Any:
        with autocast("cpu", BF16):
            with autocast("cpu", policy=banned):
                return net(x)

    with pytest.raises(Exception, match="unsafe under autocast"):
        torch.compile(function, backend=backend, fullgraph=True)(Net(), torch.randn(5, 8))
    assert product() is FP32


def test_compiled_code_does_not_fill_the_weight_cache() -> None:
    """Its casts are part of its graph; a cast made while tracing, of a fake weight, must never be kept."""
    net, x = Net(), torch.randn(5, 8)
    compiled = torch.compile(outputs, backend="aot_eager", fullgraph=True)
    with autocast("cpu"):
        compiled(net, x)
        assert not any(thread.cache._casts.values())
        outputs(net, x)
        assert any(thread.cache._casts.values())


def traced(region: Callable[[], Any]) -> list[list[str]]:
    """What AOTAutograd hands to a compiler for a training step of a transformer: operators and dtypes of each graph."""
    torch._dynamo.reset()
    case, ids, backend = CASES["encoder"], torch.arange(8).view(2, 4), AotEagerAndRecordGraphs()
    model = case.build()

    def loss() -> Tensor:
        with region():
            return case.loss(model(ids), ids)

    torch.compile(loss, backend=backend, fullgraph=True)().backward()
    return [
        [
            f"{node.target} {node.meta['val'].dtype if isinstance(node.meta.get('val'), Tensor) else ''}"
            for node in graph.graph.nodes
            if node.op == "call_function"
        ]
        for graph in (*backend.fw_graphs, *backend.bw_graphs)
    ]


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function that doesn't take boxed")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_graph_that_a_compiler_gets_is_that_of_torch_amp(dtype: torch.dtype) -> None:
    """Operator for operator, forward and backward: compiled code costs what torch.amp's costs."""
    wanted = traced(lambda: torch.autocast("cpu", dtype))
    assert len(wanted) == 2
    assert [operator for operator in wanted[0] if "_to_copy" in operator] != [], wanted[0]
    assert traced(lambda: autocast("cpu", dtype, policy=Policy.torch("cpu"))) == wanted


def test_the_cache_on_disk_is_keyed_by_the_whole_policy() -> None:
    tags = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        tags.append(torch.compiler.config.cache_key_tag)
        return graph.forward

    net, x = Net(), torch.randn(5, 8)
    for policy in (TORCH, Policy.default("cpu"), RULES):
        torch._dynamo.reset()
        with autocast("cpu", policy=policy):
            torch.compile(net, backend=backend)(x)
    assert tags[0] == ""
    assert len({*tags}) == 3


@pytest.mark.slow
@torch.no_grad()
def test_options_of_inductor_keep_the_casts_between_fused_operators() -> None:
    """As docs/compile.md says; and AOTAutograd stores on disk a graph with a region around it, not one inside."""
    weight, x = torch.randn(64, 32), torch.randn(64, 32)

    def fused(x: Tensor) -> Tensor:
        y = F.linear(x, weight)
        return torch.sigmoid(F.silu(y) * 1.7 + 0.3) * y

    options: list[dict[str, Any]] = [{}, {"emulate_precision_casts": True}]
    if hasattr(torch._inductor.config, "numerics"):  # PyTorch 2.15
        options.append({"numerics": "strict"})
    wanted, differing = autocast("cpu")(fused)(x), []
    torch._dynamo.utils.counters.clear()
    with torch._inductor.utils.fresh_cache():
        for each in options:
            torch._dynamo.reset()
            with autocast("cpu"):
                differing.append(int((torch.compile(fused, options=each)(x) != wanted).sum()))
        counted = torch._dynamo.utils.counters["aot_autograd"]
        assert (counted["autograd_cache_saved"], counted["autograd_cache_bypass"]) == (len(options), 0)
        torch.compile(autocast("cpu")(fused))(x)
        assert (counted["autograd_cache_saved"], counted["autograd_cache_bypass"]) == (len(options), 1)
    if not torch.__version__.startswith("2.11."):  # where the option has no effect on a CPU
        assert max(differing[1:]) < 0.5 * differing[0], differing


# Backward: in the dtypes of eager code, which runs it outside regions


class Rounded(nn.Module):
    """Three layers; the second is in a region of its own."""

    def __init__(self, between: Callable[[], Any] = contextlib.nullcontext) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        with self.between():
            x = self.middle(x.float())
        return self.last(torch.tanh(x))


FLOAT32: dict[str, Callable[[], tuple[nn.Module, Policy]]] = {
    "a module": lambda: ((net := Rounded()), TORCH.for_modules(net, {"middle": "float32"})),
    "an operator": lambda: (Rounded(), TORCH.with_rules({"aten::linear": Rule.FLOAT32})),
    "by hand": lambda: (Rounded(lambda: torch.autocast("cpu", enabled=False)), Policy.default("cpu")),
}


def around(region: Callable[[], Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    call = compiled(lambda net, x: net(x))

    def function(net: nn.Module, x: Tensor) -> Tensor:
        with region():
            return call(net, x)

    return function


def inside_of_torchs(region: Callable[[], Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    function = compiled(around(region, lambda call: call))

    def outside(net: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return function(net, x)

    return outside


def after_a_graph_break(region: Callable[[], Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    def function(net: nn.Module, x: Tensor) -> Tensor:
        with region():
            torch._dynamo.graph_break()
            return net(x)

    return compiled(function)


@pytest.mark.parametrize("where", [around, inside_of_torchs, after_a_graph_break], ids=lambda where: where.__name__)
@pytest.mark.parametrize("rule", FLOAT32)
def test_the_backward_of_what_runs_in_float32_is_computed_in_float32(
    rule: str, where: Callable[..., Callable[..., Any]]
) -> None:
    net, policy = FLOAT32[rule]()
    x = torch.randn(4, 8)

    def gradients(compiled: Callable[..., Any]) -> Any:
        output = where(lambda: autocast("cpu", policy=policy), compiled)(net, x)
        return torch.autograd.grad(output.float().square().sum(), list(net.parameters()))

    wanted = gradients(lambda call: call)
    got = gradients(functools.partial(torch.compile, backend="aot_eager"))
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_a_backward_that_fits_float32_does_not_overflow_in_compiled_code() -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    compiled = torch.compile(lambda x: net(x), backend="aot_eager", fullgraph=True)
    with autocast("cpu", FP16, policy=TORCH.for_modules(net, {"1": "float32"})):
        output = compiled(x)
    assert output.dtype is FP32
    gradients = torch.autograd.grad(output.sum() * 2.0**18, [*net[1].parameters()])
    largest = max(gradient.abs().max().item() for gradient in gradients)
    assert torch.finfo(FP16).max < largest < torch.inf


@pytest.mark.parametrize("option", ["same_as_forward", [{"device_type": "cpu"}]])
def test_torchs_option_for_backward_holds_where_it_is_given(option: Any) -> None:
    """As a list, which says that backward is called in a region; and torch's default where no region of ours is."""
    net, x = Rounded(lambda: torch.autocast("cpu", enabled=False)), torch.randn(4, 8)
    gradients = []
    for region in (torch.autocast("cpu"), autocast("cpu"), torch.autocast("cpu")):
        torch._dynamo.reset()
        with functorch_config.patch(backward_pass_autocast=option), region:
            output = torch.compile(net, backend="aot_eager", fullgraph=True)(x)
        gradients.append(torch.autograd.grad(output.float().square().sum(), net.middle.weight)[0])
    assert torch.equal(gradients[0], gradients[2])
    assert torch.equal(gradients[0], gradients[1]) is (option != "same_as_forward")


# Module rules in compiled code: they hold where they hold in eager code


def test_modules_compiled_one_by_one_in_a_region_with_module_rules() -> None:
    """Modules of one class share their code; what was compiled for one without a rule is not run for one with."""
    net, x = nn.Sequential(*(Inner() for _ in range(4))), torch.randn(5, 8)
    policy = TORCH.for_modules(net, {"1": "float32", "3.a": FP16})
    for module in net:
        module.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with autocast("cpu", policy=policy):
            dtypes = [module(x, more={"x": x})[0].dtype for module in net]
        assert dtypes == [BF16, FP32, BF16, FP16]
        with autocast("cpu", policy=TORCH):
            assert {module(x, more={"x": x})[0].dtype for module in net} == {BF16}


@pytest.mark.filterwarnings("ignore:none of the modules that this policy's rules bind")  # in the third
def test_a_compiled_function_called_with_another_model() -> None:
    net, other, x = Net(), Net(), torch.randn(5, 8)
    compiled = torch.compile(lambda net, x: net(x), backend="eager", fullgraph=True)
    policy = TORCH.for_modules(net, {"last": "float32"}).for_modules(other, {"first": FP16})
    for _ in range(2):
        for model in (other, net, Net()):
            with autocast("cpu", policy=policy):
                assert_same([compiled(model, x)], [model(x)])
        with autocast("cpu", policy=TORCH.for_modules(other, {"last": "float32"})):
            assert compiled(net, x).dtype is BF16
            assert compiled(other, x).dtype is FP32


def test_a_module_with_a_decorated_forward_compiles() -> None:
    net, x = Net(), torch.randn(5, 8)
    net.forward = autocast("cpu", policy=module_rules(net))(net.forward)
    wanted = net(x)
    assert wanted.dtype is FP16
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


LAST = {"last": FP16}
NESTED: dict[str, Callable[[nn.Module], Policy]] = {
    "a rule": lambda net: TORCH.for_modules(net, LAST),
    "a policy": lambda net: TORCH.for_modules(net, {"inner": RULES, "inner.a": FP16, **LAST}),
    "a dtype": lambda net: TORCH.for_modules(net, {"inner": "float32", "inner.a": FP16, **LAST}),
}
INNER_REGIONS: dict[str, Callable[[], Any]] = {
    "the same policy": lambda: autocast("cpu"),
    "disabled": lambda: autocast("cpu", enabled=False),
    "torch's, disabled": lambda: torch.autocast("cpu", enabled=False),
    "another policy": lambda: autocast("cpu", policy=TORCH),
    "another dtype": lambda: autocast("cpu", FP16),
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


def test_a_module_that_raises_in_compiled_code_leaves_its_region() -> None:
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

    assert torch.compile(function, backend="eager")(x).dtype is function(x).dtype is BF16


def test_module_rules_made_in_compiled_code() -> None:
    def function(net: nn.Module, x: Tensor) -> Tensor:
        with autocast("cpu", policy=TORCH.for_modules(net, LAST)):
            return net(x)

    with pytest.raises(Exception, match="for_modules was called in the function that is compiled; call it outside"):
        torch.compile(function, backend="eager", fullgraph=True)(Net(), torch.randn(5, 8))


# Higher-order operators


def scanned(x: Tensor, w: Tensor) -> Tensor:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(row.unsqueeze(0) @ w).squeeze(0).float()
        return carry + y, y

    return scan(step, torch.zeros(8), x)[1]


HIGHER_ORDER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cond": lambda x, w: torch.cond(x.sum() > 0, lambda a, b: a @ b, lambda a, b: (a @ b) * 2, (x, w)),
    "while_loop": lambda x, w: while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, torch.tanh(a @ w).float()), (torch.tensor(0), x)
    )[1],
    "scan": scanned,
    "associative_scan": lambda x, w: associative_scan(lambda a, b: a + b, x @ w, 0, combine_mode="generic"),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", HIGHER_ORDER)
def test_higher_order_operators_do_as_in_a_region_of_torch(name: str) -> None:
    """Eager, and compiled in a region inside and around. Backward, outside, recomputes as the forward was."""
    net, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)

    def call(net: Any, x: Tensor) -> Tensor:
        return HIGHER_ORDER[name](x, net.weight)

    region, wanted = autocast("cpu", policy=TORCH), step(torch.autocast("cpu")(call), net, x)
    assert_same(step(region(call), net, x), wanted)
    assert not torch.equal(wanted[1], step(call, net, x)[1]), "nothing was cast"
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    if name == "scan" and torch.__version__.startswith(("2.11.", "2.12.")):
        pytest.skip("this torch does not differentiate a compiled scan without a region either")
    assert_same(step(region(compiled), net, x), wanted)
    assert_same(step(torch.compile(region(call), backend="aot_eager", fullgraph=True), net, x), wanted)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("policy", [TORCH, Policy.default("cpu")], ids=str)
def test_flex_attention(policy: Policy) -> None:
    """Its list entry is torch's: the inputs are cast as for any attention."""
    q = torch.randn(1, 2, 16, 16)
    with torch.autocast("cpu"):
        wanted = flex_attention(q, q, q)
    with autocast("cpu", policy=policy):
        got = flex_attention(q, q, q)
    assert got.dtype is wanted.dtype is BF16
    assert torch.equal(got, wanted)
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    with autocast("cpu", policy=policy):
        assert compiled(q, q, q).dtype is BF16


@pytest.mark.parametrize("dtype", [FP32, torch.float64, BF16])
@pytest.mark.parametrize("function", [lambda x: x / 3.1, lambda x: 3.1 / x, lambda x: (x * 3.1).sum() * 0.5])
def test_numbers_that_autograd_saves_under_a_transform(function: Any, dtype: torch.dtype) -> None:
    """Once a policy of the process names the operator, in regions of others too."""
    named = Policy.torch("cpu").with_rules({"aten::div": "keep", "aten::mul": "keep"})
    x, results = torch.linspace(0.5, 2.0, 6).to(dtype), []
    for region in (torch.autocast("cpu"), autocast("cpu", policy=named), autocast("cpu", policy=Policy.torch("cpu"))):
        with region:
            results.append(torch.func.grad(lambda x: function(x).sum())(x))
    torch.testing.assert_close(results[1:], results[:1] * 2, rtol=0, atol=0)


def test_a_compiled_step_that_calls_backward_after_a_region_ends() -> None:
    """Torch holds a lock while it calls the guard: if Dynamo compiled that call, it would wait for itself."""
    layer, policy = nn.Linear(4, 4), Policy.torch("cpu").with_rules({"aten::linear": Rule.FLOAT32})

    def train(x: Tensor) -> None:
        with autocast("cpu", BF16, policy=policy):
            output = layer(x)
        output.square().sum().backward()

    x = torch.ones(2, 4)
    train(x)
    expected = [layer.weight.grad]
    layer.weight.grad = None
    torch.compile(train, backend="aot_eager")(x)
    torch.testing.assert_close([layer.weight.grad], expected)
