"""unscale_: g <- g * inv_scale in place, found_inf <- 1.0 where a value is not finite. One launch per dtype.

Contract. grads: dense CUDA tensors of any float dtype at any element-aligned address, none empty.
inv_scale, found_inf: one float32 element each. found_inf is set, never cleared, by plain stores of 1.0
(every writer writes the same value). The value tested is the product as it is stored: with a factor of at
most 1 it is non-finite exactly where the incoming value is, with a factor above 1 also where the product
overflows. Arithmetic in float32 (float64 for float64), one rounding. Does not synchronise.

Bytes per element: one read, one write (8 for float32).

Addressing: see `chunks`; any element-aligned address keeps 128-bit accesses in full blocks.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..configs import Config
from ..tensors import by_dtype
from .chunks import chunk_bounds
from .launch import entry, flat_rows, one_list, pick
from .pointer_table import table_for

CONFIGS = {8: Config(block=2048), 4: Config(block=4096), 2: Config(block=4096)}  # by bytes per element


@triton.jit
def _unscale_block(p, mask, inv_scale, bad, DTYPE: tl.constexpr, ACC: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        x = tl.load(p, mask=mask, other=0.0)
    else:
        x = tl.load(p)
    y = (x.to(ACC) * inv_scale).to(DTYPE)
    if MASKED:
        tl.store(p, y, mask=mask)
    else:
        tl.store(p, y)
    # Adds 0 while values are finite, and NaN, which stays, for one that is not.
    return bad + y.to(ACC) * 0.0


@entry
def unscale_kernel(addresses, numels, blocks, n_blocks, blocks_per_chunk, inv_scale_ptr, found_inf_ptr,
                   DTYPE: tl.constexpr, ACC: tl.constexpr, ITEMSIZE: tl.constexpr,
                   BLOCK: tl.constexpr):
    inv_scale = tl.load(inv_scale_ptr).to(ACC)
    bad = tl.zeros((BLOCK,), dtype=ACC)
    lanes = tl.arange(0, BLOCK)
    b = tl.program_id(0)
    while b < n_blocks:
        p, low, high = chunk_bounds(addresses, numels, blocks, b, blocks_per_chunk, DTYPE, ITEMSIZE, BLOCK)
        n_full = high // BLOCK
        i = 0
        if low > 0:  # the tensor starts inside this block
            mask = (lanes >= low) & (lanes < high)
            bad = _unscale_block(p + lanes, mask, inv_scale, bad, DTYPE, ACC, True)
            i = 1
        while i < n_full:
            bad = _unscale_block(p + i * BLOCK + lanes, None, inv_scale, bad, DTYPE, ACC, False)
            i += 1
        if i * BLOCK < high:  # the tensor ends inside this block
            tail = i * BLOCK + lanes
            bad = _unscale_block(p + tail, tail < high, inv_scale, bad, DTYPE, ACC, True)
        b += tl.num_programs(0)
    total = tl.sum(bad, axis=0)
    if total != total:
        tl.store(found_inf_ptr, 1.0)


def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, config: Config | None = None) -> None:
    """Launch `unscale_kernel` once per dtype; see the module's docstring."""
    flat, other, _ = flat_rows(grads)
    if other:
        reference.unscale_(pick(grads, other), inv_scale, found_inf)
    for group in by_dtype(pick(grads, flat)):
        dtype = group[0].dtype
        table = table_for([group], config or CONFIGS[dtype.itemsize])
        table.launch(unscale_kernel, inv_scale, found_inf, **one_list(dtype))
