"""Device tables written by kernels: the form that a CUDA graph can hold.

Contract. `write(values, destination)` stores Python integers into an int64 device vector. `expand`
fills the block map from the lengths on the device. Nothing is copied from host memory: the
values travel as kernel arguments, which a graph keeps with its nodes, so a replay does not depend on any
host buffer still being there. Neither synchronises. A list of n values takes n / 128 launches, at capture
and at every replay; an eager call uploads instead (`pointer_table`).

The block map written here is the one that an eager call uploads, entry by entry: its order decides which numbers a
program adds up, and so the last bits of a norm.
"""

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor

from .entry import entry
from .launch import on_device

WIDTH = 128
_EXPAND_BLOCK = 1024


@entry
def _write_kernel(
    destination, start, n,
    v0: tl.int64, v1: tl.int64, v2: tl.int64, v3: tl.int64, v4: tl.int64, v5: tl.int64, v6: tl.int64, v7: tl.int64,
    v8: tl.int64, v9: tl.int64, v10: tl.int64, v11: tl.int64, v12: tl.int64, v13: tl.int64, v14: tl.int64,
    v15: tl.int64, v16: tl.int64, v17: tl.int64, v18: tl.int64, v19: tl.int64, v20: tl.int64, v21: tl.int64,
    v22: tl.int64, v23: tl.int64, v24: tl.int64, v25: tl.int64, v26: tl.int64, v27: tl.int64, v28: tl.int64,
    v29: tl.int64, v30: tl.int64, v31: tl.int64, v32: tl.int64, v33: tl.int64, v34: tl.int64, v35: tl.int64,
    v36: tl.int64, v37: tl.int64, v38: tl.int64, v39: tl.int64, v40: tl.int64, v41: tl.int64, v42: tl.int64,
    v43: tl.int64, v44: tl.int64, v45: tl.int64, v46: tl.int64, v47: tl.int64, v48: tl.int64, v49: tl.int64,
    v50: tl.int64, v51: tl.int64, v52: tl.int64, v53: tl.int64, v54: tl.int64, v55: tl.int64, v56: tl.int64,
    v57: tl.int64, v58: tl.int64, v59: tl.int64, v60: tl.int64, v61: tl.int64, v62: tl.int64, v63: tl.int64,
    v64: tl.int64, v65: tl.int64, v66: tl.int64, v67: tl.int64, v68: tl.int64, v69: tl.int64, v70: tl.int64,
    v71: tl.int64, v72: tl.int64, v73: tl.int64, v74: tl.int64, v75: tl.int64, v76: tl.int64, v77: tl.int64,
    v78: tl.int64, v79: tl.int64, v80: tl.int64, v81: tl.int64, v82: tl.int64, v83: tl.int64, v84: tl.int64,
    v85: tl.int64, v86: tl.int64, v87: tl.int64, v88: tl.int64, v89: tl.int64, v90: tl.int64, v91: tl.int64,
    v92: tl.int64, v93: tl.int64, v94: tl.int64, v95: tl.int64, v96: tl.int64, v97: tl.int64, v98: tl.int64,
    v99: tl.int64, v100: tl.int64, v101: tl.int64, v102: tl.int64, v103: tl.int64, v104: tl.int64, v105: tl.int64,
    v106: tl.int64, v107: tl.int64, v108: tl.int64, v109: tl.int64, v110: tl.int64, v111: tl.int64, v112: tl.int64,
    v113: tl.int64, v114: tl.int64, v115: tl.int64, v116: tl.int64, v117: tl.int64, v118: tl.int64, v119: tl.int64,
    v120: tl.int64, v121: tl.int64, v122: tl.int64, v123: tl.int64, v124: tl.int64, v125: tl.int64, v126: tl.int64,
    v127: tl.int64,
):
    values = (
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15, v16, v17, v18, v19, v20, v21, v22,
        v23, v24, v25, v26, v27, v28, v29, v30, v31, v32, v33, v34, v35, v36, v37, v38, v39, v40, v41, v42, v43,
        v44, v45, v46, v47, v48, v49, v50, v51, v52, v53, v54, v55, v56, v57, v58, v59, v60, v61, v62, v63, v64,
        v65, v66, v67, v68, v69, v70, v71, v72, v73, v74, v75, v76, v77, v78, v79, v80, v81, v82, v83, v84, v85,
        v86, v87, v88, v89, v90, v91, v92, v93, v94, v95, v96, v97, v98, v99, v100, v101, v102, v103, v104, v105,
        v106, v107, v108, v109, v110, v111, v112, v113, v114, v115, v116, v117, v118, v119, v120, v121, v122, v123,
        v124, v125, v126, v127,
    )
    lanes = tl.arange(0, 128)
    row = tl.zeros((128,), dtype=tl.int64)
    for i in tl.static_range(128):
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
