"""norm_and_check: the norm of all gradients times inv_scale, and found_inf, from one read of the gradients.

Contract. grads: dense CUDA tensors of any float dtype at any element-aligned address, none empty; only
read. inv_scale, found_inf: one float32 element each; found_inf is set as `unscale_` sets it, element by
element: a sum of squares that overflows sets nothing. Orders 1, 2 and inf. Result: 0-d, float64 if any
gradient is, otherwise float32; NaN if a value is NaN. Two stages without atomics: each program writes one
partial (float32 lanes, float64 across programs), one program adds the partials in order; equal lists
give equal bits on equal devices. That program also writes the clip factor, if requested. Does not synchronize.

Bytes per element: one read (4 for float32); 8 bytes per program of partials.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..configs import Config, resident_programs
from ..tensor_lists import by_dtype
from .launch import FOUR_WARPS, flat_rows, jit_kernel, list_constants, on_device, pick
from .pointer_table import chunk_bounds, table_for

# By bytes per element. A program loads two blocks before it adds them up. Grids are as large as the registers that any
# supported compiler uses allow: 64 KiB are in flight per multiprocessor; 40 in half precision, for its code on sm_80.
CONFIGS = {
    8: Config(block=1024),
    4: Config(block=2048),
    2: Config(block=2048, num_warps=4, programs_per_multiprocessor=resident_programs(96, 4)),
}
KERNEL_NORMS = {1.0: 1, 2.0: 2, float("inf"): 0}
_FINISH_BLOCK = 1024


@triton.jit
def _add_block(x, inv_scale, largest, total, ORDER: tl.constexpr):
    y = x.to(total.dtype) * inv_scale
    if ORDER == 2:
        total += y * y
    elif ORDER == 1:
        total += tl.abs(y)
    else:
        return largest, tl.maximum(total, tl.abs(y), propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(largest, tl.abs(y)), total


@jit_kernel
def norm_kernel(
    addresses,
    numels,
    blocks,
    n_blocks,
    blocks_per_chunk,
    inv_scale_ptr,
    found_inf_ptr,
    partials,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    inv_scale = tl.load(inv_scale_ptr).to(ACC)
    largest = tl.zeros((BLOCK,), dtype=ACC)  # drops NaN, which the total keeps
    total = tl.zeros((BLOCK,), dtype=ACC)
    lanes = tl.arange(0, BLOCK)
    b = tl.program_id(0)
    while b < n_blocks:
        p, low, high = chunk_bounds(addresses, numels, blocks, b, blocks_per_chunk, DTYPE, ITEMSIZE, BLOCK)
        n_full = high // BLOCK
        i = 0
        if low > 0:
            x = tl.load(p + lanes, mask=(lanes >= low) & (lanes < high), other=0.0)
            largest, total = _add_block(x, inv_scale, largest, total, ORDER)
            i = 1
        while i + 1 < n_full:
            x = tl.load(p + i * BLOCK + lanes)
            x2 = tl.load(p + (i + 1) * BLOCK + lanes)
            largest, total = _add_block(x, inv_scale, largest, total, ORDER)
            largest, total = _add_block(x2, inv_scale, largest, total, ORDER)
            i += 2
        while i < n_full:
            x = tl.load(p + i * BLOCK + lanes)
            largest, total = _add_block(x, inv_scale, largest, total, ORDER)
            i += 1
        if i * BLOCK < high:
            tail = i * BLOCK + lanes
            x = tl.load(p + tail, mask=tail < high, other=0.0)
            largest, total = _add_block(x, inv_scale, largest, total, ORDER)
        b += tl.num_programs(0)
    if ORDER == 0:
        # A maximum over lanes drops NaN; a sum of x - x would show NaN, but also inf. So NaNs are counted.
        n_nan = tl.sum((total != total).to(tl.int32), axis=0)
        partial = tl.where(n_nan > 0, float("nan"), tl.max(total, axis=0))
        worst = partial
    else:
        partial = tl.sum(total, axis=0)
        worst = tl.max(largest, axis=0)
    # Products and roundings keep order: some value as stored is not finite if and only if the largest is not.
    stored = worst.to(DTYPE).to(ACC)
    if (stored - stored != 0.0) | (partial != partial):
        tl.store(found_inf_ptr, 1.0)
    tl.store(partials + tl.program_id(0), partial.to(tl.float64))


@jit_kernel
def finish_kernel(
    partials,
    n_partials,
    result_ptr,
    inv_scale_ptr,
    factor_ptr,
    max_norm: tl.float64,
    ORDER: tl.constexpr,
    CLIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    start = 0
    while start < n_partials:
        x = tl.load(partials + start + lanes, mask=start + lanes < n_partials, other=0.0)
        if ORDER == 0:
            total = tl.maximum(total, x, propagate_nan=tl.PropagateNan.ALL)
        else:
            total += x
        start += BLOCK
    if ORDER == 0:
        n_nan = tl.sum((total != total).to(tl.int32), axis=0)
        norm = tl.where(n_nan > 0, float("nan"), tl.max(total, axis=0))
    else:
        norm = tl.sum(total, axis=0)
    if ORDER == 2:
        norm = tl.sqrt(norm)
    rounded = norm.to(result_ptr.dtype.element_ty)
    tl.store(result_ptr, rounded)
    if CLIPS:
        # Rounded as in torch.nn.utils.clip_grad_norm_, where number / tensor is a product with the reciprocal.
        if rounded.dtype == tl.float64:
            coefficient = 1.0 / (rounded + 1e-6) * tl.full((), max_norm, tl.float64)
        else:
            coefficient = tl.div_rn(1.0, rounded + 1e-6) * tl.full((), max_norm, tl.float32)
        coefficient = tl.where(coefficient > 1.0, 1.0, coefficient)  # NaN remains NaN
        tl.store(factor_ptr, (tl.load(inv_scale_ptr).to(rounded.dtype) * coefficient).to(tl.float32))


def norm_and_check(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, norm_type: float = 2.0) -> Tensor:
    """Launch `norm_kernel` once per dtype, then `finish_kernel`; see the module's docstring.

    PyTorch computes other orders, and the norm of tensors that are not flat memory.
    """
    flat, other, _ = flat_rows(grads)
    if norm_type not in KERNEL_NORMS or not flat:
        return reference.norm_and_check(grads, inv_scale, found_inf, norm_type)
    norm, _ = _launch(pick(grads, flat), inv_scale, found_inf, norm_type, None)
    if not other:
        return norm
    rest = reference.norm_and_check(pick(grads, other), inv_scale, found_inf, norm_type)
    dtype = torch.promote_types(norm.dtype, rest.dtype)
    return torch.linalg.vector_norm(torch.stack([norm.to(dtype), rest.to(dtype)]), norm_type)


def norm_and_clip_factor(
    grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, max_norm: float | Tensor, norm_type: float = 2.0
) -> tuple[Tensor, Tensor]:
    """`norm_and_check`, whose `finish_kernel` also computes the factor if it can; see the module's docstring."""
    flat, other, _ = flat_rows(grads)
    is_finite = not isinstance(max_norm, Tensor) and max_norm < float("inf")
    if is_finite and norm_type in KERNEL_NORMS and flat and not other:
        return _launch(pick(grads, flat), inv_scale, found_inf, norm_type, float(max_norm))
    norm = norm_and_check(grads, inv_scale, found_inf, norm_type)
    return norm, reference.clip_factor(norm, inv_scale, max_norm)


