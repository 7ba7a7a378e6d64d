"""Policies as data: a dict for JSON and checkpoints, one line of text for compiled graphs.

The data is untrusted: reading it imports nothing and runs no code, and raises on anything that is not a policy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from torch.nn import Module

from ampkit.policy.messages import short
from ampkit.policy.module_rules import Instance, Key, describe
from ampkit.policy.operator_keys import key_name
from ampkit.policy.rules import Rule
from ampkit.torch_internals.operators import OpOverload

MOST_NESTED = 16        # policies within policies: reading one recurses, and so do its methods
MOST_RULES = 20_000     # in all: policies may share their parts, so that a short pickle says endlessly many
_KEYS = {"base", "device_type", "rules", "modules"}
Layer = Sequence[tuple[OpOverload, Rule]]


class Parts(NamedTuple):
    """What a written policy is made of; the values are unchecked."""

    base: Any
    device_type: Any
    layers: Sequence[Any]                       # one for each `with_rules`
    modules: Sequence[tuple[Any, Any]] = ()     # keys of `for_modules`, with a precision's name or other `Parts`


def layer_dict(layer: Layer) -> dict[str, str]:
    """The rules of one `with_rules` as strings."""
    return {key_name(op): rule.value for op, rule in layer}


def layer_text(layer: Layer) -> str:
    """The rules of one `with_rules` in one line."""
    return ",".join(f"{key}={rule}" for key, rule in layer_dict(layer).items())


def key_text(key: Key) -> str:
    """A key of `for_modules` as a string; `ValueError` for one that cannot be looked up again."""
    check_travels(key)
    if isinstance(key, type) and "<" in key.__qualname__:
        raise ValueError(
            f"a policy that names the class {describe(key)} cannot be written down: a class made inside a function "
            "cannot be found again; use a path, or a class at the top level of a module"
        )
    return f"class {key.__module__}:{key.__qualname__}" if isinstance(key, type) else str(key)


def check_travels(key: Key) -> None:
    """Raises `ValueError` for a module itself, which could only travel with its weights."""
    if isinstance(key, Instance):
        raise ValueError(
            f"a policy that names the module {describe(key)} itself cannot be written down; use its path or class"
        )


def read_dict(state: Any, depth: int = 1, counter: list[int] | None = None) -> Parts:
    """What `Policy.to_dict` wrote; `counter` holds how many rules and layers the policies around it have."""
    counter = [0] if counter is None else counter
    if not isinstance(state, Mapping):
        raise TypeError(f"a written policy is a dict, as to_dict gives it; got {short(state)}")
    if set(state) != _KEYS:
        missing, unknown = sorted(_KEYS - set(state)), sorted(set(state) - _KEYS, key=repr)
        raise ValueError(f"not a policy: missing keys {missing}, unknown keys {short(unknown)}")
    if depth > MOST_NESTED:
        raise ValueError(f"not a policy: it holds policies that hold policies, more than {MOST_NESTED} deep")
    for key in ("rules", "modules"):
        if not isinstance(state[key], (list, tuple)):
            raise TypeError(f"{key!r} of a written policy is a list, got {short(state[key])}")
    for layer in state["rules"]:
        if not isinstance(layer, Mapping):
            raise TypeError(f"each of the 'rules' of a written policy is a dict, got {short(layer)}")
    counter[0] += len(state["modules"]) + sum(1 + len(layer) for layer in state["rules"])
    if counter[0] > MOST_RULES:
        raise ValueError(f"not a policy: it holds more than {MOST_RULES} rules and layers of rules")
    modules = [_read_module_rule(item, depth, counter) for item in state["modules"]]
    return Parts(state["base"], state["device_type"], state["rules"], modules)


def _read_module_rule(item: Any, depth: int, counter: list[int]) -> tuple[Any, Any]:
    if not isinstance(item, (list, tuple)) or len(item) != 2:
        raise TypeError(f"a module rule of a written policy is a list of a module and its rule, got {short(item)}")
    key, value = item
    return _read_key(key), value if isinstance(value, str) else read_dict(value, depth + 1, counter)


def read_text(text: Any) -> Parts:
    """What `Policy.text` says."""
    if not isinstance(text, str):
        raise TypeError(f"the text of a policy is a str, got {short(text)}")
    base, _, rest = text.partition("|")
    device_type, *layers = rest.split("|")
    if text.count(",") + len(layers) > MOST_RULES:
        raise ValueError(f"the text of a policy holds more than {MOST_RULES} rules and layers of rules")
    return Parts(base, device_type, [_read_layer(layer) for layer in layers])


def _read_layer(text: str) -> dict[str, str]:
    rules: dict[str, str] = {}
    for item in text.split(",") if text else ():
        op, equals, rule = item.partition("=")
        if not equals or op in rules:
            raise ValueError(
                f"{short(item)} in the text of a policy {'names its operator again' if equals else 'is no rule'}; "
                "expected one 'operator=rule' for each operator"
            )
        rules[op] = rule
    return rules


def _read_key(text: Any) -> Any:
    """The key that `key_text` wrote. A class is looked up in `sys.modules`."""
    if not isinstance(text, str):
        raise TypeError(f"a written policy names modules by path or as 'class module:name', got {short(text)}")
    if not text.startswith("class "):
        return text
    module, _, name = text.removeprefix("class ").partition(":")
    shown = short(f"{module}.{name}")
    scope, found = _names_in(sys.modules.get(module)), None
    if scope is None:
        raise ValueError(
            f"the policy names the module class {shown}, and {short(module)} is not imported: import it before "
            "reading the policy"
        )
    for part in name.split("."):
        found = None if scope is None else scope.get(part)
        scope = _names_in(found)
    if found is None:
        raise ValueError(f"the policy names the module class {shown}, which is not there")
    if not (_is_a(found, type) and issubclass(found, Module)):
        raise ValueError(f"the policy names {shown} as a module class, which it is not: {type(found).__name__}")
    return found


def _names_in(holder: Any) -> Any:
    """The `__dict__` of a module or class, read without running its code; None for anything else."""
    if _is_a(holder, ModuleType):
        return object.__getattribute__(holder, "__dict__")      # a lazy module imports in its own `__getattribute__`
    return type.__dict__["__dict__"].__get__(holder) if _is_a(holder, type) else None


def _is_a(value: Any, cls: type) -> bool:
    """`isinstance` that ignores `value.__class__`, which a proxy may override."""
    return issubclass(type(value), cls)
