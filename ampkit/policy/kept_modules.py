"""Modules that a model of transformers asks to keep in float32, by its attribute `_keep_in_fp32_modules`.

transformers searches for these patterns in the names of parameters when it loads a model in 16 bits. Under autocast
parameters stay float32, and operators have to be kept out of 16 bits, so here a pattern selects modules: those in which
it matches every parameter and buffer. `sinks`, one of an attention layer's parameters, selects none.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import torch
from torch.nn import Module

from ampkit.policy.module_paths import has_forward, is_container, is_scripted, named_paths, unwrapped
from ampkit.policy.module_rules import ModuleRules
from ampkit.user_code import warn_user

__all__ = ["kept_modules"]

_ATTRIBUTES = ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")  # the second applies in float16 only
_PEFT = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")  # PEFT adds these to paths


def kept_modules(model: Module, dtype: torch.dtype, rules: ModuleRules) -> list[Module]:
    """The modules of `model` to keep in float32 in regions of `dtype`: the outermost, and containers' modules.

    Omits modules that `rules` bind, modules with 16-bit parameters, which float32 inputs do not fit, and, with a
    warning, modules inside scripted ones.
    """
    asked_for = dict[Module, None]()
    for _, module in named_paths(model):
        pattern = _pattern(module, dtype)
        if pattern is not None:
            asked_for.update(dict.fromkeys(_matched("", module, pattern, rules)))
    return [
        module
        for module in asked_for
        if rules.find(module) is None
        and all(each.dtype.itemsize >= 4 for each in module.parameters() if each.is_floating_point())
    ]


def _matched(path: str, module: Module, pattern: re.Pattern[str], rules: ModuleRules) -> Iterator[Module]:
    """The outermost modules, from `module` on, that have tensors and whose tensors' names all match the pattern."""
    module = unwrapped(module)
    names = [
        _PEFT.sub("", f"{inner}.{name}".removeprefix("."))
        for inner, each in named_paths(module, path)
        for name, tensor in (*each._parameters.items(), *each._buffers.items())
        if tensor is not None
    ]
    if names and all(map(pattern.search, names)) and not is_container(module):
        yield module
        return
    if is_scripted(module) and has_forward(module):  # TorchScript calls the modules in it, which no rule reaches
        matching = sorted(filter(pattern.search, names))
        if matching and rules.find(module) is None:
            warn_user(
                f"_keep_in_fp32_modules asks for {', '.join(matching)} in float32, in the scripted module "
                f"{path or 'that is the model'}, which computes as a whole in the region's dtype; a rule of "
                "Policy.for_modules keeps the whole module in float32"
            )
        return
    for name, child in module.named_children():
        yield from _matched(f"{path}.{name}".removeprefix("."), child, pattern, rules)


def _pattern(module: Module, dtype: torch.dtype) -> re.Pattern[str] | None:
    """The patterns of a module for regions of `dtype`, as one regular expression; None if it has none.

    Raises `ValueError`, naming the module's class, for patterns that are not regular expressions.
    """
    patterns = list[str]()
    for name in _ATTRIBUTES[: {torch.bfloat16: 1, torch.float16: 2}.get(dtype, 0)]:
        # `getattr` of PEFT's modules would answer with the attribute of the model inside them
        attribute = inspect.getattr_static(module, name, None) or ()
        patterns += [attribute] if isinstance(attribute, str) else attribute
    try:
        return re.compile("|".join(f"(?:{each.replace('*', '.*')})" for each in patterns)) if patterns else None
    except re.error as error:
        raise ValueError(
            f"_keep_in_fp32_modules of {type(module).__name__} has {patterns}; expected regular expressions: {error}"
        ) from None
