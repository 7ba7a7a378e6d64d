"""Modules that a model itself wants in float32: `_keep_in_fp32_modules` of transformers' models.

transformers looks for these patterns in the names of parameters when it loads a model in 16 bits. Under autocast
parameters are float32 anyway, and it is operators that are to be kept out of 16 bits, so patterns mean modules here:
those of which they match every parameter and buffer. `sinks`, one of an attention layer's, means none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch.nn import Module

from ampkit.policy.module_paths import is_container, named_paths, unwrapped
from ampkit.policy.module_rules import ModuleRules

__all__ = ["kept_modules"]


def kept_modules(model: Module, dtype: torch.dtype, rules: ModuleRules) -> list[Module]:
    """The modules of `model` to keep in float32 in regions of `dtype`: the outermost, and containers' modules.

    Left out are modules that `rules` bind, and those with 16-bit parameters, which float32 inputs do not fit.
    """
    found = dict[Module, None]()
    for _, module in named_paths(model):
        pattern = _pattern(module, dtype)
        if pattern is not None:
            found.update(dict.fromkeys(_matched("", module, pattern)))
    return [
        module for module in found
        if rules.find(module) is None
        and all(each.dtype.itemsize >= 4 for each in module.parameters() if each.is_floating_point())
    ]


def _matched(path: str, module: Module, pattern: re.Pattern[str]) -> Iterator[Module]:
    """The outermost modules, from this one on, that have tensors, in the names of all of which the pattern is found."""
    module = unwrapped(module)
    names = [
        f"{inner}.{name}".removeprefix(".")
        for inner, each in named_paths(module, path)
        for name, tensor in (*each._parameters.items(), *each._buffers.items()) if tensor is not None
    ]
    if names and all(map(pattern.search, names)) and not is_container(module):
        yield module
        return
    for name, child in module.named_children():
        yield from _matched(f"{path}.{name}".removeprefix("."), child, pattern)


def _pattern(module: Module, dtype: torch.dtype) -> re.Pattern[str] | None:
    """What a module wants kept in float32 in regions of `dtype`, as one regular expression; None for nothing."""
    always = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    in_float16 = getattr(module, "_keep_in_fp32_modules", None) or ()
    patterns = [*always, *(in_float16 if dtype is torch.float16 else ())] if dtype.itemsize == 2 else []
    return re.compile("|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in patterns)) if patterns else None
