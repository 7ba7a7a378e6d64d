"""A list of a model's linear layers: which ones a policy computes in FP8, and why not the others. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Linear, Module

from ampkit.policy.float8_recipes import DTYPES, RECIPES, wrong_size
from ampkit.policy.module_paths import unwrapped, was_named
from ampkit.policy.rules import Rule
from ampkit.torch_internals.float8_matmul import lacks_float8

__all__ = ["linear_layers"]


def linear_layers(policy: Any, model: Module, path: str = "", dtype: torch.dtype = torch.bfloat16) -> Iterator[str]:
    """A line for each `nn.Linear` of `model`, and each `Conv1D` of transformers: path, (N, K), rule.

    The rule is that of a region of `dtype`, module rules included; where an FP8 rule follows LOWER, with the reason.
    """
    module: Any = unwrapped(model)
    precision = policy.modules.find(module)
    if isinstance(precision, torch.dtype):
        dtype = precision
    elif precision is not None:
        policy, dtype = policy.inside(precision), torch.bfloat16
    # A Conv1D calls `addmm` and has a weight of shape (K, N).
    is_conv1d = type(module).__module__ == "transformers.pytorch_utils" and type(module).__name__ == "Conv1D"
    scripted = was_named(module, "Linear")
    if isinstance(module, Linear) or is_conv1d or scripted:
        weight = module.weight
        if scripted:
            n, k = weight.shape
        elif is_conv1d:
            k, n = weight.shape
        else:
            n, k = module.out_features, module.in_features
        op = torch.ops.aten.addmm.default if is_conv1d else torch.ops.aten.linear.default
        rule = policy.rules().get(op, Rule.DECOMPOSE)
        why = _why_not(policy.device_type, weight, k, n) if rule in RECIPES else ""
        if dtype is torch.float32:
            followed = "float32"
        elif why:
            followed = f"LOWER: {why}"
        elif scripted and rule in RECIPES:
            followed = f"{rule.name} in forward alone: TorchScript has a backward of its own"
        else:
            followed = rule.name
        yield f"{path or 'the model itself'} ({n}, {k}) {followed}"
    for name, child in module.named_children():
        yield from linear_layers(policy, child, f"{path}.{name}" if path else name, dtype)


def _why_not(device_type: str, weight: torch.Tensor, k: int, n: int) -> str:
    """Why a product with this weight is not computed in FP8; "" if it is."""
    device = weight.device if weight.device.type == device_type else torch.device(device_type)
    wrong_dtype = "" if weight.dtype in DTYPES else f"a {str(weight.dtype).removeprefix('torch.')} weight"
    return wrong_size(k, n) or lacks_float8(device) or wrong_dtype
