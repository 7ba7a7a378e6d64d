"""What a rule for a module means: the region around its forward and the casts of its inputs, eager and traced.

A float32 rule casts the module's 16-bit inputs and disables autocast; any other rule opens a region inside the region.
`module_hooks` and `traced` use these functions.
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
    """Yield each policy of the open region that binds a module, and the precision (a dtype or a policy) it asks for."""
    mode = current()
    if mode is None:
        return
    for _, policy in mode.policies:
        precision = policy.modules.find(module) if policy.modules else None
        if precision is not None:
            yield policy, precision


def is_active(device_type: str) -> bool:
    """Whether module rules apply: autocast is on, or a rule keeps the module around this one in float32."""
    if torch.is_autocast_enabled(device_type):
        return True
    spec = thread.regions[-1].spec if thread.regions else None
    return spec is not None and spec.of_module and not spec.enabled and spec.device_type == device_type


def cast_inputs(args: Any, kwargs: Any, device_type: str) -> tuple[Any, Any]:
    """Cast the 16-bit tensors of a device, in any nesting of containers, to float32."""

    def to_float32(tensor: Tensor) -> Tensor:
        is_16_bit = tensor.dtype is torch.bfloat16 or tensor.dtype is torch.float16
        return tensor.float() if is_16_bit and tensor.device.type == device_type else tensor

    return tuple([map_tensors(each, to_float32) for each in args]), kwargs and map_tensors(kwargs, to_float32)


def region_for(policy: Policy, precision: Any) -> RegionSpec:
    """The region that a rule asks for: another policy, float32 without autocast, or a dtype under the same policy."""
    if isinstance(precision, Policy):
        return checked_spec(policy.device_type, policy=policy.inside(precision), of_module=True)
    if precision is torch.float32:
        return checked_spec(policy.device_type, None, False, policy=policy, of_module=True)
    return checked_spec(policy.device_type, precision, policy=policy, of_module=True)
