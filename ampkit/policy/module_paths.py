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
    for name, child in module._modules.items():
        if child is not None and _is_wrapper(module, name):
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
    module = unwrapped(module)
    if module not in _paths.get(root, ()):
        _paths[root] = weakref.WeakKeyDictionary({each: path for path, each in reversed([*named_paths(root)])})
    return _paths[root].get(module, type(module).__name__)


def _is_wrapper(module: Module, name: str) -> bool:
    """Whether `module` only wraps its child `name`."""
    return name in _WRAPPERS or (name == "module" and isinstance(module, _DATA_PARALLEL))
