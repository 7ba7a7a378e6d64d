"""nonfinite_counts: how many elements of each tensor are inf, and how many NaN. One launch per dtype.

Contract. grads: dense CUDA tensors of any float dtype at any element-aligned address, none empty; only
read. Result: int64 [n, 2], columns inf and NaN. Integer atomics, one or two per chunk that holds any, so
the counts are exact and the same every time. Does not synchronise. Launched after a skipped step, for the
overflow report.

Bytes per element: one read (4 for float32).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..configs import Config, resident_programs
from .chunks import chunk_bounds, load_block
from .launch import entry, flat_rows, one_list, pick
from .pointer_table import table_for

CONFIG = Config(block=4096, programs_per_multiprocessor=resident_programs(112, 8))


@triton.jit
def _count_block(p, o, mask, n_inf, n_nan, ACC: tl.constexpr, MASKED: tl.constexpr):
    x = load_block(p, o, mask, ACC, MASKED)
    return n_inf + (tl.abs(x) == float("inf")).to(tl.int32), n_nan + (x != x).to(tl.int32)


@entry
def count_kernel(addresses, numels, blocks, n_blocks, blocks_per_chunk, counts, DTYPE: tl.constexpr,
                 ACC: tl.constexpr, ITEMSIZE: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    b = tl.program_id(0)
    while b < n_blocks:
        p, low, high = chunk_bounds(addresses, numels, blocks, b, blocks_per_chunk, DTYPE, ITEMSIZE, BLOCK)
        n_inf = tl.zeros((BLOCK,), dtype=tl.int32)
        n_nan = tl.zeros((BLOCK,), dtype=tl.int32)
        n_full = high // BLOCK
        i = 0
        if low > 0:
            n_inf, n_nan = _count_block(p, lanes, (lanes >= low) & (lanes < high), n_inf, n_nan, ACC, True)
            i = 1
        while i < n_full:
            n_inf, n_nan = _count_block(p, i * BLOCK + lanes, None, n_inf, n_nan, ACC, False)
            i += 1
        if i * BLOCK < high:
            tail = i * BLOCK + lanes
            n_inf, n_nan = _count_block(p, tail, tail < high, n_inf, n_nan, ACC, True)
        row = counts + (tl.load(blocks + b) & 0xFFFFFFFF) * 2
        infs = tl.sum(n_inf, axis=0)
        nans = tl.sum(n_nan, axis=0)
        if infs > 0:
            tl.atomic_add(row, infs.to(tl.int64))
        if nans > 0:
            tl.atomic_add(row + 1, nans.to(tl.int64))
        b += tl.num_programs(0)


def nonfinite_counts(grads: Sequence[Tensor]) -> Tensor:
    """Launch `count_kernel` once per dtype of at least one gradient; see the module's docstring."""
    flat, other, _ = flat_rows(grads)
    rows_of: dict[torch.dtype, list[int]] = {}
    for i in flat:
        rows_of.setdefault(grads[i].dtype, []).append(i)
    found = [torch.zeros(2, dtype=torch.int64, device=grads[0].device)] * len(grads)     # of those without elements
    parts = [(other, reference.nonfinite_counts(pick(grads, other)))] if other else []
    for dtype, rows in rows_of.items():
        counts = torch.zeros((len(rows), 2), dtype=torch.int64, device=grads[0].device)
        table_for([pick(grads, rows)], CONFIG).launch(count_kernel, counts, **one_list(dtype))
        parts.append((rows, counts))
    for rows, counts in parts:
        for i, row in zip(rows, counts.unbind(), strict=True):
            found[i] = row
    return torch.stack(found)
