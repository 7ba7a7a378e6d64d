"""unscale_into_: d <- s * inv_scale, or d <- d + s * inv_scale, found_inf as in unscale_; and cast_: d <- s.

Half gradients become float32 gradients of master weights, unscaled and checked, and masters become half copies, in one
launch per pair of dtypes (two where addresses differ in alignment).

Contract. sources, destinations: dense CUDA tensors of float dtypes, equal shapes and strides pairwise, none empty;
in `unscale_into_` they share no memory. inv_scale, found_inf: one float32 element each. found_inf is set to 1.0, never
cleared, where the product, as the destination's dtype holds it, is not finite; the sum is not checked. Arithmetic in
float32 (float64 where a list is float64), product and sum rounded once each. A cast rounds to nearest even; float64
is rounded to half precision through float32 as PyTorch's copy does. Neither synchronizes.

Bytes per element: one read, one write (6 between float32 and float16), another read with `accumulate`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..configs import Config, resident_programs
from .launch import TRITON_DTYPES, accumulator, flat_rows, groups, jit_kernel, pick
from .pointer_table import chunk_extent, list_pointer, load_block, store_block, table_for

CONFIG = Config(block=4096)
CONFIG_ADDING = Config(block=4096, programs_per_multiprocessor=resident_programs(80, 8))


@triton.jit
def _unscale_into_block(
    source,
    destination,
    o,
    mask,
    inv_scale,
    bad,
    DESTINATION: tl.constexpr,
    ACC: tl.constexpr,
    SCALES: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    MASKED: tl.constexpr,
):
    x = load_block(source, o, mask, ACC, MASKED)
    if SCALES:
        x = (x * inv_scale).to(DESTINATION).to(ACC)
    if ACCUMULATE:
        store_block(destination, o, load_block(destination, o, mask, ACC, MASKED) + x, mask, MASKED)
    else:
        store_block(destination, o, x, mask, MASKED)
    if SCALES:
        # Adds 0 for a finite value, NaN for any other; NaN remains.
        bad += x * 0.0
    return bad


@jit_kernel
def unscale_into_kernel(
    addresses,
    numels,
    blocks,
    n_blocks,
    blocks_per_chunk,
    n_tensors,
    inv_scale_ptr,
    found_inf_ptr,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    ACC: tl.constexpr,
    SCALES: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if SCALES:
        inv_scale = tl.load(inv_scale_ptr).to(ACC)
    else:
        inv_scale = 1.0  # unused
    bad = tl.zeros((BLOCK,), dtype=ACC)
    lanes = tl.arange(0, BLOCK)
    b = tl.program_id(0)
    while b < n_blocks:
        tensor, base, length = chunk_extent(numels, tl.load(blocks + b), blocks_per_chunk, BLOCK)
        source = list_pointer(addresses, n_tensors, tensor, base, 0, SOURCE, ALIGNED)
        destination = list_pointer(addresses, n_tensors, tensor, base, 1, DESTINATION, ALIGNED)
        n_full = length // BLOCK
        i = 0
        while i < n_full:
            bad = _unscale_into_block(
                source,
                destination,
                i * BLOCK + lanes,
                None,
                inv_scale,
                bad,
                DESTINATION,
                ACC,
                SCALES,
                ACCUMULATE,
                False,
            )
            i += 1
        if n_full * BLOCK < length:
            o = n_full * BLOCK + lanes
            bad = _unscale_into_block(
                source, destination, o, o < length, inv_scale, bad, DESTINATION, ACC, SCALES, ACCUMULATE, True
            )
        b += tl.num_programs(0)
    if SCALES:
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
) -> None:
    """Launch `unscale_into_kernel` once per pair of dtypes; see the module's docstring."""
    flat, other, _ = flat_rows(sources, destinations)
    if other:
        reference.unscale_into_(
            pick(sources, other), pick(destinations, other), inv_scale, found_inf, accumulate=accumulate
        )
    for parts, _, aligned in groups(pick(sources, flat), pick(destinations, flat)):
        table = table_for(parts, CONFIG_ADDING if accumulate else CONFIG, aligned=aligned)
        dtype = torch.promote_types(parts[0][0].dtype, parts[1][0].dtype)
        table.launch(
            unscale_into_kernel,
            table.n_tensors,
            inv_scale,
            found_inf,
            **_dtypes(parts),
            ACC=accumulator(dtype),
            SCALES=True,
            ACCUMULATE=accumulate,
            ALIGNED=aligned,
            enable_fp_fusion=False,  # product and sum are rounded separately, as on the CPU
        )
        torch.autograd.graph.increment_version(parts[1])


def cast_(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Launch `unscale_into_kernel` without a factor once per pair of dtypes; see the module's docstring."""
    flat, other, _ = flat_rows(sources, destinations)
    if other:
        reference.cast_(pick(sources, other), pick(destinations, other))
    for parts, _, aligned in groups(pick(sources, flat), pick(destinations, flat)):
        table = table_for(parts, CONFIG, aligned=aligned)
        dtypes = _dtypes(parts)
        table.launch(
            unscale_into_kernel,
            table.n_tensors,
            table.numels,
            table.numels,
            **dtypes,
            ACC=dtypes["SOURCE"],
            SCALES=False,
            ACCUMULATE=False,
            ALIGNED=aligned,
        )
        torch.autograd.graph.increment_version(parts[1])


def _dtypes(parts: Sequence[Sequence[Tensor]]) -> dict[str, tl.dtype]:
    return {"SOURCE": TRITON_DTYPES[parts[0][0].dtype], "DESTINATION": TRITON_DTYPES[parts[1][0].dtype]}
