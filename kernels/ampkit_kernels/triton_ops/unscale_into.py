"""unscale_into_: d <- s * inv_scale, or d <- d + s * inv_scale, in d's dtype; found_inf as in unscale_.

Half gradients become float32 gradients of master weights, unscaled and checked, in one launch per pair of
dtypes (two where addresses differ in alignment).

Contract. sources, destinations: dense CUDA tensors of float dtypes, equal shapes and strides pairwise, none
empty, no memory in common. inv_scale, found_inf: one float32 element each. found_inf is set to 1.0, never
cleared, where the product, as the destination's dtype holds it, is not finite; the sum is not checked.
Arithmetic in float32 (float64 where a list is float64), product and sum rounded once each. Does not
synchronise.

Bytes per element: one read, one write (6 for float16 to float32), one read more where it accumulates.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..configs import Config, resident_programs
from .chunks import chunk_extent, list_pointer, load_block, store_block
from .launch import TRITON_DTYPES, accumulator, entry, flat_rows, groups, pick
from .pointer_table import table_for

CONFIG = Config(block=4096)
CONFIG_ADDING = Config(block=4096, programs_per_multiprocessor=resident_programs(80, 8))


@triton.jit
def _unscale_into_block(source, destination, o, mask, inv_scale, bad, DESTINATION: tl.constexpr, ACC: tl.constexpr,
                        ACCUMULATE: tl.constexpr, MASKED: tl.constexpr):
    product = (load_block(source, o, mask, ACC, MASKED) * inv_scale).to(DESTINATION).to(ACC)
    if ACCUMULATE:
        store_block(destination, o, load_block(destination, o, mask, ACC, MASKED) + product, mask, MASKED)
    else:
        store_block(destination, o, product, mask, MASKED)
    # Adds 0 while values are finite, and NaN, which stays, for one that is not.
    return bad + product * 0.0


@entry
def unscale_into_kernel(addresses, numels, blocks, n_blocks, blocks_per_chunk, n_tensors, inv_scale_ptr,
                        found_inf_ptr,
                        SOURCE: tl.constexpr, DESTINATION: tl.constexpr, ACC: tl.constexpr,
                        ACCUMULATE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    inv_scale = tl.load(inv_scale_ptr).to(ACC)
    bad = tl.zeros((BLOCK,), dtype=ACC)
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
            bad = _unscale_into_block(
                source, destination, o, None, inv_scale, bad, DESTINATION, ACC, ACCUMULATE, False
            )
            i += 1
        if n_full * BLOCK < length:
            o = n_full * BLOCK + lanes
            bad = _unscale_into_block(
                source, destination, o, o < length, inv_scale, bad, DESTINATION, ACC, ACCUMULATE, True
            )
        b += tl.num_programs(0)
    total = tl.sum(bad, axis=0)
    if total != total:
        tl.store(found_inf_ptr, 1.0)


def unscale_into_(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    *,
    accumulate: bool = False,
    config: Config | None = None,
) -> None:
    """Launch `unscale_into_kernel` once per pair of dtypes; see the module's docstring."""
    flat, other, _ = flat_rows(sources, destinations)
    if other:
        reference.unscale_into_(
            pick(sources, other), pick(destinations, other), inv_scale, found_inf, accumulate=accumulate
        )
    for parts, _, aligned in groups(pick(sources, flat), pick(destinations, flat)):
        source, destination = (part[0].dtype for part in parts)
        table = table_for(parts, config or (CONFIG_ADDING if accumulate else CONFIG), aligned=aligned)
        table.launch(
            unscale_into_kernel, table.n_tensors, inv_scale, found_inf, SOURCE=TRITON_DTYPES[source],
            DESTINATION=TRITON_DTYPES[destination], ACC=accumulator(torch.promote_types(source, destination)),
            ACCUMULATE=accumulate, ALIGNED=aligned,
            enable_fp_fusion=False,  # product and sum are rounded apart, as on the CPU
        )
