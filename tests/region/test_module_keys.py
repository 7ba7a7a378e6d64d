"""Keys of module rules: which modules they match, which keys are refused, and how policies with rules are saved."""

import copy
import itertools
import json
import pickle
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ampkit import Policy, Rule
from ampkit.policy.module_rules import matches
from tests.helpers.module_rules import Model, dtypes, rules
from tests.helpers.regions import BF16, FP16, FP32


@pytest.mark.parametrize(
    ("modules", "error", "message"),
    [
        ([("head", FP32)], TypeError, "for_modules takes a model and a dict of its modules .* got Model and list"),
        ({"a..b": FP32}, ValueError, r"the pattern 'a..b' of for_modules matches no module of Model; nearest: "),
        ({1: FP32}, TypeError, "a key of for_modules is a path pattern, a module class or a module, got 1"),
        ({torch.Tensor: FP32}, TypeError, "a key of for_modules is a path pattern, a module class or a module"),
        ({"head": torch.float64}, ValueError, "torch.float64 is not a precision for module 'head'; expected"),
        (
            {"head": "half"},
            ValueError,
            "'half' is not a precision for module 'head'; expected .* a name among float32, ",
        ),
        ({nn.Linear: None}, ValueError, "None is not a precision for module 'class torch.nn.modules.linear:Linear'"),
        ({"head": Policy.torch("cuda")}, ValueError, "the policy for module 'head' is for 'cuda', not 'cpu'"),
        ({"head": rules(model := Model(), {model: FP32})}, ValueError, "module .head. has rules for modules itself"),
        ({"haed": FP32}, ValueError, r"pattern 'haed' of for_modules matches no module of Model; nearest: head\. "),
        ({"net.head": FP32}, ValueError, "'net.head' of for_modules matches no module of Model; nearest: head"),
        ({"zzz.**": FP32}, ValueError, r"matches no module of Model; nearest: blocks, blocks\.0, blocks\.0\.attn"),
        (
            {nn.Conv2d: FP32},
            ValueError,
            r"no module of Model is a .*conv.Conv2d'; its modules are Model, ModuleList, Block, Linear",
        ),
        ({nn.Linear(2, 2): FP32}, ValueError, "<Linear at 0x.*> is not a module of Model; give for_modules the model"),
        (
            {"head": "fp8"},
            ValueError,
            r"a Policy\. A rule of FP8 is for operators, which a Policy lists: .*FLOAT8_ROWWISE",
        ),
        ({"head": torch.float8_e4m3fn}, ValueError, r"A rule of FP8 is for operators"),
        ({"head": Rule.FLOAT8_TENSORWISE}, ValueError, r"A rule of FP8 is .*with_rules.*'aten::linear': .*TENSORWISE"),
        (
            {"head": Rule.KEEP},
            ValueError,
            r"A rule is for operators, which a Policy lists: .*'aten::linear': Rule\.KEEP",
        ),
        ({"head.weight": FP32}, ValueError, r"'head\.weight' is a tensor of 'head', .* give 'head' as the key"),
        ({"Linear": FP32}, ValueError, r"'Linear' is the name of a class; .* give the class itself, without quotes"),
        (
            {"blocks.*.attn": FP32, "blocks.0.*": FP16},
            ValueError,
            r"'blocks.0.attn' matches two rules that disagree: 'blocks.\*.attn': torch.float32 and 'blocks.0.\*': tor",
        ),
    ],
)
def test_rules_that_are_refused(modules, error, message):
    model = Model()
    with pytest.raises(error, match=message):
        rules(model, modules)
    assert [name for name, module in model.named_modules() if module._forward_pre_hooks_with_kwargs] == []


RULES = {"*": FP32, "h*": BF16, "head": FP16}


