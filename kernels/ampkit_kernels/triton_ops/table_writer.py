"""Device tables written by kernels: the form that a CUDA graph can hold.

Contract. `write(values, destination)` stores Python integers into an int64 device vector. `expand`
fills the block map from the lengths on the device. Nothing is copied from host memory: the
values travel as kernel arguments, which a graph keeps with its nodes, so a replay does not depend on any
host buffer still being there. Neither synchronises. A list of n values takes n / 32 launches, at capture
and at every replay; an eager call uploads instead (`pointer_table`).

The block map written here is the one that an eager call uploads, entry by entry: its order decides which numbers a
program adds up, and so the last bits of a norm.
"""

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor

from .entry import entry
from .launch import on_device

WIDTH = 32
_EXPAND_BLOCK = 1024


@entry
def _write_kernel(
    destination, start, n,
    v0: tl.int64, v1: tl.int64, v2: tl.int64, v3: tl.int64, v4: tl.int64, v5: tl.int64, v6: tl.int64,
    v7: tl.int64, v8: tl.int64, v9: tl.int64, v10: tl.int64, v11: tl.int64, v12: tl.int64, v13: tl.int64,
    v14: tl.int64, v15: tl.int64, v16: tl.int64, v17: tl.int64, v18: tl.int64, v19: tl.int64, v20: tl.int64,
    v21: tl.int64, v22: tl.int64, v23: tl.int64, v24: tl.int64, v25: tl.int64, v26: tl.int64, v27: tl.int64,
    v28: tl.int64, v29: tl.int64, v30: tl.int64, v31: tl.int64,
):
    values = (
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
    )
    lanes = tl.arange(0, 32)
    row = tl.zeros((32,), dtype=tl.int64)
    for i in tl.static_range(32):
        row = tl.where(lanes == i, values[i].to(tl.int64), row)
    tl.store(destination + start + lanes, row, mask=start + lanes < n)


@entry
def _expand_kernel(numels, ranks, blocks, chunk, n_full, BLOCK: tl.constexpr):
    # One program per tensor: its full chunks follow those of all tensors before it, its tail has a rank among tails.
    tensor = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    first = tl.zeros((BLOCK,), dtype=tl.int64)
    start = 0
    while start < tensor:
        before = tl.load(numels + start + lanes, mask=start + lanes < tensor, other=0)
        first += before // chunk
        start += BLOCK
    base = tl.sum(first, axis=0)
    numel = tl.load(numels + tensor)
    count = numel // chunk
    start = 0
    while start < count:
        index = (start + lanes).to(tl.int64)
        tl.store(blocks + base + index, (index << 32) | tensor, mask=index < count)
        start += BLOCK
    if numel > count * chunk:
        tl.store(blocks + n_full + tl.load(ranks + tensor), (count << 32) | tensor)


def write(values: Sequence[int], destination: Tensor) -> None:
    """Store `values` into the int64 vector `destination` of the same length."""
    n = len(values)
    with on_device(destination.device):
        for start in range(0, n, WIDTH):
            part = list(values[start : start + WIDTH])
            part += [0] * (WIDTH - len(part))
            _write_kernel[(1,)](destination, start, n, *part, num_warps=1, enable_fp_fusion=False)


def expand(numels: Tensor, ranks: Tensor, chunk: int, n_full: int, blocks: Tensor) -> None:
    """Fill the block map for these lengths: `chunk_index << 32 | tensor_index` per chunk.

    First the `n_full` chunks that are as long as `chunk`, in tensor order, then each tensor's shorter one at its rank.
    """
    with on_device(numels.device):
        _expand_kernel[(numels.numel(),)](
            numels, ranks, blocks, chunk, n_full, BLOCK=_EXPAND_BLOCK, num_warps=4, enable_fp_fusion=False
        )
