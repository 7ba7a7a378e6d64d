"""Policies from untrusted data: one clear sentence or a policy that holds together, and no trace left."""

import copy
import json
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from ampkit import Policy, Rule, autocast
from ampkit.policy.float8_recipes import RECIPES
from ampkit.policy.policy import registered
from tests.hostile.budget import rounds

CASES = 200

pytestmark = pytest.mark.timeout(300 + float(os.environ.get("AMPKIT_SOAK_SECONDS", 0)))


def drawn(strategy: st.SearchStrategy[Any]) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Decorator of a check of one drawn case: a test that runs rounds of them."""
    def decorate(check: Callable[[Any], None]) -> Callable[[], None]:
        settings = hypothesis.settings(derandomize=False, max_examples=CASES, print_blob=False,
                                       suppress_health_check=list(hypothesis.HealthCheck))

        def test() -> None:
            for draw in rounds(check.__name__, 1):
                hypothesis.seed(draw.randrange(2**32))(settings(hypothesis.given(strategy)(check)))()

        test.__doc__ = check.__doc__
        return test

    return decorate


# What is drawn

OPERATORS = ["aten::mm", "aten::gelu", "softmax.int", "addcmul", "aten::relu", "sum.dim_IntList",
             "aten::__and__.Scalar"]
STRANGE_NAMES = [
    "", "::", "aten::", "aten::mm.", "aten::__class__", "aten::mm.__class__", "aten::mm.op", "aten::name", "aten::_dir",
    "import_module::x", "load_library::x", "loaded_libraries::add", "higher_order::cond", "__name__::join", "a::b::c",
    "aten::mm.default.x", "aten::\ud800", "aten::mm\0", "torch.", "nolib::op", "aten::Bool.int", "x" * 5000,
]
CLASSES = ["class torch.nn.modules.linear:Linear", "class torch.nn.modules.normalization:LayerNorm"]
STRANGE_CLASSES = [
    "class ", "class :", "class torch:", "class torch:nn", "class os:environ", "class os:system",
    "class antigravity:fly", "class torch.nn:Module.forward", "class torch.nn:Module.__init__.__globals__", "class .:x",
    "class builtins:type",
    "class torch.nn:Linear.__mro__", "class torch.ops:aten", "class __main__:__builtins__", "class \ud800:x",
]
FOR_FEW = {Rule.FLOAT32_DTYPE_ARG, Rule.LOWER_FLOAT32_OUT, *RECIPES}       # rules that only some operators can follow
rules = st.sampled_from([rule.value for rule in Rule if rule not in FOR_FEW])
products = st.dictionaries(st.just("aten::linear"), st.sampled_from([rule.value for rule in RECIPES]))
layers = st.lists(st.dictionaries(st.sampled_from(OPERATORS), rules, max_size=4) | products, max_size=3)
precisions = st.sampled_from(["float32", "bfloat16", "float16"])
places = st.sampled_from(["head", "blocks.*.attn", "**.norm", "blocks.0", "", *CLASSES])


class Model(nn.Module):
    """What module rules are bound to."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.ModuleDict({"attn": nn.Linear(1, 1), "norm": nn.LayerNorm(1)})
        self.blocks, self.head = nn.ModuleList([block]), nn.Linear(1, 1)


MODEL = Model()


def read(state: Any) -> Policy:
    return Policy.from_dict(state, MODEL)


def _written(layers: Any, modules: Any, base: str, device_type: str) -> dict[str, Any]:
    modules = [list(item) for item in modules.items()]
    return {"base": base, "device_type": device_type, "rules": layers, "modules": modules}