@pytest.mark.parametrize("order", list(itertools.permutations(RULES)))
@pytest.mark.parametrize("itself", [False, True])
def test_patterns_that_disagree_are_no_conflict_where_a_nearer_key_decides(order, itself):
    model = Model()
    policy = rules(model, {model.head if itself and key == "head" else key: RULES[key] for key in order})
    assert policy.modules.find(model.head) is FP16
    assert policy.modules.find(model.blocks[0]) is FP32
    with pytest.raises(ValueError, match=r"'head' matches two rules that disagree: .* give the module itself as a key"):
        rules(model, {key: RULES[key] for key in order if key != "head"})


def test_one_module_with_several_paths_has_one_rule():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "blocks": nn.ModuleList([nn.ModuleList([nn.Linear(4, 4)])])})
    model["b"], model["blocks"][0][0] = model["a"], model["a"]
    with pytest.raises(ValueError, match=r"they name one module, which follows one rule: give it one"):
        rules(model, {"a": FP32, "b": FP16})
    # "b" by its own name, "blocks.0.0" for what is around it
    assert rules(model, {"b*": FP32, "blocks.0": BF16}).modules.find(model["a"]) is FP32


def test_a_module_whose_path_reads_as_a_pattern_is_no_key():
    model = nn.ModuleDict({"a*": nn.Linear(4, 4), "ab": nn.Linear(4, 4)})
    with pytest.raises(ValueError, match=r"the path 'a\*' of .* reads as a pattern; name it without a '\*'"):
        rules(model, {model["a*"]: FP32})


def test_a_key_is_set_once():
    model = Model()
    for key, name in (
        ("head", "'head'"),
        (nn.Linear, "'class torch.nn.modules.linear:Linear"),
        (model.head, "<Linear at 0x"),
        (model, "<Model at 0x"),
    ):
        with pytest.raises(ValueError, match=rf"module {name}.* already has a rule in this policy; give it one"):
            rules(model, {key: FP32}).for_modules(model, {key: FP16})
    rules(model, {"head": FP32}).for_modules(Model(), {"head": FP16})


def test_a_shared_module_has_all_its_names():
    model = Model()
    model.head = model.blocks[0].mlp
    for name in ("head", "blocks.0.mlp"):
        assert dtypes(model, rules(model, {name: FP32}))["blocks.0.mlp"] is FP32
    with pytest.raises(ValueError, match=r"'(head|blocks\.0\.mlp)' matches two rules that disagree"):
        rules(model, {"head": FP32, "blocks.0.mlp": FP16})


def test_a_class_that_changes_after_binding_keeps_its_rule():
    model = nn.Sequential(nn.LazyLinear(4))
    policy = rules(model, {nn.LazyLinear: FP32})
    assert dtypes(model, policy) == {"0": FP32}  # its first call makes it an `nn.Linear`
    assert dtypes(model, policy) == dtypes(copy.deepcopy(model), policy) == {"0": FP32}
    assert dtypes(model, policy.for_modules(model, {"0": FP16})) == {"0": FP16}


# check


def test_check_lists_what_is_bound_and_what_is_gone():
    model = Model()
    policy = rules(model, {"blocks.*.attn": FP32, model.head: BF16, model: FP16})
    assert str(policy.check()) == "\n".join(
        [
            "'blocks.*.attn': torch.float32: blocks.0.attn, blocks.1.attn",
            "'head': torch.bfloat16: head",
            "'': torch.float16: the model itself",
        ]
    )
    assert policy.check().removed == ()
    replaced = model.head
    model.head, model.blocks[0].attn = nn.Identity(), nn.Sequential(model.blocks[0].attn)
    del model.blocks[1].attn
    (first, second) = policy.check().removed
    assert (first.removed, second.removed) == (("blocks.1.attn",), ("head",))
    assert str(first) == "'blocks.*.attn': torch.float32: blocks.0.attn, blocks.1.attn; removed: blocks.1.attn"
    assert replaced is not None
    assert str(Policy.default("cpu").check()) == "this policy has no rules for modules"


# Written down and read


