"""sgd_: one SGD step from gradients that may still be scaled. One launch per combination of dtypes.

Contract, per tensor, with g = sign * gradient * multiplier / grad_scale + weight_decay * p:

    b <- momentum * b + g
    p <- p - lr * d, where d is b, or g + momentum * b with nesterov, or g without momentum

params, momentum_buffers: dense CUDA tensors with equal strides, any float dtypes; grads are only read; remainders
and streams, both optional: see
`ampkit_kernels.rounding`; a small launch ahead advances the streams. Where found_inf is set nothing is written.
Hyperparameters and scalars are combined in float64 and rounded once; arithmetic in float32 (float64 for float64
parameters), in the order of `torch.optim.SGD(foreach=False)`, with a multiply-add fused exactly where torch's CPU
kernels fuse one. Does not synchronize.

Bytes per element: 20 for float32 with momentum (12 read, 8 written), 12 without. For bfloat16
weights and gradients 10 with a bfloat16 momentum, 14 with a float32 one; 4 more with remainders.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..configs import Config
from ..step_cache import Launch, StepCache
from .chunks import chunk_extent, list_pointer, load_block, store_block
from .device_rounding import advance_streams, joined, random_bits, rounded_for, split, stream_keys
from .launch import jit_kernel, on_device
from .step_launch import rate_and_factor, run_step, scalars

CONFIGS = {
    8: Config(block=1024, chunk=32768),
    4: Config(block=2048, chunk=32768),
}  # by bytes of the arithmetic
_BLOCK = 128  # streams that a program advances


@triton.jit
def _sgd_block(
    pp,
    gp,
    bp,
    cp,
    o,
    mask,
    lr,
    momentum,
    weight_decay,
    factor,
    keys,
    ACC: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    REMAINDER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DECAY: tl.constexpr,
    MASKED: tl.constexpr,
):
    # Every load before the first store, as in adamw.
    p = load_block(pp, o, mask, ACC, MASKED)
    if REMAINDER:
        p = joined(p, load_block(cp, o, mask, tl.int32, MASKED))
    g = load_block(gp, o, mask, ACC, MASKED) * factor
    if MOMENTUM:
        buffer = load_block(bp, o, mask, ACC, MASKED)
    if DECAY:
        g = tl.fma(p, weight_decay, g)
    if MOMENTUM:
        buffer = buffer * momentum + g
        if NESTEROV:
            g = tl.fma(buffer, momentum, g)
        else:
            g = buffer
    p = tl.fma(g, -lr, p)
    if REMAINDER:
        p, remainder = split(p)
    if STOCHASTIC:
        for_p, for_buffer = random_bits(keys, o, False)
        p = rounded_for(pp, p, for_p)
    store_block(pp, o, p, mask, MASKED)
    if MOMENTUM:
        if STOCHASTIC:  # only here: rounding both at once takes more registers
            buffer = rounded_for(bp, buffer, for_buffer)
        store_block(bp, o, buffer, mask, MASKED)
    if REMAINDER:
        store_block(cp, o, remainder, mask, MASKED)


@jit_kernel
def advance_kernel(addresses, n, found_inf_ptr, HAS_FOUND_INF: tl.constexpr, COLUMN: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    go = True
    if HAS_FOUND_INF:
        go = tl.load(found_inf_ptr) == 0.0
    if go:
        advance_streams(addresses, n, lanes, lanes < n, COLUMN)


@jit_kernel
def sgd_kernel(
    addresses,
    numels,
    blocks,
    n_blocks,
    blocks_per_chunk,
    n_tensors,
    lr_ptr,
    lr: tl.float64,
    momentum: tl.float64,
    weight_decay: tl.float64,
    multiplier_ptr,
    grad_scale_ptr,
    found_inf_ptr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    ACC: tl.constexpr,
    MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr,
    DECAY: tl.constexpr,
    REMAINDER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HAS_LR: tl.constexpr,
    HAS_MULTIPLIER: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    go = True
    if HAS_FOUND_INF:
        go = tl.load(found_inf_ptr) == 0.0
    if go:
        one = tl.full((), 1.0, tl.float64)
        rate, factor = rate_and_factor(
            one, lr_ptr, lr, multiplier_ptr, grad_scale_ptr, HAS_LR, HAS_MULTIPLIER, HAS_GRAD_SCALE, MAXIMIZE
        )
        rate, factor = rate.to(ACC), factor.to(ACC)
        kept, decay = (one * momentum).to(ACC), (one * weight_decay).to(ACC)
        lanes = tl.arange(0, BLOCK)
        b = tl.program_id(0)
        chunk = tl.load(blocks + b)
        while b < n_blocks:
            t, base, length = chunk_extent(numels, chunk, blocks_per_chunk, BLOCK)
            pp = list_pointer(addresses, n_tensors, t, base, 0, PARAM, ALIGNED)
            gp = list_pointer(addresses, n_tensors, t, base, 1, GRAD, ALIGNED)
            bp = pp
            if MOMENTUM:
                bp = list_pointer(addresses, n_tensors, t, base, 2, MOMENT, ALIGNED)
            cp = pp
            if REMAINDER:
                cp = list_pointer(addresses, n_tensors, t, base, 2 + MOMENTUM, tl.int16, ALIGNED)
            keys = ()
            if STOCHASTIC:
                keys = stream_keys(addresses, n_tensors, t, base, 2 + MOMENTUM + REMAINDER)
            n_full = length // BLOCK
            # The next chunk's entry, ahead of the arithmetic: addresses wait for it, and elements for addresses.
            chunk = tl.load(blocks + tl.minimum(b + tl.num_programs(0), n_blocks - 1))
            # Not formatted: each of the many arguments would get a line of its own.
            i = 0
            while i < n_full:
                _sgd_block(pp, gp, bp, cp, i * BLOCK + lanes, None, rate, kept, decay, factor, keys, ACC,
                           MOMENTUM, NESTEROV, REMAINDER, STOCHASTIC, DECAY, False)  # fmt: skip
                i += 1
            if n_full * BLOCK < length:
                o = n_full * BLOCK + lanes
                _sgd_block(pp, gp, bp, cp, o, o < length, rate, kept, decay, factor, keys, ACC, MOMENTUM,
                           NESTEROV, REMAINDER, STOCHASTIC, DECAY, True)  # fmt: skip
            b += tl.num_programs(0)


def sgd_(lists: Mapping[str, Sequence[Tensor]], *, cache: StepCache | None, **options: Any) -> None:
    """Launch `sgd_kernel` once per combination of dtypes; see the module's docstring. `options`: for `_launch`."""
    run_step(lists, _launch, reference.sgd_, CONFIGS, 0, cache, options)


def _launch(
    rows: Launch,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    **device_scalars: Any,
) -> None:
    """Launch the kernels over these rows; `device_scalars` are the arguments of `scalars`."""
    table = rows.table
    arguments = scalars(table.numels, **device_scalars)
    if rows.constants["STOCHASTIC"]:
        with on_device(table.device):
            advance_kernel[((table.n_tensors + _BLOCK - 1) // _BLOCK,)](
                table.addresses,
                table.n_tensors,
                arguments["found_inf_ptr"],
                HAS_FOUND_INF=arguments["HAS_FOUND_INF"],
                COLUMN=rows.n_elementwise,
                BLOCK=_BLOCK,
                num_warps=4,
                enable_fp_fusion=False,
            )
    table.launch(
        sgd_kernel,
        table.n_tensors,
        momentum=momentum,
        weight_decay=weight_decay,
        MOMENTUM=momentum != 0,
        NESTEROV=nesterov,
        DECAY=weight_decay != 0,
        MAXIMIZE=maximize,
        **arguments,
        **rows.constants,
        enable_fp_fusion=False,
    )
