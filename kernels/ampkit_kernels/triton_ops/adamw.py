"""adamw_: one AdamW step from gradients that may still be scaled. Two launches per combination of dtypes.

Contract, per tensor, with g = sign * gradient * multiplier / grad_scale (https://arxiv.org/abs/1711.05101, as
`torch.optim.AdamW` computes it):

    step <- step + 1
    p <- p * (1 - lr * weight_decay)
    m <- m + (1 - beta1) * (g - m)
    v <- v * beta2 + (1 - beta2) * g * g
    p <- p - lr / (1 - beta1**step) * m / (sqrt(v) / sqrt(1 - beta2**step) + eps)

With amsgrad the last line has the running maximum of v in place of v. params, moments: dense CUDA tensors with equal
strides, any float dtypes; grads are only read; steps: one float32 element each, on the device. remainders and streams,
both optional: see
`ampkit_kernels.rounding`. Where found_inf is set nothing is written. Arithmetic in float32 (float64 for float64
parameters), in the order of `torch.optim.AdamW(foreach=False)`, with correctly rounded division and square root, and a
multiply-add fused exactly where torch's CPU kernels fuse one. Does not synchronize.

`prepare_kernel` counts the steps up, advances the streams and turns the hyperparameters into one row of coefficients
per tensor, in float64 rounded once; `adamw_kernel` reads no other numbers.

Bytes per element: 28 for float32 (16 read, 12 written), 36 with amsgrad. For bfloat16 weights
and gradients 14 with bfloat16 moments, 22 with float32 ones; 4 more with remainders.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..configs import Config, resident_programs
from ..step_cache import Launch, StepCache
from .chunks import chunk_extent, list_pointer, load_block, store_block
from .device_rounding import advance_streams, joined, random_bits, rounded_for, split, stream_keys
from .launch import jit_kernel, on_device
from .step_launch import rate_and_factor, run_step, scalars

CONFIGS = {
    8: Config(block=512, chunk=32768, programs_per_multiprocessor=resident_programs(72, 8)),
    4: Config(block=1024, chunk=32768),
}  # by bytes of the arithmetic
N_COEFFICIENTS = 8
_BLOCK = 128  # rows of coefficients that a program computes


@triton.jit
def integer_power(base, exponent):
    """base ** exponent for int32 exponents from 0 to 2**25 - 1, by squaring: float64 products only.

    `1 - beta ** step` cancels almost all digits at the first steps, so float32 or a logarithm would be too inexact;
    and squaring needs no device library, so the interpreter does the same arithmetic.
    """
    result = tl.full(exponent.shape, 1.0, tl.float64)
    square = result * base
    for _ in tl.static_range(25):
        result = tl.where((exponent & 1) == 1, result * square, result)
        square = square * square
        exponent = exponent >> 1
    return result


@jit_kernel
def prepare_kernel(
    addresses,
    coefficients_ptr,
    n,
    lr_ptr,
    lr: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    eps: tl.float64,
    weight_decay: tl.float64,
    multiplier_ptr,
    grad_scale_ptr,
    found_inf_ptr,
    HAS_LR: tl.constexpr,
    HAS_MULTIPLIER: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STEPS_COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < n
    go = True
    if HAS_FOUND_INF:
        go = tl.load(found_inf_ptr) == 0.0
    if go:
        address = tl.load(addresses + STEPS_COLUMN * n + lanes, mask=mask, other=0)
        step_ptr = address.to(tl.pointer_type(tl.float32))
        step = tl.load(step_ptr, mask=mask, other=0.0) + 1.0
        tl.store(step_ptr, step, mask=mask)
        if STOCHASTIC:
            advance_streams(addresses, n, lanes, mask, STEPS_COLUMN + 1)
        one = tl.full((BLOCK,), 1.0, tl.float64)
        count = step.to(tl.int32)
        rate, factor = rate_and_factor(
            one, lr_ptr, lr, multiplier_ptr, grad_scale_ptr, HAS_LR, HAS_MULTIPLIER, HAS_GRAD_SCALE, MAXIMIZE
        )
        row = coefficients_ptr + lanes * 8
        dtype = coefficients_ptr.dtype.element_ty
        tl.store(row, (rate / (1.0 - integer_power(beta1, count))).to(dtype), mask=mask)
        tl.store(row + 1, tl.sqrt(1.0 - integer_power(beta2, count)).to(dtype), mask=mask)
        tl.store(row + 2, (1.0 - rate * weight_decay).to(dtype), mask=mask)
        tl.store(row + 3, factor.to(dtype), mask=mask)
        tl.store(row + 4, (1.0 - one * beta1).to(dtype), mask=mask)
        tl.store(row + 5, (one * beta2).to(dtype), mask=mask)
        tl.store(row + 6, (1.0 - one * beta2).to(dtype), mask=mask)
        tl.store(row + 7, (one * eps).to(dtype), mask=mask)


@triton.jit
def _adamw_block(
    pp,
    gp,
    mp,
    vp,
    xp,
    cp,
    o,
    mask,
    step_size,
    correction,
    decay,
    factor,
    weight,
    beta2,
    weight2,
    eps,
    keys,
    ACC: tl.constexpr,
    AMSGRAD: tl.constexpr,
    REMAINDER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    LERP_FROM_END: tl.constexpr,
    MASKED: tl.constexpr,
):
    # Every load before the first store: the compiler does not know that the lists do not overlap, so it would make each
    # load wait for the stores above it.
    g = load_block(gp, o, mask, ACC, MASKED) * factor
    m = load_block(mp, o, mask, ACC, MASKED)
    v = load_block(vp, o, mask, ACC, MASKED)
    p = load_block(pp, o, mask, ACC, MASKED)
    if REMAINDER:
        p = joined(p, load_block(cp, o, mask, tl.int32, MASKED))
    if AMSGRAD:
        x = load_block(xp, o, mask, ACC, MASKED)
    if LERP_FROM_END:  # torch.lerp starts from the nearer end
        m = g - (g - m) * (1.0 - weight)
    else:
        m = tl.fma(weight, g - m, m)
    v = v * beta2 + weight2 * g * g
    largest = v
    if AMSGRAD:
        largest = tl.maximum(v, x, propagate_nan=tl.PropagateNan.ALL)
    p = p * decay
    if tl.float64 == ACC:
        p = p - step_size * m / (tl.sqrt(largest) / correction + eps)
    else:
        p = p - tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(largest), correction) + eps)
    if REMAINDER:
        p, remainder = split(p)
    if STOCHASTIC:
        for_v, for_x = random_bits(keys, o, True)
        v, largest = rounded_for(vp, v, for_v), rounded_for(xp, largest, for_x)
        for_p, for_m = random_bits(keys, o, False)
        p, m = rounded_for(pp, p, for_p), rounded_for(mp, m, for_m)
    store_block(mp, o, m, mask, MASKED)
    store_block(vp, o, v, mask, MASKED)
    if AMSGRAD:
        store_block(xp, o, largest, mask, MASKED)
    store_block(pp, o, p, mask, MASKED)
    if REMAINDER:
        store_block(cp, o, remainder, mask, MASKED)


@jit_kernel
def adamw_kernel(
    addresses,
    numels,
    blocks,
    n_blocks,
    blocks_per_chunk,
    n_tensors,
    coefficients_ptr,
    found_inf_ptr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    ACC: tl.constexpr,
    AMSGRAD: tl.constexpr,
    REMAINDER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    LERP_FROM_END: tl.constexpr,
    HAS_FOUND_INF: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    go = True
    if HAS_FOUND_INF:
        go = tl.load(found_inf_ptr) == 0.0
    if go:
        lanes = tl.arange(0, BLOCK)
        b = tl.program_id(0)
        chunk = tl.load(blocks + b)
        while b < n_blocks:
            if not ALIGNED:
                chunk = tl.load(blocks + b)
            t, base, length = chunk_extent(numels, chunk, blocks_per_chunk, BLOCK)
            pp = list_pointer(addresses, n_tensors, t, base, 0, PARAM, ALIGNED)
            gp = list_pointer(addresses, n_tensors, t, base, 1, GRAD, ALIGNED)
            mp = list_pointer(addresses, n_tensors, t, base, 2, MOMENT, ALIGNED)
            vp = list_pointer(addresses, n_tensors, t, base, 3, MOMENT, ALIGNED)
            xp = vp
            if AMSGRAD:
                xp = list_pointer(addresses, n_tensors, t, base, 4, MOMENT, ALIGNED)
            cp = pp
            if REMAINDER:
                cp = list_pointer(addresses, n_tensors, t, base, 4 + AMSGRAD, tl.int16, ALIGNED)
            row = coefficients_ptr + t * 8
            step_size, correction = tl.load(row), tl.load(row + 1)
            decay, factor = tl.load(row + 2), tl.load(row + 3)
            weight, beta2 = tl.load(row + 4), tl.load(row + 5)
            weight2, eps = tl.load(row + 6), tl.load(row + 7)
            keys = ()
            if STOCHASTIC:
                keys = stream_keys(addresses, n_tensors, t, base, 5 + AMSGRAD + REMAINDER)
            n_full = length // BLOCK
            if ALIGNED:  # ahead of the arithmetic, as in sgd; unaligned lists leave no registers for it
                chunk = tl.load(blocks + tl.minimum(b + tl.num_programs(0), n_blocks - 1))
            # Not formatted: each of the many arguments would get a line of its own.
            i = 0
            while i < n_full:
                _adamw_block(pp, gp, mp, vp, xp, cp, i * BLOCK + lanes, None, step_size, correction, decay,
                             factor, weight, beta2, weight2, eps, keys, ACC, AMSGRAD, REMAINDER, STOCHASTIC,
                             LERP_FROM_END, False)  # fmt: skip
                i += 1
            if n_full * BLOCK < length:
                o = n_full * BLOCK + lanes
                _adamw_block(pp, gp, mp, vp, xp, cp, o, o < length, step_size, correction, decay, factor,
                             weight, beta2, weight2, eps, keys, ACC, AMSGRAD, REMAINDER, STOCHASTIC,
                             LERP_FROM_END, True)  # fmt: skip
            b += tl.num_programs(0)


def adamw_(lists: Mapping[str, Sequence[Tensor]], *, cache: StepCache | None, **options: Any) -> None:
    """Launch both kernels per combination of dtypes; see the module's docstring. `options`: for `_launch`."""
    launch = partial(_launch, amsgrad="max_exp_avg_sqs" in lists)
    run_step(lists, launch, reference.adamw_, CONFIGS, N_COEFFICIENTS, cache, options)


def _launch(
    rows: Launch,
    *,
    amsgrad: bool,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    **device_scalars: Any,
) -> None:
    """Launch both kernels over these rows; `device_scalars` are the arguments of `scalars`."""
    table, coefficients = rows.table, rows.coefficients
    arguments = scalars(coefficients, **device_scalars)
    with on_device(table.device):
        prepare_kernel[((table.n_tensors + _BLOCK - 1) // _BLOCK,)](
            table.addresses,
            coefficients,
            table.n_tensors,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            **arguments,
            MAXIMIZE=maximize,
            STOCHASTIC=rows.constants["STOCHASTIC"],
            STEPS_COLUMN=rows.n_elementwise,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    table.launch(
        adamw_kernel,
        table.n_tensors,
        coefficients,
        arguments["found_inf_ptr"],
        HAS_FOUND_INF=arguments["HAS_FOUND_INF"],
        AMSGRAD=amsgrad,
        LERP_FROM_END=1 - beta1 >= 0.5,
        **rows.constants,
        enable_fp_fusion=False,
    )