def _launch(
    grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, norm_type: float, max_norm: float | None
) -> tuple[Tensor, Tensor]:
    """Return the norm of gradients in flat memory, for an order of `KERNEL_NORMS`, and the unscale-and-clip factor.

    The factor is 0-d float32; without a `max_norm`, `inv_scale` itself.
    """
    device, order = inv_scale.device, KERNEL_NORMS[norm_type]
    parts = by_dtype(grads)
    wide = any(part[0].dtype is torch.float64 for part in parts)
    result = torch.empty((), dtype=torch.float64 if wide else torch.float32, device=device)
    factor = inv_scale if max_norm is None else torch.empty((), dtype=torch.float32, device=device)
    tables = [table_for([part], CONFIGS[part[0].element_size()]) for part in parts]
    n_partials = sum(table.n_programs for table in tables)
    partials = torch.empty(n_partials, dtype=torch.float64, device=device)
    first = 0
    for part, table in zip(parts, tables, strict=True):  # all tables are made: no two launches share one
        table.launch(
            norm_kernel,
            inv_scale,
            found_inf,
            partials[first:] if first else partials,
            ORDER=order,
            **list_constants(part[0].dtype),
            enable_fp_fusion=norm_type != float("inf"),  # fused sums need fewer registers, a maximum more
        )
        first += table.n_programs
    constants = {"ORDER": order, "CLIPS": max_norm is not None, "BLOCK": _FINISH_BLOCK}
    with on_device(device):
        finish_kernel[(1,)](partials, n_partials, result, inv_scale, factor, max_norm or 0.0, **constants, **FOUR_WARPS)
    return result, factor
