"""Float32 rules for the modules that a transformers model names in `_keep_in_fp32_modules`.

transformers searches for these patterns in the names of parameters when it loads a 16-bit model. Under autocast
parameters are float32, and the operators must compute in float32, so here a pattern selects modules: the ones in which
it matches every parameter and buffer. `sinks`, one of an attention layer's parameters, selects none.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import torch
from torch.nn import Module

from ampkit.dtypes import PRECISIONS, as_dtype, short
from ampkit.policy.module_paths import is_container, named_paths, unwrapped
from ampkit.policy.policy import Policy

__all__ = ["keep_in_fp32"]

_STRICT, _FLOAT16 = "_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"  # the second applies in float16 only
_PEFT = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")  # PEFT adds these to paths


def keep_in_fp32(policy: Policy, model: Module, dtype: torch.dtype | str) -> Policy:
    """Add float32 rules to a policy for the modules that a transformers model names, in regions of `dtype`.

    `_keep_in_fp32_modules` of the model, or of models in it, applies in float16, `_keep_in_fp32_modules_strict`
    in both 16-bit dtypes. As in transformers these are regular expressions, searched for in the names of parameters
    (without PEFT's parts). A module becomes float32 if they match every parameter and buffer in it, the policy has no
    rule for it, and it has no 16-bit weights. `print(policy.check())` shows these modules.

    Args:
        policy: the policy of the regions.
        model: the model, whose modules may have these attributes.
        dtype: the dtype of the regions: float16 or bfloat16, or its name.

    Returns:
        A policy with rules for these modules; `policy` itself if there are none.

    Raises:
        ValueError: an unknown dtype, patterns that are not regular expressions, or a module of TorchScript to keep.
        TypeError: `model` is not a module.
    """
    if not isinstance(model, Module):
        raise TypeError(f"keep_in_fp32 takes a model; got {type(model).__name__}")
    region_dtype = as_dtype(dtype)
    if not isinstance(region_dtype, torch.dtype) or region_dtype not in PRECISIONS.values():
        raise ValueError(f"dtype is {short(dtype)}; expected the region's, torch.float16 or torch.bfloat16")
    named = dict[Module, None]()
    for _, module in named_paths(model):
        pattern = _pattern(module, region_dtype)
        if pattern is not None:
            named.update(dict.fromkeys(_matched("", module, pattern)))
    modules = [
        module
        for module in named
        if policy.modules.find(module) is None
        and all(param.dtype.itemsize >= 4 for param in module.parameters() if param.is_floating_point())
    ]
    return policy.for_modules(model, dict.fromkeys(modules, torch.float32)) if modules else policy


def _matched(path: str, module: Module, pattern: re.Pattern[str]) -> Iterator[Module]:
    """Yield the outermost modules, from `module` on, that have tensors and whose tensors' names all match."""
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
    for name, child in module.named_children():
        yield from _matched(f"{path}.{name}".removeprefix("."), child, pattern)


def _pattern(module: Module, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return a module's patterns for regions of `dtype` as one regular expression; None if it has none."""
    patterns = list[str]()
    for name in {torch.float16: (_STRICT, _FLOAT16), torch.bfloat16: (_STRICT,)}.get(dtype, ()):
        # PEFT's modules delegate missing attributes to the model inside them, which has its own turn.
        if inspect.getattr_static(module, name, None) is not None:
            attribute = getattr(module, name) or ()
            patterns += [attribute] if isinstance(attribute, str) else attribute
    try:
        return re.compile("|".join(f"(?:{each.replace('*', '.*')})" for each in patterns)) if patterns else None
    except re.error as error:
        raise ValueError(
            f"_keep_in_fp32_modules of {type(module).__name__} has {patterns}; expected regular expressions: {error}"
        ) from None