def test_a_policy_is_bound_again_by_what_was_written():
    model, other = Model(), Model()
    inner = Policy.torch("cpu").with_rules({"gelu": "keep"})
    policy = rules(model, {"blocks.*": inner, nn.LayerNorm: "16-mixed", model.head: "fp32"})
    state = json.loads(json.dumps(policy.to_dict()))
    assert state["modules"] == [
        ["blocks.*", inner.to_dict()],
        ["class torch.nn.modules.normalization:LayerNorm", "float16"],
        ["head", "float32"],
    ]
    assert Policy.from_dict(state, model) == policy
    again = Policy.from_dict(state, other)
    assert again != policy
    assert again.to_dict() == state
    assert dtypes(other, again) == dtypes(model, policy)


def test_what_cannot_be_bound_or_written():
    model = Model()
    state = rules(model, {"head": FP32}).to_dict()
    with pytest.raises(ValueError, match=r"rules for modules, 'head' among them; give the model .*from_dict\(state, "):
        Policy.from_dict(state)
    with pytest.raises(ValueError, match=r"'head' of for_modules matches no module of Linear; nearest: none\. "):
        Policy.from_dict(state, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"pattern 'head\.0' of for_modules matches no module of Model"):
        Policy.from_dict({**state, "modules": [["head.0", "float32"]]}, model)
    with pytest.raises(TypeError, match="from_dict binds module rules to a module; got str"):
        Policy.from_dict(state, "model")
    with pytest.raises(ValueError, match=r"bound to its model and cannot be pickled; save policy\.to_dict"):
        pickle.dumps(rules(model, {"head": FP32}))
    several = rules(model, {"head": FP32}).for_modules(Model(), {"head": FP32})
    with pytest.raises(ValueError, match="modules of several models, and from_dict binds to one; write one policy"):
        several.to_dict()
    for _ in range(2000):
        state = {**state, "modules": [["head", state]]}
    with pytest.raises(ValueError, match=r"rules for modules, 'head' among them; .* The policy of a module has none"):
        Policy.from_dict(state, model)


def test_a_class_is_looked_up_in_the_model():
    """Data may name any class; nothing is imported or looked for elsewhere."""

    class Local(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Local(4, 4))
    policy = rules(model, {Local: FP32, nn.Module: FP16})
    state = policy.to_dict()
    assert state["modules"][0] == [f"class {__name__}:{Local.__qualname__}", "float32"]
    assert Policy.from_dict(state, model) == policy
    assert dtypes(model, Policy.from_dict(state, model)) == {"0": FP16, "1": FP32}
    for name in ("torch.nn:Gone", "os:environ", "antigravity:fly", ""):
        with pytest.raises(ValueError, match=f"no module of Sequential is a 'class {name}'; its modules are "):
            Policy.from_dict({**state, "modules": [[f"class {name}", "float32"]]}, model)


@given(
    st.lists(st.sampled_from(["a", "b", "*", "**", "a*", "*a*b", "*b"]), min_size=1, max_size=5).map(".".join),
    st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab"]), min_size=1, max_size=5).map(".".join),
)
def test_patterns_mean_what_their_regular_expression_says(pattern, path):
    *parts, last = pattern.split(".")
    regex = "".join(r"([^.]+\.)*" if part == "**" else part.replace("*", "[^.]*") + r"\." for part in parts)
    regex += r"[^.]+(\.[^.]+)*" if last == "**" else last.replace("*", "[^.]*")
    assert matches(pattern, path) is (re.fullmatch(regex, path) is not None)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "pattern",
    [
        "*" * 60 + "x",
        "*a" * 30 + "x",
        ".".join(["**", "a"] * 30) + ".x",
        "**." * 60 + "x",
    ],
)
def test_no_pattern_takes_years(pattern):
    """A policy that was read from data is matched with every module of the model."""
    for path in ("a" * 60, ".".join(["a"] * 60)):
        assert not matches(pattern, path)
