"""Norms and clipping of gradients that are still scaled: they are unscaled, checked and clipped together.

`unscale_` and then `torch.nn.utils.clip_grad_norm_` read every gradient three times and write it twice. Here one read
gives the norm of `gradient * inv_scale` and finds inf and NaN, and one multiplication by `inv_scale * coefficient`
unscales and clips. If the scale is a power of two, the results are equal to the bit; else one rounding replaces two,
and may differ from them by one unit in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import ampkit_kernels
from ampkit.gradients import ranks
from ampkit.gradients.collect import Gradients, collect, moved
from ampkit.torch_internals.modules import is_flat
from ampkit.torch_internals.optimizers import foreach_clamp_max_, foreach_clamp_min_
from ampkit.torch_internals.tensors import placements_of
from ampkit_kernels.reference import clip_factor as factor_of

HOMOGENEOUS_ORDERS = (0.0, 1.0, 2.0, math.inf)
"""Orders for which norm(scale * g) / scale equals norm(g) to the bit if the scale is a power of two.

Other orders round differently, and their powers of scaled gradients overflow early: they need `unscale_` first.
"""


def clip_plain(params: Sequence[Tensor], max_norm: float | Tensor, norm_type: float, process_group: Any) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for a disabled scaler, with a norm over all ranks of a `process_group`.

    torch takes no norm of DTensors of several meshes, nor of DTensors beside plain tensors.

    Raises:
        RuntimeError: the gradients are FSDP1 shards, without a `process_group`. Nothing has changed then.
    """
    if process_group is None and ranks.several() and any(map(is_flat, params)):
        raise refusal_of_flat_shards()
    device = params[0].device if params else torch.device("cpu")
    if any(place is not None for place in placements_of(params)):
        with torch.set_grad_enabled(False):
            gradients, one = collect(params, coalesce=True), torch.ones((), dtype=torch.float32, device=device)
            flags = {device: torch.zeros_like(one, device=device) for device in gradients.by_device}
            agreement = ranks.Agreement(gradients.meshes)
            norms = ranked_norms(gradients, one, flags, norm_type, agreement, process_group)
            multiply_(gradients, factor_of(norms.norm, one, max_norm), {})
        return norms.norm
    norm = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None], norm_type)
    if process_group is not None:  # NCCL has no all-reduce on the CPU, where the norm of no gradients is
        norm = ranks.Agreement({}).norms({(): norm.to(device)}, {}, device, norm_type, process_group).norm
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)  # pyright: ignore[reportArgumentType]
    return norm


def refusal_of_flat_shards() -> RuntimeError:
    """The error for norms of FSDP1 gradients."""
    return RuntimeError(
        "clip_grad_norm_ got shards of FullyShardedDataParallel, which do not name the ranks with the other shards; "
        "expected process_group=model.process_group (an argument of GradScaler, with skip_above), or "
        "unscale_(optimizer) and model.clip_grad_norm_(max_norm)"
    )


def norm_and_factor(
    gradients: Gradients,
    inv_scale: Tensor,
    found_inf: Mapping[torch.device, Tensor],
    norm_type: float,
    max_norm: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """The norm of this rank's gradients times `inv_scale`, as one vector, and the factor that unscales and clips them.

    Gradients are only read; plain ones on one GPU by one launch. Call it without autograd. Never synchronizes.

    Args:
        gradients: the gradients, still scaled.
        inv_scale: 1 / scale, 0-d float32.
        found_inf: a flag for each device, set to 1 if a gradient there is not finite.
        norm_type: the order; inf: the largest magnitude.
        max_norm: the largest norm after clipping.

    Returns:
        Both 0-d on `inv_scale`'s device. The norm is float64 if a gradient is float64 or complex128, else float32.
    """
    grads = gradients.by_device.get(inv_scale.device)
    if grads is None or len(gradients.by_device) > 1:
        norm = _norm_of(gradients.by_device, inv_scale, found_inf, norm_type)
    else:
        flag = found_inf[inv_scale.device]
        return ampkit_kernels.norm_and_clip_factor(grads, inv_scale, flag, max_norm, norm_type)
    return norm, factor_of(norm, inv_scale, max_norm)


def ranked_norms(
    gradients: Gradients,
    inv_scale: Tensor,
    found_inf: dict[torch.device, Tensor],
    norm_type: float,
    agreement: ranks.Agreement,
    across: Any = None,
    judges: bool = False,
) -> ranks.Norms:
    """The norm of the gradients of several ranks times `inv_scale`; these agree on `found_inf` at the same time.

    Args:
        gradients: this rank's gradients, still scaled.
        inv_scale: 1 / scale, 0-d float32.
        found_inf: a flag for each device, set to 1 if a gradient is not finite, there or on another rank.
        norm_type: the order; inf: the largest magnitude.
        agreement: the ranks.
        across, judges: as in `Agreement.norms`.
    """
    norms: dict[tuple[Any, ...], Tensor] = {}
    if not gradients.meshes:
        norms[()] = _norm_of(gradients.by_device, inv_scale, found_inf, norm_type)
    for (groups, counts), tensors in gradients.parts.items() if gradients.meshes else ():
        by_device = gradients.by_device if len(gradients.parts) == 1 else _by_device(tensors)
        norm = _norm_of(by_device, inv_scale, found_inf, norm_type)
        if counts:  # of replicas one rank does
            norms[groups] = norm
    return agreement.norms(norms, found_inf, inv_scale.device, norm_type, across, judges)


def _by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    listed = Gradients()
    for tensor in tensors:
        listed.add(tensor)
    return listed.by_device


def _norm_of(
    by_device: Mapping[torch.device, Sequence[Tensor]],
    inv_scale: Tensor,
    found_inf: Mapping[torch.device, Tensor],
    norm_type: float,
) -> Tensor:
    """The norm of tensors on several devices."""
    norms = []
    for device, tensors in by_device.items():
        flag = found_inf[device]
        norm = ampkit_kernels.norm_and_check(tensors, moved(inv_scale, device), flag, norm_type)
        norms.append(moved(norm, inv_scale.device))
    return _joined(norms, norm_type) if norms else torch.zeros_like(inv_scale)


def _joined(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of a vector from the norms of its parts."""
    if len(norms) == 1:
        return norms[0]
    dtype = torch.float64 if any(norm.dtype is torch.float64 for norm in norms) else torch.float32
    stacked = torch.stack([norm.to(dtype) for norm in norms])
    return stacked.sum() if norm_type == 0 else torch.linalg.vector_norm(stacked, norm_type)


def multiply_(gradients: Gradients, factor: Tensor, found_inf: Mapping[torch.device, Tensor]) -> None:
    """Multiply every gradient by a 0-d factor, unless the factor is 1 or the flag of the gradient's device is set.

    A float64 factor, as clipping has for float64 gradients, multiplies these as it is; it is rounded to float32 for
    other gradients, and where Triton runs. Call it without autograd. Never synchronizes.
    """
    for device, tensors in gradients.by_device.items():
        ampkit_kernels.multiply_(tensors, moved(factor, device), found_inf.get(device))


def clamp_(gradients: Gradients, clip_value: float) -> None:
    """Clamp every element, and real and imaginary parts, to `[-clip_value, clip_value]`. Never synchronizes."""
    with torch.set_grad_enabled(False):
        for tensors in gradients.by_device.values():
            foreach_clamp_min_(tensors, -clip_value)
            foreach_clamp_max_(tensors, clip_value)
