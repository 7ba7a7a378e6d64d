"""Modules that a model itself wants in float32: `_keep_in_fp32_modules` of transformers' models.

transformers looks for these patterns in the names of parameters when it loads a model in 16 bits. Under autocast
parameters are float32 anyway, and it is the products that have to be kept out of 16 bits: so a pattern means the
modules whose names, or whose parameters' names, it matches.
"""

from __future__ import annotations

import re

import torch
from torch.nn import Module

from ampkit.policy.module_paths import named_paths, starred
from ampkit.policy.module_rules import ModuleRules, matches

__all__ = ["kept_modules"]


def kept_modules(model: Module, dtype: torch.dtype, rules: ModuleRules) -> list[str]:
    """Keys of `for_modules` for the modules of `model` to keep in float32 in regions of `dtype`.

    Left out are modules that `rules` bind, and those with 16-bit parameters, which float32 inputs do not fit.
    """
    modules = dict(named_paths(model))
    found = [
        path
        for path in _matched(modules, dtype)
        if rules.find(modules[path]) is None
        and all(each.dtype.itemsize >= 4 for each in modules[path].parameters() if each.is_floating_point())
    ]
    keys: dict[str, list[str]] = {}
    for path in found:
        keys.setdefault(starred(path), []).append(path)
    return [
        key
        for pattern, paths in keys.items()
        for key in ([pattern] if [path for path in modules if matches(pattern, path)] == paths else paths)
    ]


def _matched(modules: dict[str, Module], dtype: torch.dtype) -> list[str]:
    """Paths of the modules that a pattern means, in the model's order.

    A pattern that ends in the name of a module means that module. One that ends in the name of a parameter or buffer
    means its owner, if it matches everything in it: `sinks` of an attention layer do not keep all of that in float32.
    """
    tensors = [
        f"{path}.{name}".removeprefix(".")
        for path, module in modules.items()
        for name in (*module._parameters, *module._buffers)
    ]
    named, owned = set[str](), set[str]()
    for root, module in modules.items():
        pattern = _pattern(module, dtype)
        if pattern is None:
            continue
        prefix = f"{root}." if root else ""
        for name in tensors:
            match = pattern.search(name, len(prefix)) if name.startswith(prefix) else None
            if match is not None:
                end = name.find(".", match.end())
                (owned if end < 0 else named).add(name if end < 0 else name[:end])
    for owner in {name.rpartition(".")[0] for name in owned}:
        prefix = f"{owner}." if owner else ""
        if all(name in owned for name in tensors if name.startswith(prefix)):
            named.add(owner)
    return [path for path in modules if path in named]


def _pattern(module: Module, dtype: torch.dtype) -> re.Pattern[str] | None:
    """What a module wants kept in float32 in regions of `dtype`, as one regular expression; None for nothing."""
    always = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    in_float16 = getattr(module, "_keep_in_fp32_modules", None) or ()
    patterns = [*always, *(in_float16 if dtype is torch.float16 else ())] if dtype.itemsize == 2 else []
    return re.compile("|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in patterns)) if patterns else None
