"""Which linear layers of a model a policy computes in FP8, and why the others are not: by sizes, nothing is run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import Linear, Module

from ampkit.policy.float8_recipes import DTYPES, RECIPES, wrong_size
from ampkit.policy.module_paths import unwrapped
from ampkit.policy.rules import Rule
from ampkit.torch_internals.float8 import lacks_float8

__all__ = ["LinearLayer", "linear_layers"]

_LINEAR = torch.ops.aten.linear.default


class LinearLayer(NamedTuple):
    """An `nn.Linear` of a model, as a region with the policy computes it."""

    path: str
    out_features: int
    in_features: int
    rule: str       # of `aten::linear` in it; "float32" where a module rule turns autocast off
    why: str        # under an FP8 rule: why it follows LOWER all the same; "" if it does not

    def __str__(self) -> str:
        said = f"LOWER: {self.why}" if self.why else self.rule
        return f"{self.path or 'the model itself'} ({self.out_features}, {self.in_features}): {said}"


def linear_layers(policy: Any, model: Module) -> tuple[LinearLayer, ...]:
    """Every `nn.Linear` of `model` by its first path, under `policy` and the rules for modules in it."""
    return tuple(_layers(policy, torch.bfloat16, "", model, set()))


def _layers(policy: Any, dtype: torch.dtype, path: str, module: Module, seen: set[Module]) -> Iterator[LinearLayer]:
    """Those of a module that runs in a region of this policy and dtype."""
    module = unwrapped(module)
    if module in seen:
        return
    seen.add(module)
    value = policy.modules.find(module)
    if isinstance(value, torch.dtype):
        dtype = value
    elif value is not None:
        policy, dtype = policy.inside(value), torch.bfloat16
    if isinstance(module, Linear):
        yield _layer(policy, dtype, path, module)
    for name, child in module.named_children():
        yield from _layers(policy, dtype, f"{path}.{name}" if path else name, child, seen)


def _layer(policy: Any, dtype: torch.dtype, path: str, module: Linear) -> LinearLayer:
    n, k = module.out_features, module.in_features
    rule = policy.rules().get(_LINEAR, Rule.DECOMPOSE)
    why = ""
    if dtype is not torch.float32 and rule in RECIPES:
        weight = module.weight
        device = weight.device if weight.device.type == policy.device_type else torch.device(policy.device_type)
        of_dtype = "" if weight.dtype in DTYPES else f"a {str(weight.dtype).removeprefix('torch.')} weight"
        why = wrong_size(k, n) or lacks_float8(device) or of_dtype
    return LinearLayer(path, n, k, "float32" if dtype is torch.float32 else rule.name, why)
