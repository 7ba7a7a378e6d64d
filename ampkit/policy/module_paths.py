"""Paths of modules: as module rules match them and records show them, without the wrappers that torch adds."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator

from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

_paths: weakref.WeakKeyDictionary[Module, weakref.WeakKeyDictionary[Module, str]] = weakref.WeakKeyDictionary()
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_DATA_PARALLEL = (DataParallel, DistributedDataParallel)


def unwrapped(module: Module) -> Module:
    """The module inside wrappers that torch adds to compile, checkpoint or distribute one; else itself."""
    for name in ("module",) if isinstance(module, _DATA_PARALLEL) else _WRAPPERS:
        child = module._modules.get(name)
        if child is not None:
            return unwrapped(child)
    return module


def named_paths(model: Module, path: str = "") -> Iterator[tuple[str, Module]]:
    """Every module of `model`, itself included, with its path; one with several names has several paths."""
    model = unwrapped(model)
    yield path, model
    for name, child in model._modules.items():
        if child is not None:
            yield from named_paths(child, f"{path}.{name}" if path else name)


def is_container(module: Module) -> bool:
    """Whether a module has others and no `forward` of its own, as `ModuleList`: it is they that are called."""
    return type(module).forward is Module.forward and "forward" not in vars(module) and any(module.children())


def starred(path: str) -> str:
    """A module's path with a star for every number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def path_of(root: Module, module: Module) -> str:
    """The first path of a module in `root`; its class's name if it is not in it."""
    module, paths = unwrapped(module), _paths.get(root)
    if paths is None or module not in paths or _at(root, paths[module]) is not module:
        paths = weakref.WeakKeyDictionary({each: path for path, each in reversed([*named_paths(root)])})
        _paths[root] = paths
    return paths.get(module, type(module).__name__)


def _at(root: Module, path: str) -> Module | None:
    """The module that has this path now."""
    found: Module | None = unwrapped(root)
    for name in path.split(".") if path else ():
        found = found._modules.get(name) if found is not None else None
        found = None if found is None else unwrapped(found)
    return found
