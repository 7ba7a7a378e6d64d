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
    source, to, o, mask, inv_scale, bad, SCALES: tl.constexpr, ACCUMULATE: tl.constexpr, MASKED: tl.constexpr
):
    x = load_block(source, o, mask, bad.dtype, MASKED)
    if SCALES:
        x = (x * inv_scale).to(to.dtype.element_ty).to(bad.dtype)
    if ACCUMULATE:
        store_block(to, o, load_block(to, o, mask, bad.dtype, MASKED) + x, mask, MASKED)
    else:
        store_block(to, o, x, mask, MASKED)
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
        to = list_pointer(addresses, n_tensors, tensor, base, 1, DESTINATION, ALIGNED)
        n_full = length // BLOCK
        i = 0
        while i < n_full:
            bad = _unscale_into_block(source, to, i * BLOCK + lanes, None, inv_scale, bad, SCALES, ACCUMULATE, False)
            i += 1
        if n_full * BLOCK < length:
            o = n_full * BLOCK + lanes
            bad = _unscale_into_block(source, to, o, o < length, inv_scale, bad, SCALES, ACCUMULATE, True)
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
    _launch(pick(sources, flat), pick(destinations, flat), (inv_scale, found_inf), accumulate)


def cast_(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Launch `unscale_into_kernel` without a factor once per pair of dtypes; see the module's docstring."""
    flat, other, _ = flat_rows(sources, destinations)
    if other:
        reference.cast_(pick(sources, other), pick(destinations, other))
    _launch(pick(sources, flat), pick(destinations, flat), None, False)


def _launch(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    scalars: tuple[Tensor, Tensor] | None,  # inverse scale and flag; None for a cast
    accumulate: bool,
) -> None:
    for parts, _, aligned in groups(sources, destinations):
        table = table_for(parts, CONFIG_ADDING if accumulate else CONFIG, aligned=aligned)
        source, destination = (part[0].dtype for part in parts)
        table.launch(  # product and sum are rounded separately, as on the CPU
            unscale_into_kernel,
            table.n_tensors,
            *(scalars or (table.numels, table.numels)),
            SOURCE=TRITON_DTYPES[source],
            DESTINATION=TRITON_DTYPES[destination],
            ACC=TRITON_DTYPES[source] if scalars is None else accumulator(torch.promote_types(source, destination)),
            SCALES=scalars is not None,
            ACCUMULATE=accumulate,
            ALIGNED=aligned,
        )
        torch.autograd.graph.increment_version(parts[1])
