"""Paths of modules, as module rules match them."""

from __future__ import annotations

import weakref

from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

_paths: weakref.WeakKeyDictionary[Module, dict[int, tuple[str, str]]] = weakref.WeakKeyDictionary()
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_DATA_PARALLEL = (DataParallel, DistributedDataParallel)


def path_of(root: Module, module: Module) -> str:
    """The module's name in `root.named_modules()`; its class's name if it is not below `root`.

    Wrappers that torch adds to compile, checkpoint or distribute modules are left out. A module with several names
    has the first of them.
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
        if part not in _WRAPPERS and not (part == "module" and isinstance(module, _DATA_PARALLEL)):
            parts.append(part)
        module = module._modules[part] or module
    return ".".join(parts)
