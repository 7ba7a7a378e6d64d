"""The only module that imports `ampkit_kernels`; at first use, so that importing ampkit stays cheap.

The lists come from `collect`, which has validated them: on the CPU the reference functions are called directly, without
the public functions' checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampkit.gradients.transfer import host_value_or_none as host_value_or_none

IMPLS = ("auto", "triton", "reference")
_loaded: list[Any] = []


def flat_list(grads: Sequence[Tensor]) -> list[Tensor] | None:
    """The gradients as a list that the kernels take unchecked, for immediate use.

    None if they are on the CPU, on several devices, of several dtypes, or anything but plain dense tensors.
    """
    return _modules()[1].FlatList.of(grads) if grads and serves(grads[0]) else None


def serves(tensor: Tensor) -> bool:
    """Whether the Triton kernels run on this tensor's device."""
    return not tensor.is_cpu and uses_triton("auto", tensor.device)


def inverse_scale(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """1 / scale, a clear flag, and a copy of the scale, in one launch. Requires `serves(scale)`."""
    return _triton_ops().inverse_scale(scale)


def norm_and_clip_factor(
    grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, norm_type: float, max_norm: float
) -> tuple[Tensor, Tensor] | None:
    """`norm_and_check`, and `inv_scale` times the clip coefficient, both 0-d; None if that takes more launches.

    One launch serves a `flat_list` on the device of `inv_scale`, for orders 1, 2 and inf.
    """
    if type(grads) is not _modules()[1].FlatList or norm_type not in (1.0, 2.0, float("inf")):
        return None
    return _triton_ops().norm_and_clip_factor(grads, inv_scale, found_inf, norm_type, max_norm)


def update_scale_(scale: Tensor, *state: Any, **rule: Any) -> None:
    """Apply a strategy's rule to the scale in one launch; see `ampkit_kernels.triton_ops.update_scale_`."""
    _triton_ops().update_scale_(scale, *state, **rule)


def tally_update_(totals: Tensor, *update: Any) -> None:
    """Count one update of a scaler in one launch; see `ampkit_kernels.triton_ops.tally_update_`."""
    _triton_ops().tally_update_(totals, *update)


def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """`grads *= inv_scale`; sets `found_inf` to 1 where a value is not finite. One device; never syncs."""
    (_loaded or _modules())[0 if inv_scale.is_cpu else 1].unscale_(grads, inv_scale, found_inf)


def norm_and_check(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, norm_type: float = 2.0) -> Tensor:
    """Norm of `grads * inv_scale`, gradients only read; sets `found_inf` as `unscale_` would. Never syncs."""
    return (_loaded or _modules())[0 if inv_scale.is_cpu else 1].norm_and_check(grads, inv_scale, found_inf, norm_type)


def multiply_(grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
    """`grads *= factor`, unless the factor is 1 or `found_inf` is set. One device; never syncs."""
    (_loaded or _modules())[0 if factor.is_cpu else 1].multiply_(grads, factor, found_inf)


def nonfinite_counts(grads: Sequence[Tensor]) -> Tensor:
    """The numbers of inf and NaN per tensor, int64 `[n, 2]`. One device; never syncs."""
    return (_loaded or _modules())[0 if grads[0].is_cpu else 1].nonfinite_counts(grads)


def adamw_(*lists: Sequence[Tensor], **options: Any) -> None:
    """One AdamW step over lists of tensors; see `ampkit_kernels.adamw_`. One device; never syncs."""
    _modules()[1].adamw_(*lists, **options)


def sgd_(*lists: Sequence[Tensor], **options: Any) -> None:
    """One SGD step over lists of tensors; see `ampkit_kernels.sgd_`. One device; never syncs."""
    _modules()[1].sgd_(*lists, **options)


def adamw_plan(*lists: Sequence[Tensor], **options: Any) -> Any:
    """A plan for AdamW steps over these lists, or None; see `ampkit_kernels.adamw_plan`."""
    return _modules()[1].adamw_plan(*lists, **options)


def sgd_plan(*lists: Sequence[Tensor], **options: Any) -> Any:
    """A plan for SGD steps over these lists, or None; see `ampkit_kernels.sgd_plan`."""
    return _modules()[1].sgd_plan(*lists, **options)


def cast_(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Copy with conversion between float dtypes. One device; never syncs."""
    _modules()[1].cast_(sources, destinations)


def unscale_into_(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    *,
    accumulate: bool = False,
) -> None:
    """`destinations = sources * inv_scale`, or `+=`; sets `found_inf` as `unscale_`. One device; never syncs."""
    _modules()[1].unscale_into_(sources, destinations, inv_scale, found_inf, accumulate=accumulate)


def uses_triton(impl: str, device: torch.device) -> bool:
    """Whether `impl` selects the Triton kernels on this device; raises if it requests what cannot run."""
    return _modules()[1].uses_triton(impl, device)


def why_not_triton(device: torch.device) -> str | None:
    """None if the Triton kernels can run on this device, else the reason."""
    return _modules()[1].why_not_triton(device)


def _modules() -> list[Any]:
    if not _loaded:  # no functools.cache: Dynamo warns of each call that it traces
        import ampkit_kernels
        from ampkit_kernels import reference

        _loaded.extend((reference, ampkit_kernels))
    return _loaded


def _triton_ops() -> Any:
    from ampkit_kernels import triton_ops

    return triton_ops
