"""The region that a module rule asks for: which rules bind a module, whether they apply, what they make of its inputs.

A rule of float32 casts the module's 16-bit inputs and turns autocast off; any other is a region inside the region.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.containers import map_tensors
from ampkit.engine.thread_state import thread
from ampkit.policy.policy import Policy
from ampkit.region.arguments import RegionSpec, checked_spec
from ampkit.torch_internals.dispatcher import current

__all__ = ["cast_inputs", "is_active", "region_for", "rules_of"]


def rules_of(module: Module) -> Iterator[tuple[Policy, Any]]:
    """The policies here that bind a module, and what they say of it."""
    mode = current()
    for _, policy in () if mode is None else mode.policies:
        value = policy.modules.find(module) if policy.modules else None
        if value is not None:
            yield policy, value


def is_active(device_type: str) -> bool:
    """Whether module rules apply here: autocast is on, or the module around is one that a rule keeps in float32."""
    if torch.is_autocast_enabled(device_type):
        return True
    spec = thread.regions[-1].spec if thread.regions else None
    return spec is not None and spec.of_module and not spec.enabled and spec.device_type == device_type


def cast_inputs(args: Any, kwargs: Any, device_type: str) -> tuple[Any, Any]:
    """Arguments with the 16-bit tensors of a device, in any nesting of containers, cast to float32."""

    def cast(tensor: Tensor) -> Tensor:
        low = tensor.dtype is torch.bfloat16 or tensor.dtype is torch.float16
        return tensor.float() if low and tensor.device.type == device_type else tensor

    return map_tensors(args, cast), map_tensors(kwargs, cast)


def region_for(policy: Policy, value: Any) -> RegionSpec:
    """The region that a rule asks for: another policy, float32 without autocast, or a dtype under the same policy."""
    if isinstance(value, Policy):
        return checked_spec(policy.device_type, policy=policy.inside(value), of_module=True)
    if value is torch.float32:
        return checked_spec(policy.device_type, None, False, policy=policy, of_module=True)
    return checked_spec(policy.device_type, value, policy=policy, of_module=True)
