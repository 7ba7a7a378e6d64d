"""The only door to `ampkit_kernels`; opened at first use, so that importing ampkit stays light.

The lists handed over come from `ampkit.gradients.collect`, which has already validated them: on the CPU the
reference functions are called directly, without the public functions' checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """`grads *= inv_scale`; sets `found_inf` to 1 where a value is not finite. One device; never syncs."""
    _implementation(inv_scale.device).unscale_(grads, inv_scale, found_inf)


def norm_and_check(
    grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, norm_type: float = 2.0
) -> Tensor:
    """Norm of `grads * inv_scale`, gradients only read; sets `found_inf` as `unscale_` would. Never syncs."""
    return _implementation(inv_scale.device).norm_and_check(grads, inv_scale, found_inf, norm_type)


def multiply_(grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
    """`grads *= factor`, unless the factor is 1 or `found_inf` is set. One device; never syncs."""
    _implementation(factor.device).multiply_(grads, factor, found_inf)


def nonfinite_counts(grads: Sequence[Tensor]) -> Tensor:
    """Per tensor the number of inf and of NaN, int64 `[n, 2]`. One device; never syncs."""
    return _implementation(grads[0].device).nonfinite_counts(grads)


def update_scale_(
    scale: Tensor, growth_tracker: Tensor, hysteresis: Tensor, found_inf: Tensor, **rule: Any
) -> None:
    """Move scale, growth tracker and hysteresis counter on by one update, in place. Never syncs."""
    import ampkit_kernels

    ampkit_kernels.update_scale_(scale, growth_tracker, hysteresis, found_inf, **rule)


def _implementation(device: torch.device) -> Any:
    if device.type == "cpu":
        from ampkit_kernels import reference

        return reference
    import ampkit_kernels

    return ampkit_kernels


def read_if_free(value: Tensor) -> float | None:
    """The number in a one-element tensor if the host can see it without waiting for a device, else None."""
    if value.device.type != "cpu":
        return None
    return value.numpy().item()
