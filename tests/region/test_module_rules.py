"""Rules by module: by path, by class, by instance; what goes over what; and regions as modules run."""

import contextlib
import copy
import importlib
import io
import pickle
import re
import sys
import types

import pytest
import torch
import torch.package
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules import module as hooked

from ampkit import Policy, autocast, checkpoint
from ampkit.policy.module_paths import path_of
from tests.helpers.regions import BF16, FP16, FP32, state

X = torch.ones(2, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x):
        return self.norm(self.mlp(self.attn(x)))


class Model(nn.Module):
    """Blocks and a head; `dtypes` tells what each linear layer computed in."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def dtypes(model, policy, call=None, dtype=BF16):
    """The output dtype of every linear layer by its path, from a run in a region with the policy."""
    seen, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_hook(
                lambda module, args, out, name=name: seen.__setitem__(name, out.dtype)
            ))
    before = state()
    with autocast("cpu", dtype, policy=policy):
        (call or model)(X)
    assert state() == before
    for handle in handles:
        handle.remove()
    return seen


def rules(modules):
    return Policy.default("cpu").for_modules(modules)


ALL = {"blocks.0.attn", "blocks.0.mlp", "blocks.1.attn", "blocks.1.mlp", "head"}


def only(*names):
    """What `dtypes` gives where only these layers are in float32."""
    return {name: FP32 if name in names else BF16 for name in ALL}


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("head", {"head"}),
        ("blocks.1.mlp", {"blocks.1.mlp"}),
        ("blocks.*.attn", {"blocks.0.attn", "blocks.1.attn"}),
        ("blocks.0", {"blocks.0.attn", "blocks.0.mlp"}),
        ("blocks.*", ALL - {"head"}),
        ("**.mlp", {"blocks.0.mlp", "blocks.1.mlp"}),
        ("**", ALL),
        ("*", {"head"}),
        ("blocks.*.m*", {"blocks.0.mlp", "blocks.1.mlp"}),
        ("**.head", {"head"}),
        ("blocks.**.mlp", {"blocks.0.mlp", "blocks.1.mlp"}),
        ("blocks.**", ALL - {"head"}),
        ("mlp", set()),
        ("Head", set()),
    ],
)
def test_paths(pattern, meant):
    assert dtypes(Model(), rules({pattern: FP32})) == only(*meant)


def test_classes():
    assert dtypes(Model(), rules({nn.Linear: FP32})) == only(*ALL)
    assert dtypes(Model(), rules({Block: "float32"})) == only(*ALL - {"head"})
    assert dtypes(Model(), rules({nn.Conv2d: FP32})) == only()
    assert dtypes(Model(), rules({nn.Module: FP32})) == only(*ALL)


def test_nearer_base_class_wins():
    class Special(nn.Linear):
        pass

    model = Model()
    model.head = Special(4, 4)
    assert dtypes(model, rules({nn.Linear: FP32, Special: FP16})) == only(*ALL - {"head"}) | {"head": FP16}


def test_instances():
    model = Model()
    assert dtypes(model, rules({model.head: FP32, model.blocks[1].mlp: "float32"})) == only("head", "blocks.1.mlp")
    assert dtypes(copy.deepcopy(model), rules({model.head: FP32})) == only()


def test_instance_over_path_over_class():
    model = Model()
    found = dtypes(model, rules({nn.Linear: FP32, "blocks.*.attn": FP16, model.blocks[0].attn: BF16}))
    assert found == only(*ALL) | {"blocks.0.attn": BF16, "blocks.1.attn": FP16}


def test_inner_rule_inside_an_outer_one():
    found = dtypes(Model(), rules({"blocks.0": FP32, "blocks.0.mlp": BF16}))
    assert found == only("blocks.0.attn")


def test_policy_for_a_module():
    keeps = Policy.default("cpu").with_rules({"aten::linear": "keep"})
    assert dtypes(Model(), rules({"head": keeps})) == only("head")
    inner = keeps.for_modules({"mlp": FP16}).with_rules({"aten::linear": "lower"})
    assert dtypes(Model(), rules({"blocks.0": inner})) == only(), "its paths count from the outermost module as well"
    inner = inner.for_modules({"blocks.0.attn": FP16})
    assert dtypes(Model(), rules({"blocks.0": inner})) == only() | {"blocks.0.attn": FP16}


def test_float32_takes_in_low_precision():
    """A float32 island alone would meet bfloat16 input with float32 weights."""
    with autocast("cpu", policy=rules({"1": FP32})):
        assert nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))(X).dtype is FP32


def test_gradients_flow_through_mixed_modules():
    model = Model()
    with autocast("cpu", policy=rules({"blocks.0": FP32, "head": FP16})):
        loss = model(X).float().pow(2).sum()
    loss.backward()
    assert all(p.grad.dtype is FP32 for p in model.parameters())
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_rules_add_up():
    policy = rules({"head": FP32}).for_modules({"blocks.*.attn": FP16}).with_rules({"aten::gelu": "float32"})
    assert dtypes(Model(), policy) == only("head") | {"blocks.0.attn": FP16, "blocks.1.attn": FP16}


@pytest.mark.parametrize("run", ["a submodule", "twice", "nested region"])
def test_paths_count_from_the_outermost_module_called(run):
    model = Model()
    policy = rules({"attn": FP32})
    if run == "a submodule":
        assert dtypes(model, policy, model.blocks[0])["blocks.0.attn"] is FP32
    elif run == "twice":
        found = dtypes(model, policy, lambda x: (model(x), model.blocks[1](x)))
        assert (found["blocks.0.attn"], found["blocks.1.attn"]) == (BF16, FP32)
    else:
        with autocast("cpu", policy=policy):
            assert dtypes(model, None, model.blocks[0])["blocks.0.attn"] is FP32


def test_what_torch_wraps_around_a_module_is_not_counted():
    model = nn.DataParallel(Model())
    assert {n.removeprefix("module."): d for n, d in dtypes(model, rules({"head": FP32})).items()} == only("head")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    found = dtypes(model, rules({"blocks.0.mlp": FP32}))
    assert {n.replace("_checkpoint_wrapped_module.", ""): d for n, d in found.items()} == only("blocks.0.mlp")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("run", [torch.utils.checkpoint.checkpoint, checkpoint])
@pytest.mark.parametrize("whole", [False, True])
def test_a_recompute_follows_the_rules_of_its_forward(whole, run, reentrant):
    class Checkpointed(Model):
        def forward(self, x):
            for block in self.blocks:
                x = run(block, x, use_reentrant=reentrant)
            return run(self.head, x, use_reentrant=reentrant)

    model = Model() if whole else Checkpointed()
    seen = {name: [] for name in ("blocks.0.mlp", "blocks.1.mlp", "head")}
    for name, found in seen.items():
        model.get_submodule(name).register_forward_pre_hook(
            lambda *_, found=found: found.append(torch.get_autocast_dtype("cpu"))
        )
    x = X.clone().requires_grad_()
    with autocast("cpu", policy=rules({"head": FP32, "blocks.1": FP32})):
        loss = (run(model, x, use_reentrant=reentrant) if whole else model(x)).sum()
    before = state()
    loss.backward()
    assert seen == {"blocks.0.mlp": [BF16] * 2, "blocks.1.mlp": [FP32] * 2, "head": [FP32] * 2}
    assert state() == before
    assert not hooked._global_forward_pre_hooks


def test_an_interrupted_recompute_leaves_the_regions_of_modules():
    model, before = Model(), state()
    with autocast("cpu", policy=rules({"head": FP32})):
        loss = torch.utils.checkpoint.checkpoint(model, X, use_reentrant=False).sum()

    def interrupt(*_):
        raise KeyboardInterrupt

    model.head.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert state() == before
    assert not hooked._global_forward_pre_hooks


def test_modules_that_change_place():
    model = Model()
    policy = rules({"head": FP32})
    assert dtypes(model, policy) == only("head")
    model.head, model.blocks[0].mlp = model.blocks[0].mlp, model.head
    assert dtypes(model, policy) == only("head")
    for _ in range(20):
        model.blocks[0].attn = nn.Linear(4, 4)
        model.head = nn.Linear(4, 4)
        assert dtypes(model, policy) == only("head")
    model.tail, model.head = model.head, nn.Identity()
    assert path_of(model, model.tail) == "tail"


def test_shared_module_has_its_first_name():
    model = Model()
    model.head = model.blocks[0].mlp
    assert path_of(model, model.head) == "blocks.0.mlp"
    assert path_of(model, model) == ""
    assert path_of(model, nn.ReLU()) == "ReLU"


def test_module_that_calls_itself():
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, depth=2):
            return self(x, depth - 1) if depth else self.layer(x)

    assert dtypes(Recursive(), rules({"layer": FP32})) == {"layer": FP32}
    assert dtypes(Recursive(), rules({Recursive: FP32})) == {"layer": FP32}


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt, SystemExit])
def test_exceptions_leave_every_region(error):
    before = state()
    model = nn.Sequential(nn.Sequential(Fails(error)))
    with pytest.raises(error):
        with autocast("cpu", policy=rules({Fails: FP32, "0": FP16})):
            model(X)
    assert state() == before
    assert not nn.modules.module._global_forward_hooks


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_exceptions_caught_inside_the_region(error):
    """Whoever catches them inside goes on in the outer region, with paths counted afresh."""
    class Catches(Model):
        def forward(self, x):
            with contextlib.suppress(error):
                self.fails(x)
            return super().forward(x)

    model = Catches()
    model.fails = Fails(error)
    policy = rules({"fails": FP16, "head": FP32})
    with autocast("cpu", policy=policy):
        with pytest.raises(error):
            model.fails(X)
    for _ in range(2):
        assert dtypes(model, rules({"head": FP32})) == only("head")
        assert dtypes(model, policy) == only("head")
    assert torch.is_autocast_enabled("cpu") is False


def test_hooks_are_there_only_while_needed():
    assert not nn.modules.module._global_forward_pre_hooks
    with autocast("cpu", policy=rules({"head": FP32})):
        assert len(nn.modules.module._global_forward_pre_hooks) == 1
        with autocast("cpu"), autocast("cpu", policy=rules({"head": FP16})):
            assert len(nn.modules.module._global_forward_pre_hooks) == 1
    assert not nn.modules.module._global_forward_pre_hooks
    with autocast("cpu"):
        assert not nn.modules.module._global_forward_pre_hooks


def test_island_has_no_module_rules():
    model = Model()
    with autocast("cpu", policy=rules({"head": BF16})):
        with autocast("cpu", enabled=False):
            assert model(X).dtype is FP32


def test_island_of_torch_has_no_module_rules():
    class HasIsland(Model):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                x = self.head(x)
            return super().forward(x)

    model, seen = HasIsland(), []
    model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with autocast("cpu", policy=rules({"head": FP16})):
        model(X)
    assert seen == [FP32, FP16]


def test_inner_region_with_another_policy_has_that_policys_rules():
    model = Model()
    with autocast("cpu", policy=rules({"head": FP32})):
        assert dtypes(model, Policy.default("cpu")) == only()
        assert dtypes(model, rules({"blocks.0": FP32})) == only("blocks.0.attn", "blocks.0.mlp")
        assert dtypes(model, None) == only("head")
        with autocast("cuda:0"):
            assert dtypes(model, None) == only("head")


def test_inner_region_counts_paths_from_where_the_outer_one_does():
    class Opens(Model):
        @autocast("cpu", policy=rules({"head": FP32}))
        def forward(self, x):
            with autocast("cpu", FP16):
                return self.head(super().forward(x))

    assert Opens()(X).dtype is FP32
    assert nn.Sequential(Opens())(X).dtype is FP32


def test_inner_region_with_other_rules_counts_paths_from_the_outermost_module_called_in_it():
    class Opens(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x):
            with autocast("cpu", policy=rules({"0": FP16})):
                return self.layers(x)

    for outer in (Policy.default("cpu"), rules({"head": FP32})):
        with autocast("cpu", policy=outer):
            assert Opens()(X).dtype is FP16


def test_two_patterns_that_disagree():
    with pytest.raises(ValueError, match=r"'blocks.0.attn' is meant by several patterns that disagree: "
                                         r"'blocks.\*.attn': torch.float32, 'blocks.0.\*': torch.float16; make one"):
        dtypes(Model(), rules({"blocks.*.attn": FP32, "blocks.0.*": FP16}))
    assert not nn.modules.module._global_forward_pre_hooks
    assert dtypes(Model(), rules({"blocks.*.attn": FP32, "blocks.0.*": FP32})) == only(
        "blocks.0.attn", "blocks.1.attn", "blocks.0.mlp")


@pytest.mark.parametrize(
    ("modules", "error", "message"),
    [
        ([("head", FP32)], TypeError, "for_modules takes a dict of module to dtype or policy, got list"),
        ({"": FP32}, ValueError, r"'' is no module path pattern; expected names and '\*' joined by dots"),
        ({"a b": FP32}, ValueError, "'a b' is no module path pattern"),
        ({"a..b": FP32}, ValueError, "'a..b' is no module path pattern"),
        ({1: FP32}, TypeError, "a key of for_modules is a path pattern, a module class or a module, got 1"),
        ({torch.Tensor: FP32}, TypeError, "a key of for_modules is a path pattern, a module class or a module"),
        ({"head": torch.float64}, ValueError, "torch.float64 is no precision for module 'head'; expected"),
        ({"head": "half"}, ValueError, "'half' is no precision for module 'head'"),
        ({nn.Linear: None}, ValueError, "None is no precision for module torch.nn.modules.linear.Linear"),
        ({"head": Policy.torch("cuda")}, ValueError, "the policy for module 'head' is for 'cuda', not 'cpu'"),
    ],
)
def test_rules_that_mean_nothing(modules, error, message):
    with pytest.raises(error, match=message):
        rules(modules)


def test_module_named_twice():
    layer = nn.Linear(2, 2)
    for key, name in (("head", "'head'"), (nn.Linear, "torch.nn.modules.linear.Linear"), (layer, "<Linear at 0x")):
        with pytest.raises(ValueError, match=rf"module {name}.* already has a rule in this policy"):
            rules({key: FP32}).for_modules({key: FP16})


def test_class_that_cannot_be_found_again():
    class Local(nn.Module):
        pass

    with pytest.raises(ValueError, match=r"Local cannot be written down: a class made inside a function"):
        rules({Local: FP32}).to_dict()
    written = rules({nn.Linear: FP32}).to_dict()
    written["modules"] = [["class torch.nn:Gone", "float32"]]
    with pytest.raises(ValueError, match=r"names the module class .torch.nn.Gone., which is not there"):
        Policy.from_dict(written)
    written["modules"] = [["class os:environ", "float32"]]
    with pytest.raises(ValueError, match=r"the policy names .os.environ. as a module class, which it is not: _Environ"):
        Policy.from_dict(written)


CODE = "import torch\nNet = type('Net', (torch.nn.Module,), {'__module__': __name__})\n"


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """The name of a module with a class `Net` that is on the path and not imported."""
    (tmp_path / "own_module.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_module"
    sys.modules.pop("own_module", None)


def test_reading_a_policy_imports_nothing(own_module):
    """Data may name any module; a class rule needs the module that the model came from, which is there with it."""
    state = {**Policy.torch("cpu").to_dict(), "modules": [[f"class {own_module}:Net", "float32"]]}
    with pytest.raises(ValueError, match=r"class 'own_module.Net', and 'own_module' is not imported: import it before"):
        Policy.from_dict(state)
    assert own_module not in sys.modules
    net = importlib.import_module(own_module).Net
    assert Policy.from_dict(state) == Policy.torch("cpu").for_modules({net: FP32})


def test_looking_for_a_class_runs_no_code(monkeypatch):
    """Modules that import when they are asked, descriptors, classes of classes: all are looked through."""
    def run(*_):
        raise AssertionError("code was run")

    class Lazy(types.ModuleType):
        __getattr__ = __getattribute__ = run

    class Meta(type):
        __getattribute__ = run

    class Outer(metaclass=Meta):
        value = property(run)
        Inner = type("Inner", (nn.Module,), {})

    class Proxy:
        __getattr__ = __getattribute__ = run

    lazy = Lazy("lazy_module")
    types.ModuleType.__getattribute__(lazy, "__dict__").update(Outer=Outer, Proxy=Proxy(), Net=nn.Linear)
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    monkeypatch.setitem(sys.modules, "no_module", Proxy())

    def read(name):
        return Policy.from_dict({**Policy.torch("cpu").to_dict(), "modules": [[f"class {name}", "float32"]]})

    assert read("lazy_module:Net") == Policy.torch("cpu").for_modules({nn.Linear: FP32})
    (inner, _), = read("lazy_module:Outer.Inner").modules.items
    assert inner.__name__ == "Inner"
    for name, message in (
        ("lazy_module:Gone", "is not there"), ("lazy_module:Outer.value", "is not: property"),
        ("lazy_module:Outer.value.fget", "is not there"), ("lazy_module:Outer", "is not: Meta"),
        ("lazy_module:Proxy", "is not: Proxy"), ("lazy_module:Proxy.Net", "is not there"),
        ("no_module:Net", "'no_module' is not imported"), ("lazy_module:", "is not there"), ("", "is not imported"),
    ):
        with pytest.raises(ValueError, match=message):
            read(name)


def test_a_pickle_takes_its_classes_along_as_any_pickle_does(own_module):
    net = importlib.import_module(own_module).Net
    saved = pickle.dumps(rules({net: FP32}))
    del sys.modules[own_module]
    (again, _), = pickle.loads(saved).modules.items
    assert (again.__name__, again is net) == ("Net", False)

    class Local(nn.Module):
        pass

    assert copy.deepcopy(rules({Local: FP32})) == rules({Local: FP32})


def test_a_package_has_classes_of_its_own(own_module):
    """What `torch.package` loads is another class of the same name; the policy beside it means that one."""
    net, buffer = importlib.import_module(own_module).Net, io.BytesIO()
    with torch.package.PackageExporter(buffer) as exporter:
        exporter.intern(own_module)
        exporter.extern(["ampkit.**", "torch.**"])
        exporter.save_pickle("saved", "pair.pkl", (rules({net: FP32}), net()))
    buffer.seek(0)
    policy, model = torch.package.PackageImporter(buffer).load_pickle("saved", "pair.pkl")
    (key, _), = policy.modules.items
    assert key is type(model)
    assert key is not net


def test_the_rule_of_a_module_that_is_gone_means_nothing():
    model = Model()
    gone, alive = nn.Linear(2, 2), model.head
    policy, same = rules({gone: FP32, alive: FP32}), rules({alive: FP32, gone: FP32})
    other = rules({nn.Linear(2, 2): FP32})
    del gone
    assert policy == same
    assert hash(policy) == hash(same)
    assert policy not in {other, rules({alive: FP32})}
    assert "<a module that is gone>: torch.float32" in repr(policy)
    assert dtypes(model, policy) == only("head")
    assert dtypes(model, policy.for_modules({"blocks.0.mlp": FP32})) == only("head", "blocks.0.mlp")
    assert copy.deepcopy(policy) == policy
    for write in (policy.to_dict, lambda: pickle.dumps(policy)):
        with pytest.raises(ValueError, match="names the module <a module that is gone> itself cannot be written down"):
            write()


def test_a_module_is_a_key_by_identity():
    class Equal(nn.Linear):
        def __eq__(self, other):
            return isinstance(other, Equal)

        __hash__ = nn.Module.__hash__

    one, two = Equal(4, 4), Equal(4, 4)
    assert rules({one: FP32}) != rules({two: FP32})
    assert dtypes(nn.Sequential(one, two), rules({one: FP32, two: FP16})) == {"0": FP32, "1": FP16}


def test_a_copy_of_a_model_and_its_policy_belong_together():
    """A module copied before the policy stands for its copy; a policy copied alone goes on naming the module."""
    model = Model()
    policy = rules({model.head: FP32, "blocks.1": Policy.default("cpu").for_modules({model.blocks[1].mlp: FP16})})
    twin, its_policy = copy.deepcopy((model, policy))
    expected = only("head") | {"blocks.1.mlp": FP16}
    assert dtypes(model, policy) == dtypes(twin, its_policy) == expected
    assert dtypes(model, its_policy) == dtypes(twin, policy) == only()
    assert its_policy != policy
    assert copy.deepcopy(policy) is policy
    assert copy.copy(policy) is policy
    model.policy = policy
    twin = copy.deepcopy(model)
    assert dtypes(twin, twin.policy) == expected


names = st.lists(st.sampled_from(["a", "b", "blocks", "0", "attn_1"]), min_size=1, max_size=4).map(".".join)


@given(names)
def test_pattern_without_stars_means_exactly_its_path(path):
    found = rules({path: FP32}).modules
    module = nn.Identity()
    assert found.find(module, path) is FP32
    for other in (path + ".a", "x." + path, path + "x", path[:-1], path.upper() + "_"):
        assert found.find(module, other) is None
    starred = rules({".".join("*" for _ in path.split(".")): FP32}).modules
    assert starred.find(module, path) is FP32
    assert starred.find(module, path + ".a") is None
    assert rules({"**": FP32}).modules.find(module, path) is FP32
    assert rules({"**." + path: FP32}).modules.find(module, "x.y." + path) is FP32
    assert rules({"**." + path: FP32}).modules.find(module, path) is FP32
    assert rules({"**": FP32}).modules.find(module, "") is None


@given(st.lists(st.sampled_from(["a", "b", "*", "**", "a*", "*a*b", "*b"]), min_size=1, max_size=5).map(".".join),
       st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab"]), min_size=1, max_size=5).map(".".join))
def test_patterns_mean_what_their_regular_expression_says(pattern, path):
    *parts, last = pattern.split(".")
    regex = "".join(r"([^.]+\.)*" if part == "**" else part.replace("*", "[^.]*") + r"\." for part in parts)
    regex += r"[^.]+(\.[^.]+)*" if last == "**" else last.replace("*", "[^.]*")
    found = rules({pattern: FP32}).modules.find(nn.Identity(), path)
    assert (found is FP32) is (re.fullmatch(regex, path) is not None)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("pattern", [
    "*" * 60 + "x", "*a" * 30 + "x", ".".join(["**", "a"] * 30) + ".x", "**." * 60 + "x",
])
def test_no_pattern_takes_years(pattern):
    """A policy that was read from data is asked about every module of the model."""
    for path in ("a" * 60, ".".join(["a"] * 60)):
        assert rules({pattern: FP32}).modules.find(nn.Identity(), path) is None


def test_hook_tables_cleared_by_somebody_else():
    before = state()
    with autocast("cpu", policy=Policy.default("cpu").for_modules({"attn": FP32})):
        hooked._global_forward_pre_hooks.clear()
        hooked._global_forward_hooks.clear()
        hooked._global_forward_hooks_always_called.clear()
    assert state() == before
