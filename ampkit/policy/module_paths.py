"""Paths of modules: as module rules match them and records show them, without the wrappers that torch adds."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator

from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

_paths: weakref.WeakKeyDictionary[Module, dict[int, tuple[str, str]]] = weakref.WeakKeyDictionary()
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_DATA_PARALLEL = (DataParallel, DistributedDataParallel)


def unwrapped(module: Module) -> Module:
    """The module inside wrappers that torch adds to compile, checkpoint or distribute one; else itself."""
    for name, child in module._modules.items():
        if child is not None and _is_wrapper(module, name):
            return unwrapped(child)
    return module


def named_paths(model: Module, path: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, Module]]:
    """Every module of `model`, itself included at "", with its path; one with several names has several paths."""
    model = unwrapped(model)
    if id(model) in above:      # a module inside itself
        return
    yield path, model
    for name, child in model._modules.items():
        if child is not None:
            yield from named_paths(child, f"{path}.{name}" if path else name, (*above, id(model)))


def is_container(module: Module) -> bool:
    """Whether a module has others and no `forward` of its own, as `ModuleList`: it is they that are called."""
    return type(module).forward is Module.forward and "forward" not in vars(module) and any(module.children())


def starred(path: str) -> str:
    """A module's path with a star for every number."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def path_of(root: Module, module: Module) -> str:
    """The module's name in `root.named_modules()`; its class's name if it is not below `root`.

    Wrappers are left out. A module with several names has the first of them.
    """
    paths = _paths.get(root)
    if paths is None or not _is_at(root, paths.get(id(module), ("?", ""))[0], module):
        paths = {id(child): (name, _without_wrappers(root, name)) for name, child in root.named_modules()}
        _paths[root] = paths
    return paths[id(module)][1] if id(module) in paths else type(module).__name__


def _is_at(root: Module, name: str, module: Module) -> bool:
    """Whether `module` still has this name below `root`."""
    found: Module | None = root
    for part in name.split(".") if name else ():
        found = found._modules.get(part) if found is not None else None
    return found is module


def _without_wrappers(root: Module, name: str) -> str:
    parts, module = [], root
    for part in name.split(".") if name else ():
        if not _is_wrapper(module, part):
            parts.append(part)
        module = module._modules[part] or module
    return ".".join(parts)


def _is_wrapper(module: Module, name: str) -> bool:
    """Whether `module` only wraps its child `name`."""
    return name in _WRAPPERS or (name == "module" and isinstance(module, _DATA_PARALLEL))
