"""Modules that a model itself wants in float32: `_keep_in_fp32_modules` of transformers' models.

transformers looks for these patterns in the names of parameters when it loads a model in 16 bits. Under autocast
parameters are float32 anyway, and it is operators that are to be kept out of 16 bits, so patterns mean modules here:
those of which they match every parameter and buffer. `sinks`, one of an attention layer's, means none.
"""

from __future__ import annotations

import re

import torch
from torch.nn import Module

from ampkit.policy.module_paths import is_container, named_paths, starred
from ampkit.policy.module_rules import ModuleRules, matches

__all__ = ["kept_modules"]


def kept_modules(model: Module, dtype: torch.dtype, rules: ModuleRules) -> list[str]:
    """Keys of `for_modules` for the modules of `model` to keep in float32 in regions of `dtype`.

    Left out are modules that `rules` bind, and those with 16-bit parameters, which float32 inputs do not fit.
    """
    modules = dict(named_paths(model))
    patterns = {
        path and f"{path}.": pattern for path, module in modules.items() if (pattern := _pattern(module, dtype))
    }
    if not patterns:
        return []
    matched, others = set[str](), set[str]()        # modules with such tensors
    for path, module in modules.items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                full = f"{path}.{name}".removeprefix(".")
                wanted = any(
                    full.startswith(root) and pattern.search(full, len(root)) for root, pattern in patterns.items()
                )
                (matched if wanted else others).update(_upwards(path))
    whole = {path for path in matched - others if not is_container(modules[path])}
    keys: dict[str, list[str]] = {}
    for path, module in modules.items():
        fits = all(each.dtype.itemsize >= 4 for each in module.parameters() if each.is_floating_point())
        is_outermost = path in whole and (path == "" or whole.isdisjoint(_upwards(path)[1:]))
        if is_outermost and fits and rules.find(module) is None:
            keys.setdefault(starred(path), []).append(path)
    return [
        key
        for pattern, paths in keys.items()
        for key in ([pattern] if [path for path in modules if matches(pattern, path)] == paths else paths)
    ]


def _upwards(path: str) -> list[str]:
    """The paths of a module and of all that it is in, the model's "" included."""
    return [path, *(path[:i] for i, char in enumerate(path) if char == "."), ""]


def _pattern(module: Module, dtype: torch.dtype) -> re.Pattern[str] | None:
    """What a module wants kept in float32 in regions of `dtype`, as one regular expression; None for nothing."""
    always = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    in_float16 = getattr(module, "_keep_in_fp32_modules", None) or ()
    patterns = [*always, *(in_float16 if dtype is torch.float16 else ())] if dtype.itemsize == 2 else []
    return re.compile("|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in patterns)) if patterns else None
