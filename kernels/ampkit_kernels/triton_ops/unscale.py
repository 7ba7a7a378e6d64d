"""unscale_ and multiply_: g <- g * factor in place, one launch per dtype. inverse_scale: the factor 1 / scale.

Contract. grads: dense CUDA tensors of any float dtype at any element-aligned address, none empty. factor (inv_scale),
found_inf: one float32 element each. Arithmetic in float32 (float64 for float64), one rounding. Nothing synchronizes.

`unscale_` sets found_inf to 1.0, never clears it, where a product as it is stored is not finite, by plain stores (every
writer writes the same value): with a factor of at most 1 exactly if an incoming value is not finite, with a factor
above 1 for a product that overflows as well. `multiply_` only reads it: each program returns without work if it is set
or if the factor is 1.

`inverse_scale` reads one float32 element and returns new memory: the float64 quotient, rounded to float32 because
float32 division in a kernel is approximate, a flag of 0, and a copy of the scale. One launch, where PyTorch takes four.

Bytes per element: one read, one write (8 for float32); none where `multiply_` returns.

Addressing: see `pointer_table`; any element-aligned address keeps 128-bit accesses in full blocks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..configs import Config
from ..tensor_lists import by_dtype
from .launch import flat_rows, jit_kernel, list_constants, on_device, pick
from .pointer_table import chunk_bounds, load_block, store_block, table_for

CONFIGS = {8: Config(block=2048), 4: Config(block=4096), 2: Config(block=4096)}  # by bytes per element
_ONE_WARP: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}


@triton.jit
def _unscale_block(p, o, mask, factor, bad, MASKED: tl.constexpr):
    y = (load_block(p, o, mask, bad.dtype, MASKED) * factor).to(p.dtype.element_ty)
    store_block(p, o, y, mask, MASKED)
    # Adds 0 for a finite value, NaN for any other; NaN remains.
    return bad + y.to(bad.dtype) * 0.0


@jit_kernel
def unscale_kernel(
    addresses,
    numels,
    blocks,
    n_blocks,
    blocks_per_chunk,
    factor_ptr,
    found_inf_ptr,
    DTYPE: tl.constexpr,
    ACC: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    CHECKS: tl.constexpr,
    SKIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    factor = tl.load(factor_ptr)
    go = True
    if not CHECKS:
        go = factor != 1.0
    if SKIPS:
        go = go & (tl.load(found_inf_ptr) == 0.0)
    if go:
        wide = factor.to(ACC)
        bad = tl.zeros((BLOCK,), dtype=ACC)
        lanes = tl.arange(0, BLOCK)
        b = tl.program_id(0)
        while b < n_blocks:
            p, low, high = chunk_bounds(addresses, numels, blocks, b, blocks_per_chunk, DTYPE, ITEMSIZE, BLOCK)
            n_full = high // BLOCK
            i = 0
            if low > 0:  # the tensor starts inside this block
                bad = _unscale_block(p, lanes, (lanes >= low) & (lanes < high), wide, bad, True)
                i = 1
            while i < n_full:
                bad = _unscale_block(p, i * BLOCK + lanes, None, wide, bad, False)
                i += 1
            if i * BLOCK < high:  # the tensor ends inside this block
                tail = i * BLOCK + lanes
                bad = _unscale_block(p, tail, tail < high, wide, bad, True)
            b += tl.num_programs(0)
        if CHECKS:
            total = tl.sum(bad, axis=0)
            if total != total:
                tl.store(found_inf_ptr, 1.0)


@jit_kernel
def inverse_kernel(scale_ptr, result_ptr):
    scale = tl.load(scale_ptr)
    tl.store(result_ptr, (1.0 / scale.to(tl.float64)).to(tl.float32))
    tl.store(result_ptr + 1, 0.0)
    tl.store(result_ptr + 2, scale)


def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Launch `unscale_kernel` once per dtype; see the module's docstring."""
    flat, other, _ = flat_rows(grads)
    if other:
        reference.unscale_(pick(grads, other), inv_scale, found_inf)
    _launch(pick(grads, flat), inv_scale, found_inf, CHECKS=True, SKIPS=False)


def multiply_(grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
    """Launch `unscale_kernel` without its check once per dtype; see the module's docstring."""
    flat, other, _ = flat_rows(grads)
    if other:
        reference.multiply_(pick(grads, other), factor, found_inf)
    factor = factor.float()
    flag = factor if found_inf is None else found_inf
    grads = pick(grads, flat)
    _launch(grads, factor, flag, CHECKS=False, SKIPS=found_inf is not None)
    torch.autograd.graph.increment_version(grads)  # `unscale_` does not change versions, as torch's operator


def _launch(grads: Sequence[Tensor], factor: Tensor, flag: Tensor, **constants: bool) -> None:
    for group in by_dtype(grads):
        dtype = group[0].dtype
        table = table_for([group], CONFIGS[dtype.itemsize])
        table.launch(unscale_kernel, factor, flag, **list_constants(dtype), **constants)


def inverse_scale(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Launch `inverse_kernel`; see the module's docstring."""
    result = torch.empty(3, dtype=torch.float32, device=scale.device)
    with on_device(scale.device):
        inverse_kernel[(1,)](scale, result, **_ONE_WARP)
    inverse, flag, used = result.unbind()
    return inverse, flag, used


def compile_one(device: torch.device) -> None:
    """Build Triton's driver and compile `inverse_kernel` for a device; raises the errors of its first launch.

    Nothing is loaded or launched here, and the kernel's first launch does not compile again.
    """
    with on_device(device):
        inverse_kernel.warmup(torch.float32, torch.float32, grid=(1,), **_ONE_WARP)
