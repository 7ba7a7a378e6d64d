"""multiply_: g <- g * factor in place, unless the factor is 1 or found_inf is set. One launch per dtype.

Contract. grads: dense CUDA tensors of any float dtype at any element-aligned address, none empty. factor
and found_inf (optional): one float32 element each, read by every program, which returns at once where there
is nothing to do. Arithmetic in float32 (float64 for float64), one rounding. Does not synchronise.

Bytes per element: one read, one write (8 for float32), or none.
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
def _multiply_block(p, mask, factor, DTYPE: tl.constexpr, ACC: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        x = tl.load(p, mask=mask, other=0.0)
        tl.store(p, (x.to(ACC) * factor).to(DTYPE), mask=mask)
    else:
        x = tl.load(p)
        tl.store(p, (x.to(ACC) * factor).to(DTYPE))


@entry
def multiply_kernel(addresses, numels, blocks, n_blocks, blocks_per_chunk, factor_ptr, found_inf_ptr,
                    DTYPE: tl.constexpr, ACC: tl.constexpr, ITEMSIZE: tl.constexpr,
                    HAS_FOUND_INF: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr)
    go = factor != 1.0
    if HAS_FOUND_INF:
        go = go & (tl.load(found_inf_ptr) == 0.0)
    if go:
        wide = factor.to(ACC)
        lanes = tl.arange(0, BLOCK)
        b = tl.program_id(0)
        while b < n_blocks:
            p, low, high = chunk_bounds(
                addresses, numels, blocks, b, blocks_per_chunk, DTYPE, ITEMSIZE, BLOCK
            )
            n_full = high // BLOCK
            i = 0
            if low > 0:
                mask = (lanes >= low) & (lanes < high)
                _multiply_block(p + lanes, mask, wide, DTYPE, ACC, True)
                i = 1
            while i < n_full:
                _multiply_block(p + i * BLOCK + lanes, None, wide, DTYPE, ACC, False)
                i += 1
            if i * BLOCK < high:
                tail = i * BLOCK + lanes
                _multiply_block(p + tail, tail < high, wide, DTYPE, ACC, True)
            b += tl.num_programs(0)


def multiply_(
    grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None, config: Config | None = None
) -> None:
    """Launch `multiply_kernel` once per dtype; see the module's docstring."""
    flat, other, _ = flat_rows(grads)
    if other:
        reference.multiply_(pick(grads, other), factor, found_inf)
    for group in by_dtype(pick(grads, flat)):
        dtype = group[0].dtype
        table = table_for([group], config or CONFIGS[dtype.itemsize])
        flag = factor if found_inf is None else found_inf
        table.launch(multiply_kernel, factor, flag, HAS_FOUND_INF=found_inf is not None, **one_list(dtype))
