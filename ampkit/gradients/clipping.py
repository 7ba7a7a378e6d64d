"""Norms and clipping of gradients that are still scaled: they are unscaled, checked and clipped together.

`unscale_` and then `torch.nn.utils.clip_grad_norm_` read every gradient three times and write it twice. Here one read
gives the norm of `gradient * inv_scale` and finds inf and NaN, and one multiplication by `inv_scale * coefficient`
unscales and clips. If the scale is a power of two, the results are bitwise identical; otherwise one rounding replaces
two, and may differ from them by one unit in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import ampkit_kernels
from ampkit.gradients import ranks
from ampkit.gradients.collect import Gradients, moved
from ampkit.torch_private import is_dtensor, is_flat
from ampkit_kernels.reference import clip_factor

HOMOGENEOUS_ORDERS = (0.0, 1.0, 2.0, math.inf)
"""Orders for which norm(scale * g) / scale is bitwise identical to norm(g) if the scale is a power of two.

Other orders round differently, and their powers of scaled gradients overflow early: they need `unscale_` first.
"""


def clip_unscaled(params: Sequence[Tensor], max_norm: float | Tensor, norm_type: float, process_group: Any) -> Tensor:
    """Clip as `torch.nn.utils.clip_grad_norm_` does, by a norm over the ranks of `process_group` if there is one.

    Raises:
        RuntimeError: the gradients are FSDP1 shards, without a `process_group`, or DTensors, with one. Nothing has
            changed then.
    """
    if process_group is None:
        if ranks.several() and any(map(is_flat, params)):
            raise refusal_of_flat_shards()
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)  # pyright: ignore[reportArgumentType]
    if any(map(is_dtensor, params)):
        raise RuntimeError(
            "a disabled GradScaler takes no norm of DTensors over a process_group; expected "
            "GradGuard(), which scales nothing either"
        )
    norm = torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None], norm_type)
    if params:  # NCCL has no all-reduce on the CPU, where the norm of no gradients is
        norm = norm.to(params[0].device)
    norm = ranks.SkipGroups(()).norm({(): norm}, {}, norm.device, norm_type, process_group)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)  # pyright: ignore[reportArgumentType]
    return norm


def refusal_of_flat_shards() -> RuntimeError:
    """Return the error for norms of FSDP1 gradients."""
    return RuntimeError(
        "clip_grad_norm_ got shards of FullyShardedDataParallel, which do not name the ranks with the other shards; "
        "expected process_group=model.process_group (an argument of GradScaler, with skip_above), or "
        "unscale_(optimizer) and model.clip_grad_norm_(max_norm)"
    )


def norm_and_factor(
    gradients: Gradients,
    inv_scale: Tensor,
    found_inf: dict[torch.device, Tensor],
    norm_type: float,
    max_norm: float | Tensor,
    skip_groups: ranks.SkipGroups,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm of the gradients times `inv_scale`, as one vector, and the factor that unscales and clips them.

    Gradients are only read; plain ones on one GPU by one launch. Call it without autograd. Synchronizes only by
    collectives.

    Args:
        gradients: this rank's gradients, still scaled.
        inv_scale: 1 / scale, 0-d float32.
        found_inf: a flag for each device, set to 1 if a gradient is not finite, there or on a rank of `skip_groups`.
        norm_type: the order; inf: the largest magnitude.
        max_norm: the largest norm after clipping.
        skip_groups: the ranks that skip together.
        process_group: ranks that hold other gradients, over which the norm is taken as well.

    Returns:
        Both 0-d on `inv_scale`'s device. The norm is float64 if a gradient is float64 or complex128, otherwise float32.
    """
    if gradients.meshes or process_group is not None:
        parts = _norms_of_parts(gradients, inv_scale, found_inf, norm_type)
        norm = skip_groups.norm(parts, found_inf, inv_scale.device, norm_type, process_group)
        return norm, clip_factor(norm, inv_scale, max_norm)
    grads = gradients.by_device.get(inv_scale.device)
    if grads is None or len(gradients.by_device) > 1:
        norm = _norm_of(gradients.by_device, inv_scale, found_inf, norm_type)
        factor = clip_factor(norm, inv_scale, max_norm)
    else:
        flag = found_inf[inv_scale.device]
        norm, factor = ampkit_kernels.norm_and_clip_factor(grads, inv_scale, flag, max_norm, norm_type)
    skip_groups.reduce_flags(found_inf, inv_scale.device)
    return norm, factor


def _norms_of_parts(
    gradients: Gradients, inv_scale: Tensor, found_inf: Mapping[torch.device, Tensor], norm_type: float
) -> dict[tuple[Any, ...], Tensor]:
    """Return the norm of this rank's part of the gradients of each mesh, by its groups."""
    if not gradients.meshes:
        return {(): _norm_of(gradients.by_device, inv_scale, found_inf, norm_type)}
    norms: dict[tuple[Any, ...], Tensor] = {}
    for (groups, counts), tensors in gradients.parts.items():
        by_device: Mapping[torch.device, Sequence[Tensor]] = gradients.by_device
        if len(gradients.parts) > 1:
            part = Gradients()
            for tensor in tensors:
                part.add(tensor)
            by_device = part.by_device
        norm = _norm_of(by_device, inv_scale, found_inf, norm_type)
        if counts:  # of replicas one rank does
            norms[groups] = norm
    return norms


def _norm_of(
    by_device: Mapping[torch.device, Sequence[Tensor]],
    inv_scale: Tensor,
    found_inf: Mapping[torch.device, Tensor],
    norm_type: float,
) -> Tensor:
    """Return the norm of tensors on several devices."""
    norms = []
    for device, tensors in by_device.items():
        flag = found_inf[device]
        norm = ampkit_kernels.norm_and_check(tensors, moved(inv_scale, device), flag, norm_type)
        norms.append(moved(norm, inv_scale.device))
    if not norms:
        return torch.zeros_like(inv_scale)
    if len(norms) == 1:
        return norms[0]
    dtype = torch.float64 if any(norm.dtype is torch.float64 for norm in norms) else torch.float32
    stacked = torch.stack([norm.to(dtype) for norm in norms])
    return stacked.sum() if norm_type == 0 else torch.linalg.vector_norm(stacked, norm_type)
