"""cast_: destination <- source, converted. One launch per pair of dtypes (two where addresses differ in
alignment).

Contract. sources, destinations: dense CUDA tensors of float dtypes, equal shapes and strides pairwise, none
empty. Round to nearest even; float64 goes to half precision in one rounding through float32 as PyTorch's
copy does. Does not synchronise.

Bytes per element: one read, one write (6 for float32 to half).
"""

# Kernel code is Triton's language, which a Python type checker cannot follow.
# pyright: reportInvalidTypeForm=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor

from .chunks import chunk_extent, converted, list_pointer
from .configs import Config
from .entry import entry
from .launch import TRITON_DTYPES, groups, on_device
from .pointer_table import table_for

CONFIG = Config(block=4096)


@entry
def cast_kernel(addresses, numels, blocks, n_blocks, blocks_per_chunk, SOURCE: tl.constexpr,
                DESTINATION: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    b = tl.program_id(0)
    while b < n_blocks:
        tensor, base, length = chunk_extent(numels, blocks, b, blocks_per_chunk, BLOCK)
        source = list_pointer(addresses, tensor, base, 0, 2, SOURCE, ALIGNED)
        destination = list_pointer(addresses, tensor, base, 1, 2, DESTINATION, ALIGNED)
        n_full = length // BLOCK
        i = 0
        while i < n_full:
            o = i * BLOCK + lanes
            tl.store(destination + o, converted(tl.load(source + o), DESTINATION))
            i += 1
        if n_full * BLOCK < length:
            o = n_full * BLOCK + lanes
            x = tl.load(source + o, mask=o < length, other=0.0)
            tl.store(destination + o, converted(x, DESTINATION), mask=o < length)
        b += tl.num_programs(0)


def cast_(sources: Sequence[Tensor], destinations: Sequence[Tensor], config: Config | None = None) -> None:
    """Launch `cast_kernel` once per pair of dtypes; see the module's docstring."""
    chosen = config or CONFIG
    for (group_sources, group_destinations), _, aligned in groups(sources, destinations):
        table = table_for([group_sources, group_destinations], chosen)
        with on_device(group_sources[0].device):
            cast_kernel[(table.n_programs,)](
                table.addresses,
                table.numels,
                table.blocks,
                table.n_blocks,
                table.chunk // chosen.block,
                SOURCE=TRITON_DTYPES[group_sources[0].dtype],
                DESTINATION=TRITON_DTYPES[group_destinations[0].dtype],
                ALIGNED=aligned,
                BLOCK=chosen.block,
                num_warps=chosen.num_warps,
                enable_fp_fusion=False,
            )