def written(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Policies as `to_dict` writes them, for the CPU so that one may be for a module of another's."""
    return st.builds(
        _written, layers, st.dictionaries(places, inner, max_size=3), st.sampled_from(["default", "torch"]),
        st.just("cpu"),
    )


valid = written(precisions | written(st.nothing()))
atoms = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=4),
    st.sampled_from([*STRANGE_NAMES, *STRANGE_CLASSES, *CLASSES, *OPERATORS, "cpu", "cuda", "meta", "keep", "float64",
                     2**70, torch.float32, torch.float64, torch.ones(2), nn.Linear, nn.GELU(), int, Rule.KEEP,
                     object()]),
)
junk = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def damaged(draw: Any) -> Any:
    """A written policy with up to three of its parts replaced, dropped, doubled or renamed."""
    state = {"policy": copy.deepcopy(draw(valid))}
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(list(_slots(state))))
        change = draw(st.sampled_from(["replace", "replace", "drop", "double", "rename"]))
        if change == "drop" and holder is not state:
            del holder[key]
        elif change == "double" and isinstance(holder, list):
            holder.append(holder[key])
        elif change == "rename" and isinstance(holder, dict) and holder is not state:
            holder[draw(st.one_of(st.sampled_from(STRANGE_NAMES), st.integers(), st.none()))] = holder.pop(key)
        else:
            holder[key] = draw(junk)
    return state["policy"]


def _slots(state: Any) -> Any:
    for key in list(state) if isinstance(state, dict) else range(len(state)):
        yield state, key
        if isinstance(state[key], (dict, list)):
            yield from _slots(state[key])


# What must hold


def traces() -> tuple[Any, ...]:
    """What reading a policy must leave alone: the modules of the process and registered rules."""
    return set(sys.modules), dict(registered())


def holds(read: Callable[[Any], Policy], value: Any) -> Policy | None:
    """The policy that was read; None after a refusal in one sentence. Neither leaves a trace."""
    before = traces()
    policy = refusal = None
    try:
        policy = read(value)
    except (TypeError, ValueError) as error:
        refusal = error
    if refusal is not None:
        said = str(refusal)
        assert type(refusal) in (TypeError, ValueError), f"{type(refusal).__name__}: {said}"
        assert 20 < len(said) < 2000, said
        assert "\n" not in said, said
        assert "policy" in said or "operator" in said or "module" in said, said
    assert traces() == before
    return policy


def keeps(policy: Policy) -> None:
    """Every way to write it down and to copy it gives it back, and a region runs by it."""
    state = policy.to_dict()
    for again in (
        read(state), read(json.loads(json.dumps(state))), copy.deepcopy(policy), copy.copy(policy),
        *([] if policy.modules else [pickle.loads(pickle.dumps(policy))]),
    ):
        assert again == policy
        assert hash(again) == hash(policy)
        assert repr(again) == repr(policy)
    assert Policy.from_dict(json.loads(policy.text)).overrides == policy.overrides
    if policy.device_type == "cpu":
        with autocast("cpu", policy=policy):
            pass


@drawn(valid)
def test_what_is_written_is_read(state: Any) -> None:
    keeps(read(state))


@drawn(damaged() | junk)
def test_damaged_dicts(state: Any) -> None:
    policy = holds(read, state)
    if policy is not None:
        keeps(policy)


@drawn(st.one_of(junk, st.lists(st.tuples(atoms, junk), max_size=2)))
def test_rules_of_code(rules: Any) -> None:
    """What code gives `with_rules` and `for_modules` is refused as kindly."""
    given = {key: value for key, value in rules if not isinstance(key, (list, dict))} if (
        isinstance(rules, list) and all(isinstance(item, tuple) for item in rules)) else rules
    holds(Policy.default("cpu").with_rules, given)
    holds(lambda rules: Policy.default("cpu").for_modules(MODEL, rules), given)


def test_strange_names_and_classes() -> None:
    """Asked of every door that takes an operator's name, and of a module rule."""
    policy = Policy.default("cpu")
    for name in STRANGE_NAMES:
        for ask in (lambda key: policy.with_rules({key: "keep"}), policy.explain, policy.rule_for,
                    lambda key: Policy.from_dict({"base": "torch", "rules": [{key: "keep"}]})):
            holds(ask, name)
    for text in STRANGE_CLASSES:
        assert holds(read, {**Policy.torch("cpu").to_dict(), "modules": [[text, "float32"]]}) is None
