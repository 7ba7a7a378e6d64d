"""Keys of module rules: what is refused, and how they travel, are copied and outlive their modules."""

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

from ampkit import Policy, autocast
from tests.helpers.module_rules import Model, dtypes, names, only, rules
from tests.helpers.regions import FP16, FP32, state


def test_two_patterns_that_disagree():
    with pytest.raises(ValueError, match=r"'blocks.0.attn' matches several patterns that disagree: "
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
