"""Policies as data: the dict of `Policy.to_dict`, for JSON and checkpoints.

The data is untrusted: reading it imports nothing and runs no code, takes time in proportion to its length, and raises
on anything that is not a policy. Module classes are looked up by name among those of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from ampkit.policy.module_rules import CLASS, class_key
from ampkit.policy.operator_keys import key_name
from ampkit.policy.rules import Rule
from ampkit.policy.values import short
from ampkit.torch_internals.operators import OpOverload

MOST_NESTED = 16        # policies within policies: reading one recurses, and so do its methods
MOST_RULES = 20_000     # in all: policies may share their parts, so that a short pickle says endlessly many
MOST_WIDE = 100         # of them for classes of modules, or patterns with stars: each is compared with every module
_KEYS = {"base", "device_type", "rules", "modules"}


class Parts(NamedTuple):
    """What a written policy is made of; the values are unchecked."""

    base: Any
    device_type: Any
    layers: Sequence[Any]                   # one for each `with_rules`
    modules: Sequence[tuple[Any, Any]]      # keys of `for_modules`, with a precision's name or other `Parts`


def layer_dict(layer: Sequence[tuple[OpOverload, Rule]]) -> dict[str, str]:
    """The rules of one `with_rules` as strings."""
    return {key_name(op): rule.value for op, rule in layer}


def key_text(key: str | type[Module]) -> str:
    """The key of a module rule as a string."""
    return key if isinstance(key, str) else class_key(key)


class _Counter:
    """How many rules a policy and those in it have so far."""

    def __init__(self) -> None:
        self.rules = 0      # layers of rules included
        self.wide = 0

    def add(self, *, rules: int = 0, wide: bool = False) -> None:
        """Count some more; `ValueError` for more than there may be."""
        self.rules += rules
        self.wide += wide
        if self.rules > MOST_RULES:
            raise ValueError(f"not a policy: it holds more than {MOST_RULES} rules and layers of rules")
        if self.wide > MOST_WIDE:
            raise ValueError(f"not a policy: it names modules by more than {MOST_WIDE} classes and patterns with stars")


def read_dict(state: Any, depth: int = 1, counter: _Counter | None = None) -> Parts:
    """What `Policy.to_dict` wrote; `counter` has counted the rules of the policies around it."""
    counter = _Counter() if counter is None else counter
    if not isinstance(state, Mapping):
        raise TypeError(f"a written policy is a dict, as to_dict gives it; got {short(state)}")
    unknown = sorted(set(state) - _KEYS, key=repr)
    if "base" not in state or unknown:
        missing = "" if "base" in state else "'base' is missing; "
        raise ValueError(
            f"not a policy: {missing}{f'unknown keys {short(unknown)}; ' if unknown else ''}expected 'base' and, with "
            "defaults, 'device_type', 'rules' and 'modules'"
        )
    if depth > MOST_NESTED:
        raise ValueError(f"not a policy: it holds policies that hold policies, more than {MOST_NESTED} deep")
    layers, modules = state.get("rules", ()), state.get("modules", ())
    for key, value in (("rules", layers), ("modules", modules)):
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{key!r} of a written policy is a list, got {short(value)}")
    for layer in layers:
        if not isinstance(layer, Mapping):
            raise TypeError(f"each of the 'rules' of a written policy is a dict, got {short(layer)}")
    counter.add(rules=len(modules) + sum(1 + len(layer) for layer in layers))
    device_type = state["device_type"] if "device_type" in state else _current_device_type()
    return Parts(state["base"], device_type, layers, [_read_module_rule(item, depth, counter) for item in modules])


def _current_device_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def _read_module_rule(item: Any, depth: int, counter: _Counter) -> tuple[Any, Any]:
    if not isinstance(item, (list, tuple)) or len(item) != 2:
        raise TypeError(f"a module rule of a written policy is a list of a module and its rule, got {short(item)}")
    key, value = item
    if not isinstance(key, str):
        raise TypeError(f"a written policy names modules by path or as 'class module:name', got {short(key)}")
    counter.add(wide="*" in key or key.startswith(CLASS))
    return key, value if isinstance(value, str) else read_dict(value, depth + 1, counter)

