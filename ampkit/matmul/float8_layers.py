"""Lists a model's linear layers: which ones a policy computes in FP8, and why not the others. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Linear, Module

from ampkit.dtypes import short
from ampkit.matmul.float8_matmul import lacks_float8
from ampkit.matmul.float8_recipes import DTYPES, RECIPES, wrong_size
from ampkit.policy.module_paths import unwrapped
from ampkit.policy.policy import Policy
from ampkit.policy.rules import Rule

__all__ = ["float8_layers"]


def float8_layers(policy: Policy, model: Module) -> list[str]:
    """List each `nn.Linear` of `model`, and each `Conv1D` of transformers, with the rule that it follows.

    A line has the layer's path, its size (N, K) and the rule in a region with `policy`, rules for modules included. For
    a layer under an FP8 rule that follows LOWER, the line has the reason. Runs nothing.

    Args:
        policy: a policy.
        model: a model.

    Returns:
        The lines.

    Raises:
        TypeError: an argument has a wrong type.
    """
    if not isinstance(policy, Policy) or not isinstance(model, Module):
        raise TypeError(f"float8_layers takes a Policy and a model; got {short(policy)} and {short(model)}")
    return list(_lines(policy, model, "", torch.bfloat16))


def _lines(policy: Policy, model: Module, path: str, dtype: torch.dtype) -> Iterator[str]:
    module: Any = unwrapped(model)
    precision = policy.modules.find(module)
    if isinstance(precision, torch.dtype):
        dtype = precision
    elif precision is not None:
        policy, dtype = policy.inside(precision), torch.bfloat16
    # A Conv1D calls `addmm` and has a weight of shape (K, N).
    is_conv1d = type(module).__module__ == "transformers.pytorch_utils" and type(module).__name__ == "Conv1D"
    if isinstance(module, Linear) or is_conv1d:
        k, n = module.weight.shape if is_conv1d else (module.in_features, module.out_features)
        op = torch.ops.aten.addmm.default if is_conv1d else torch.ops.aten.linear.default
        rule = policy.rules().get(op, Rule.DECOMPOSE)
        why = _why_not(policy.device_type, module.weight, k, n) if rule in RECIPES else ""
        rule_text = "float32" if dtype is torch.float32 else f"LOWER: {why}" if why else rule.name
        yield f"{path or 'the model itself'} ({n}, {k}) {rule_text}"
    for name, child in module.named_children():
        yield from _lines(policy, child, f"{path}.{name}" if path else name, dtype)


def _why_not(device_type: str, weight: torch.Tensor, k: int, n: int) -> str:
    """Return why a product with this weight is not computed in FP8; "" if it is."""
    device = weight.device if weight.device.type == device_type else torch.device(device_type)
    wrong_dtype = "" if weight.dtype in DTYPES else f"a {str(weight.dtype).removeprefix('torch.')} weight"
    return wrong_size(k, n) or lacks_float8(device) or wrong_dtype
