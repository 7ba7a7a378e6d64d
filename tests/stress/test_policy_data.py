"""Policies from untrusted data are valid, or refused in one sentence; reading changes nothing in the process."""

import copy
import json
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ampkit import Policy, Rule, autocast
from ampkit.matmul.float8_recipes import RECIPES
from ampkit.policy.policy import registered
from tests.stress.budget import damage, rounds

OPERATORS = [
    "aten::mm",
    "aten::gelu",
    "softmax.int",
    "addcmul",
    "aten::relu",
    "sum.dim_IntList",
    "aten::__and__.Scalar",
]
STRANGE_NAMES = [
    "",
    "::",
    "aten::",
    "aten::mm.",
    "aten::__class__",
    "aten::mm.__class__",
    "aten::mm.op",
    "aten::name",
    "aten::_dir",
    "import_module::x",
    "load_library::x",
    "loaded_libraries::add",
    "higher_order::cond",
    "__name__::join",
    "a::b::c",
    "aten::mm.default.x",
    "aten::\ud800",
    "aten::mm\0",
    "torch.",
    "nolib::op",
    "aten::Bool.int",
    "x" * 5000,
]
STRANGE_CLASSES = [
    "class ",
    "class :",
    "class torch:",
    "class torch:nn",
    "class os:environ",
    "class os:system",
    "class antigravity:fly",
    "class torch.nn:Module.forward",
    "class torch.nn:Module.__init__.__globals__",
    "class .:x",
    "class builtins:type",
    "class torch.nn:Linear.__mro__",
    "class torch.ops:aten",
    "class __main__:__builtins__",
    "class \ud800:x",
]
PLACES = [
    "head",
    "blocks.*.attn",
    "**.norm",
    "blocks.0",
    "",
    "class torch.nn.modules.linear:Linear",
    "class torch.nn.modules.normalization:LayerNorm",
]
STRANGE: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    float("nan"),
    b"2",
    [],
    {},
    [[]],
    {"": None},
    [["head", "float32"]],
    {1: 2},
    {None: []},
    *STRANGE_NAMES,
    *STRANGE_CLASSES,
    *PLACES,
    *OPERATORS,
    "cpu",
    "cuda",
    "meta",
    "keep",
    "float64",
    "torch",
    torch.float32,
    torch.float64,
    torch.ones(2),
    nn.Linear,
    nn.GELU(),
    int,
    Rule.KEEP,
    object(),
]
# Without the rules that only some operators can follow.
RULES = [rule.value for rule in Rule if rule not in {Rule.FLOAT32_DTYPE_ARG, Rule.LOWER_FLOAT32_OUT, *RECIPES}]


class Model(nn.Module):
    """The model that module rules are bound to."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.ModuleDict({"attn": nn.Linear(1, 1), "norm": nn.LayerNorm(1)})
        self.blocks, self.head = nn.ModuleList([block]), nn.Linear(1, 1)


MODEL = Model()


def read(state: Any) -> Policy:
    return Policy.from_dict(state, MODEL)


def written(draw: random.Random, *, of_module: bool = False) -> dict[str, Any]:
    """A random policy as `to_dict` writes it, for the CPU so that it may also be the rule of a module."""
    layers = [{name: draw.choice(RULES) for name in draw.sample(OPERATORS, draw.randrange(4))} for _ in range(2)]
    layers.append({"aten::linear": draw.choice(list(RECIPES)).value})
    modules = (
        []
        if of_module
        else [
            [place, draw.choice(["float32", "bfloat16", "float16", written(draw, of_module=True)])]
            for place in draw.sample(PLACES, draw.randrange(4))
        ]
    )
    return {
        "base": draw.choice(["default", "torch"]),
        "device_type": "cpu",
        "rules": layers[draw.randrange(3) :],
        "modules": modules,
    }


def traces() -> tuple[Any, ...]:
    """State that reading a policy must not change: the imported modules and the registered rules."""
    return set(sys.modules), dict(registered())


def holds(read: Callable[[Any], Any], value: Any) -> Policy | None:
    """The policy that was read; None where it was refused in one sentence. Reading changes nothing."""
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
    """A policy survives every form and copy of it, and a region follows it."""
    state = policy.to_dict()
    for again in (
        read(state),
        read(json.loads(json.dumps(state))),
        copy.deepcopy(policy),
        copy.copy(policy),
        *([] if policy.modules else [pickle.loads(pickle.dumps(policy))]),
    ):
        assert again == policy
        assert hash(again) == hash(policy)
        assert repr(again) == repr(policy)
    assert Policy.from_text(policy.text) == policy
    if policy.device_type == "cpu":
        with autocast("cpu", policy=policy):
            pass


def test_what_is_written_is_read_and_what_is_damaged_holds_or_is_refused() -> None:
    repr(torch.ones(2))  # the first call imports a module of torch
    read_again = 0
    for draw in rounds("policies", 300):
        state = written(draw)
        keeps(read(state))
        damage(state, draw, STRANGE)
        policy = holds(read, state)
        if policy is not None:
            read_again += 1
            keeps(policy)
        holds(read, draw.choice(STRANGE))
    assert read_again > 10


def test_strange_names_and_classes() -> None:
    """In every function that takes an operator's name, and in a module rule; names of code are refused alike."""
    policy = Policy.default("cpu")
    for name in STRANGE_NAMES:
        for ask in (
            lambda key: policy.with_rules({key: "keep"}),
            policy.explain,
            lambda key: Policy.from_dict({"base": "torch", "rules": [{key: "keep"}]}),
        ):
            holds(ask, name)
    for text in STRANGE_CLASSES:
        assert holds(read, {**Policy.torch("cpu").to_dict(), "modules": [[text, "float32"]]}) is None
    for value in STRANGE:
        holds(policy.with_rules, value)
        holds(lambda rules: policy.for_modules(MODEL, rules), value)
