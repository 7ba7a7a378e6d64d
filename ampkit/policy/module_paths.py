"""Paths of modules, without the wrappers that torch adds: for the patterns of module rules and for reports."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

_paths: weakref.WeakKeyDictionary[Module, weakref.WeakKeyDictionary[Module, str]] = weakref.WeakKeyDictionary()
_WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_DATA_PARALLEL = (DataParallel, DistributedDataParallel)


def unwrapped(module: Module) -> Module:
    """The module inside the wrappers that torch adds to compile, checkpoint or distribute it; else itself."""
    children = module._modules
    for name in _WRAPPERS:
        if name in children and (name != "module" or isinstance(module, _DATA_PARALLEL)):
            child = children[name]
            if child is not None:
                return unwrapped(child)
    return module


def _child(module: Module, name: str) -> Module | None:
    """The child of this name, if any."""
    return module._modules[name] if name in module._modules else None  # noqa: SIM401 - scripted ones have no `get`


def named_paths(model: Module, path: str = "") -> Iterator[tuple[str, Module]]:
    """Every module of `model`, itself included, with its path; a module with several names has several paths."""
    model = unwrapped(model)
    yield path, model
    for name, child in model._modules.items():
        if child is not None:
            yield from named_paths(child, f"{path}.{name}" if path else name)


def has_forward(module: Module) -> bool:
    """Whether a module has a `forward` of its own; a module without is never called."""
    if is_scripted(module):
        return hasattr(module, "forward")
    return type(module).forward is not Module.forward or "forward" in vars(module)


def is_container(module: Module) -> bool:
    """Whether a module has children and no `forward` of its own, as `ModuleList`: only its children are called."""
    return not has_forward(module) and next(module.children(), None) is not None


def is_scripted(module: Module) -> bool:
    """Whether a module is scripted or traced: Python calls it, and TorchScript calls the modules in it."""
    return isinstance(module, torch.jit.ScriptModule)


def classes_of(module: Any) -> tuple[type, ...]:
    """The classes of a module, nearest first; for a scripted one, those of `torch.nn` that it had before come first."""
    original = getattr(torch.nn, module.original_name, None) if is_scripted(module) else None
    return (*(original.__mro__ if isinstance(original, type) else ()), *type(module).__mro__)


def was_named(module: Any, name: str) -> bool:
    """Whether a scripted module had a class of this name. TorchScript keeps the name alone, not the class."""
    return is_scripted(module) and module.original_name == name


def starred(path: str) -> str:
    """A module's path with a star for every number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def path_of(root: Module, module: Module) -> str:
    """The first path of a module in `root`; the name of its class if `root` does not contain it."""
    module, paths = unwrapped(module), _paths.get(root)
    path = None if paths is None else paths.get(module)
    if path is None or _at(root, path) is not module:
        paths = weakref.WeakKeyDictionary({each: path for path, each in reversed([*named_paths(root)])})
        _paths[root] = paths
        path = paths.get(module, type(module).__name__)
    return path


def _at(root: Module, path: str) -> Module | None:
    """The module that has this path now; None if there is none."""
    module = unwrapped(root)
    for name in path.split(".") if path else ():
        child = _child(module, name)
        if child is None:
            return None
        module = unwrapped(child)
    return module
