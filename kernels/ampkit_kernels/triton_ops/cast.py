"""cast_: destination <- source, converted. One launch per pair of dtypes (two where addresses differ in
alignment).

Contract. sources, destinations: dense CUDA tensors of float dtypes, equal shapes and strides pairwise, none
empty. Round to nearest even; float64 goes to half precision in one rounding through float32 as PyTorch's
copy does. Does not synchronise.

Bytes per element: one read, one write (6 for float32 to half).
"""

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor

from .. import reference
from ..configs import Config
from .chunks import chunk_extent, converted, list_pointer
from .launch import TRITON_DTYPES, entry, flat_rows, groups, pick
from .pointer_table import table_for

CONFIG = Config(block=4096)


@entry
def cast_kernel(addresses, numels, blocks, n_blocks, blocks_per_chunk, n_tensors, SOURCE: tl.constexpr,
                DESTINATION: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    b = tl.program_id(0)
    while b < n_blocks:
        tensor, base, length = chunk_extent(numels, blocks, b, blocks_per_chunk, BLOCK)
        source = list_pointer(addresses, n_tensors, tensor, base, 0, SOURCE, ALIGNED)
        destination = list_pointer(addresses, n_tensors, tensor, base, 1, DESTINATION, ALIGNED)
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
    flat, other, _ = flat_rows(sources, destinations)
    if other:
        reference.cast_(pick(sources, other), pick(destinations, other))
    for parts, _, aligned in groups(pick(sources, flat), pick(destinations, flat)):
        source, destination = (TRITON_DTYPES[part[0].dtype] for part in parts)
        table = table_for(parts, config or CONFIG, aligned=aligned)
        table.launch(cast_kernel, table.n_tensors, SOURCE=source, DESTINATION=destination, ALIGNED=aligned)
