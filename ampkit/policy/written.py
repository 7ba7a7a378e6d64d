"""Policies as data: the dict of `Policy.to_dict`, for JSON and checkpoints.

The data is untrusted: reading it imports nothing and runs no code, takes time in proportion to its length, and raises
on anything that is not a policy. Module classes are looked up by name among those of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ampkit.policy.module_rules import CLASS
from ampkit.policy.operator_keys import key_name
from ampkit.policy.rules import Rule
from ampkit.policy.values import short
from ampkit.torch_internals.operators import OpOverload

MOST_RULES = 20_000     # in all: policies may share their parts, so that a short pickle says endlessly many
WIDE = 100              # what a rule for a class of modules or a pattern with stars counts: it meets every module
_KEYS = {"base", "device_type", "rules", "modules"}


def layer_dict(layer: Sequence[tuple[OpOverload, Rule]]) -> dict[str, str]:
    """The rules of one `with_rules` as strings."""
    return {key_name(op): rule.value for op, rule in layer}


def check(state: Any, found: int = 0, *, of_module: bool = False) -> int:
    """`TypeError` or `ValueError` for a policy, or one in it, of a form or a size that `Policy.to_dict` does not write.

    Returns how many rules it holds, layers of rules included, and `found` more. Names and values are for `Policy` to
    check.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"a written policy is a dict, as to_dict gives it; got {short(state)}")
    unknown = sorted(set(state) - _KEYS, key=repr)
    if "base" not in state or unknown:
        missing = "" if "base" in state else "'base' is missing; "
        raise ValueError(
            f"not a policy: {missing}{f'unknown keys {short(unknown)}; ' if unknown else ''}expected 'base' and, with "
            "defaults, 'device_type', 'rules' and 'modules'"
        )
    layers, modules = state.get("rules", ()), state.get("modules", ())
    for key, value in (("rules", layers), ("modules", modules)):
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{key!r} of a written policy is a list, got {short(value)}")
    if of_module and modules:
        raise ValueError("not a policy: a policy for a module has rules for modules itself")
    for layer in layers:
        if not isinstance(layer, Mapping):
            raise TypeError(f"each of the 'rules' of a written policy is a dict, got {short(layer)}")
    found = _counted(found + len(modules) + sum(1 + len(layer) for layer in layers))
    for item in modules:
        if not isinstance(item, (list, tuple)) or len(item) != 2:
            raise TypeError(f"a module rule of a written policy is a list of a module and its rule, got {short(item)}")
        key, value = item
        if not isinstance(key, str):
            raise TypeError(f"a written policy names modules by path or as 'class module:name', got {short(key)}")
        found = _counted(found + WIDE * ("*" in key or key.startswith(CLASS)))
        if not isinstance(value, str):
            found = check(value, found, of_module=True)
    return found


def _counted(n: int) -> int:
    if n > MOST_RULES:
        raise ValueError(
            f"not a policy: it holds more than {MOST_RULES} rules and layers of rules, where one for a class of "
            f"modules or a pattern with stars counts as {WIDE}"
        )
    return n


def device_type(state: Mapping[str, Any]) -> Any:
    """The device type of a written policy; where it has none, that of the current accelerator, else the CPU."""
    if "device_type" in state:
        return state["device_type"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type
