"""Rules by module: which rule a module follows, found by instance, path or class.

Only keys and matching: `policy` checks the values, `region.module_hooks` enters the regions.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch.nn import Module

from ampkit.policy.messages import short


class Instance:
    """A module as a key, compared by identity and held weakly: a policy and its caches keep no model alive.

    A rule whose module was freed matches nothing.
    """

    __slots__ = ("module",)

    def __init__(self, module: Module) -> None:
        self.module = weakref.ref(module)   # `ref` returns one object per live module

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Instance) and self.module is other.module

    def __hash__(self) -> int:
        return id(self.module)


Key = str | type[Module] | Instance


class ModuleRules:
    """An ordered, immutable set of (key, value); falsy when it is empty. Values are opaque, hashable and comparable."""

    __slots__ = ("items",)

    def __init__(self, items: tuple[tuple[Key, Any], ...] = ()) -> None:
        self.items = items

    def __bool__(self) -> bool:
        return bool(self.items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleRules) and frozenset(self.items) == frozenset(other.items)

    def __hash__(self) -> int:
        return hash(frozenset(self.items))

    def extended(self, items: Iterable[tuple[Key, Any]]) -> ModuleRules:
        """These rules and more; raises `ValueError` naming a key that is already set."""
        found = dict(self.items)
        for key, value in items:
            if key in found:
                raise ValueError(f"module {describe(key)} already has a rule in this policy")
            found[key] = value
        return ModuleRules(tuple(found.items()))

    def find(self, module: Module, path: str) -> Any:
        """The value for a module at a path ("" for the outermost); None if no key matches.

        Raises `ValueError` if two path patterns match with different values.
        """
        for key, value in self.items:
            if isinstance(key, Instance) and key.module() is module:
                return value
        matching = [(key, value) for key, value in self.items if isinstance(key, str) and _matches(key, path)]
        if len({value for _, value in matching}) > 1:
            raise ValueError(
                f"module {path!r} matches several patterns that disagree: "
                + ", ".join(f"{key!r}: {value}" for key, value in matching)
                + "; make one of them narrower, or give the module itself as a key"
            )
        if matching:
            return matching[0][1]
        classes = {key: value for key, value in self.items if isinstance(key, type)}
        for cls in type(module).__mro__:
            if cls in classes:
                return classes[cls]
        return None

    def copied(self, memo: dict[int, Any]) -> ModuleRules:
        """For `deepcopy`: modules that it has copied are replaced by their copies, others stay."""
        return ModuleRules(tuple((_copied_key(key, memo), copy.deepcopy(value, memo)) for key, value in self.items))

    def describe(self) -> str:
        """As it is written in code, for `repr`."""
        if not self.items:
            return ""
        return ".for_modules({" + ", ".join(f"{_code(key)}: {value!r}" for key, value in self.items) + "})"


NONE = ModuleRules()


def checked_key(key: Any) -> Key:
    """A path pattern, a module class or a module as a key; `TypeError` or `ValueError` for anything else."""
    if isinstance(key, Module):
        return Instance(key)
    if isinstance(key, type) and issubclass(key, Module):
        return key
    if not isinstance(key, str):
        raise TypeError(f"a key of for_modules is a path pattern, a module class or a module, got {short(key)}")
    if not re.fullmatch(r"[\w*]+(\.[\w*]+)*", key):
        raise ValueError(
            f"{short(key)} is no module path pattern; expected names and '*' joined by dots, like 'blocks.*.attn'"
        )
    return key


def describe(key: Key) -> str:
    """A key as messages show it."""
    return short(key) if isinstance(key, str) else _code(key)


def _code(key: Key) -> str:
    if isinstance(key, str):
        return repr(key)
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    module = key.module()
    return "<a module that is gone>" if module is None else f"<{type(module).__name__} at {id(module):#x}>"


def _copied_key(key: Key, memo: dict[int, Any]) -> Key:
    module = key.module() if isinstance(key, Instance) else None
    return key if module is None else Instance(memo.get(id(module), module))


def _matches(pattern: str, path: str) -> bool:
    """`*` matches a name or part of one, `**` any number of names; nothing matches "", the outermost module's path.

    One pass over the pattern: as a regular expression, patterns with many stars would backtrack exponentially.
    """
    if path == "":
        return False
    names = path.split(".")
    *parts, last = pattern.split(".")
    taken = [0]     # how many names the pattern may have used up so far, in order
    for part in parts:
        if part == "**":
            taken = list(range(taken[0], len(names)))
        else:
            taken = [n + 1 for n in taken if n + 1 < len(names) and fnmatchcase(names[n], part)]
        if not taken:
            return False
    return last == "**" or (taken[-1] == len(names) - 1 and fnmatchcase(names[-1], last))
