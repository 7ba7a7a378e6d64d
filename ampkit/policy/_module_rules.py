"""Rules by module: which precision a module computes in, found by instance, path or class.

Only data and matching; entering the regions is `_module_regions`' work.
"""

from __future__ import annotations

import importlib
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from ampkit.policy.policy import Policy

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModuleRules:
    """An ordered, immutable set of (key, dtype or policy); falsy when it is empty.

    A module among the keys is held by a weak reference: a policy, and what is cached for it, outlives no model.
    """

    __slots__ = ("items",)

    def __init__(self, items: tuple[tuple[Any, Any], ...] = ()) -> None:
        self.items = items

    def __bool__(self) -> bool:
        return bool(self.items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleRules) and frozenset(self.items) == frozenset(other.items)

    def __hash__(self) -> int:
        return hash(frozenset(self.items))

    def extended(self, rules: Any, device_type: str, policy_type: type[Policy]) -> ModuleRules:
        """With more rules; raises `TypeError` or `ValueError` naming the key that does not fit."""
        if not isinstance(rules, Mapping):
            raise TypeError(f"for_modules takes a dict of module to dtype or policy, got {type(rules).__name__}")
        items = list(self.items)
        for key, value in rules.items():
            _check_key(key)
            held = weakref.ref(key) if isinstance(key, Module) else key
            if any(held == other for other, _ in items):
                raise ValueError(f"module {_describe(held)} already has a rule in this policy")
            items.append((held, _check_value(held, value, device_type, policy_type)))
        return ModuleRules(tuple(items))

    def find(self, module: Module, path: str) -> torch.dtype | Policy | None:
        """The rule of a module at a path ("" for the outermost); None if no key means it.

        Raises `ValueError` if two path patterns mean it and disagree.
        """
        for key, value in self.items:
            if isinstance(key, weakref.ref) and key() is module:
                return value
        matching = [(key, value) for key, value in self.items if isinstance(key, str) and _matches(key, path)]
        if len({value for _, value in matching}) > 1:
            raise ValueError(
                f"module {path!r} is meant by several patterns that disagree: "
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

    def to_list(self) -> list[list[Any]]:
        """As plain lists, for `Policy.to_dict`."""
        return [[_key_name(key), _value_name(value)] for key, value in self.items]

    def describe(self) -> str:
        """As it is written in code, for `repr`."""
        if not self.items:
            return ""
        return ".for_modules({" + ", ".join(f"{_describe(key)}: {value!r}" for key, value in self.items) + "})"


NONE = ModuleRules()


def from_list(items: list[Any], read_policy: Callable[[Any], Policy]) -> Iterator[tuple[Any, Any]]:
    """What `to_list` wrote, with classes imported and policies read by `read_policy`."""
    for key, value in items:
        yield _read_key(key), value if isinstance(value, str) else read_policy(value)


def path_of(root: Module, module: Module) -> str:
    """The module's name as `root.named_modules()` gives it; its own class name, if it is not below `root`.

    What torch wraps around modules to compile, checkpoint or distribute them is not counted. A module that `root`
    holds under several names has the first of them.
    """
    paths = _paths.get(root)
    if paths is None or not _is_at(root, paths.get(id(module), ("?", ""))[0], module):
        paths = {id(child): (name, _without_wrappers(root, name)) for name, child in root.named_modules()}
        _paths[root] = paths
    return paths[id(module)][1] if id(module) in paths else type(module).__name__


def _is_at(root: Module, name: str, module: Module) -> bool:
    """Whether `module` is still where it was when names were last looked up."""
    found: Module | None = root
    for part in name.split(".") if name else ():
        found = found._modules.get(part) if found is not None else None
    return found is module


def _without_wrappers(root: Module, name: str) -> str:
    parts, module = [], root
    for part in name.split(".") if name else ():
        if part not in _WRAPPERS and not (part == "module" and isinstance(module, _DATA_PARALLEL)):
            parts.append(part)
        module = module._modules[part] or module
    return ".".join(parts)


_paths: weakref.WeakKeyDictionary[Module, dict[int, tuple[str, str]]] = weakref.WeakKeyDictionary()
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_DATA_PARALLEL = (DataParallel, DistributedDataParallel)


def _check_key(key: Any) -> None:
    if isinstance(key, str):
        if not key or not re.fullmatch(r"[\w*]+(\.[\w*]+)*", key):
            raise ValueError(
                f"{key!r} is no module path pattern; expected names and '*' joined by dots, like 'blocks.*.attn'"
            )
    elif not isinstance(key, Module) and not (isinstance(key, type) and issubclass(key, Module)):
        raise TypeError(f"a key of for_modules is a path pattern, a module class or a module, got {key!r}")


def _check_value(key: Any, value: Any, device_type: str, policy_type: type[Policy]) -> Any:
    if isinstance(value, policy_type):
        if value.device_type != device_type:
            raise ValueError(
                f"the policy for module {_describe(key)} is for {value.device_type!r}, not {device_type!r}"
            )
        return value
    dtype = _DTYPES.get(value) if isinstance(value, str) else value
    if dtype not in _DTYPES.values():
        raise ValueError(
            f"{value!r} is no precision for module {_describe(key)}; expected torch.float32, torch.bfloat16, "
            "torch.float16, their names, or a Policy"
        )
    return dtype


def _matches(pattern: str, path: str) -> bool:
    """`*` within a name or for one name, `**` for any number of names; the outermost module's path, "", is for none."""
    parts = pattern.split(".")
    last = parts.pop()
    regex = "".join(r"([^.]+\.)*" if part == "**" else _one_name(part) + r"\." for part in parts)
    regex += r"[^.]+(\.[^.]+)*" if last == "**" else _one_name(last)
    return path != "" and re.fullmatch(regex, path) is not None


def _one_name(part: str) -> str:
    return re.escape(part).replace(r"\*", "[^.]*")


def _describe(key: Any) -> str:
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    if isinstance(key, str):
        return repr(key)
    module = key()
    return "<a module that is gone>" if module is None else f"<{type(module).__name__} at {id(module):#x}>"


def _key_name(key: Any) -> str:
    if isinstance(key, weakref.ref):
        raise ValueError(
            f"a policy that names the module {_describe(key)} itself cannot be written down; use its path or class"
        )
    if isinstance(key, type) and "<" in key.__qualname__:
        raise ValueError(
            f"a policy that names the class {_describe(key)} cannot be written down: a class made inside a function "
            "cannot be found again; use a path, or a class at the top level of a module"
        )
    return f"class {key.__module__}:{key.__qualname__}" if isinstance(key, type) else key


def _value_name(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value.to_dict()


def _read_key(key: str) -> Any:
    if not key.startswith("class "):
        return key
    module, _, name = key.removeprefix("class ").partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the policy names the module class {module}.{name}, which is not here: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Module)):
        raise ValueError(f"the policy names {module}.{name} as a module class, which it is not: {type(found).__name__}")
    return found
