"""adamw_: one AdamW step from gradients that may still be scaled. Two launches per combination of dtypes.

Contract, per tensor, with g = sign * gradient * multiplier / grad_scale:

    step <- step + 1
    p <- p * (1 - lr * weight_decay)
    m <- m + (1 - beta1) * (g - m)
    v <- v * beta2 + (1 - beta2) * g * g
    p <- p - lr / (1 - beta1**step) * m / (sqrt(v) / sqrt(1 - beta2**step) + eps)

and the running maximum of v in place of v under amsgrad. params, moments: dense CUDA tensors with equal
strides, any float dtypes; grads are only read; copies (optional) receive the new p in their own dtype; steps:
one float32 element each, on the device. Where found_inf is set nothing is written. Arithmetic in float32
(float64 for float64 parameters), in the order of `torch.optim.AdamW(foreach=False)`, with correctly rounded
division and square root, and a multiply-add fused where, and only where, its CPU kernels fuse one. Does not
synchronise.

`prepare_kernel` counts the steps up and turns the hyperparameters into one row of coefficients per tensor, in
float64 rounded once; `adamw_kernel` reads that row and nothing else from the host's world.

Bytes per element: 28 for float32 (16 read, 12 written), 36 with amsgrad, 2 more with a half copy.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ..configs import Config
from .chunks import chunk_extent, list_pointer, load_block, store_block
from .coefficients import coefficient_rows, prepare
from .entry import entry
from .launch import TRITON_DTYPES, accumulator, groups
from .pointer_table import table_for

CONFIGS = {
    8: Config(block=512, chunk=32768),
    4: Config(block=1024, chunk=32768),
}  # by bytes of the arithmetic
N_COEFFICIENTS = 8


@triton.jit
def integer_power(base, exponent):
    """base ** exponent for int32 exponents from 0 to 2**25 - 1, by squaring: float64 products only.

    `1 - beta ** step` cancels almost all digits at the first steps, which float32 or a logarithm could not
    afford; and squaring needs no device library, so the interpreter runs the same arithmetic.
    """
    result = tl.full(exponent.shape, 1.0, tl.float64)
    square = result * base
    for _ in tl.static_range(25):
        result = tl.where((exponent & 1) == 1, result * square, result)
        square = square * square
        exponent = exponent >> 1
    return result


@entry
def prepare_kernel(addresses, coefficients_ptr, n, lr_ptr, lr: tl.float64, beta1: tl.float64,
                   beta2: tl.float64, eps: tl.float64, weight_decay: tl.float64, multiplier_ptr,
                   grad_scale_ptr, found_inf_ptr, HAS_LR: tl.constexpr, HAS_MULTIPLIER: tl.constexpr,
                   HAS_GRAD_SCALE: tl.constexpr, HAS_FOUND_INF: tl.constexpr, MAXIMIZE: tl.constexpr,
                   N_LISTS: tl.constexpr, BLOCK: tl.constexpr):
    # The step counts are the last column of the address table.
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < n
    go = True
    if HAS_FOUND_INF:
        go = tl.load(found_inf_ptr) == 0.0
    if go:
        address = tl.load(addresses + lanes * N_LISTS + (N_LISTS - 1), mask=mask, other=0)
        step_ptr = address.to(tl.pointer_type(tl.float32))
        step = tl.load(step_ptr, mask=mask, other=0.0) + 1.0
        tl.store(step_ptr, step, mask=mask)
        one = tl.full((BLOCK,), 1.0, tl.float64)
        rate = one * lr
        if HAS_LR:
            rate = one * tl.load(lr_ptr).to(tl.float64)
        count = step.to(tl.int32)
        factor = one
        if HAS_MULTIPLIER:
            factor = factor * tl.load(multiplier_ptr).to(tl.float64)
        if HAS_GRAD_SCALE:
            inverse = (one / tl.load(grad_scale_ptr).to(tl.float64)).to(tl.float32)
            factor = factor * inverse.to(tl.float64)
        if MAXIMIZE:
            factor = -factor
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
def _adamw_block(pp, gp, mp, vp, xp, cp, o, mask, step_size, correction, decay, factor, weight, beta2,
                 weight2, eps, ACC: tl.constexpr, AMSGRAD: tl.constexpr, COPY: tl.constexpr,
                 LERP_FROM_END: tl.constexpr, MASKED: tl.constexpr):
    g = load_block(gp, o, mask, ACC, MASKED) * factor
    m = load_block(mp, o, mask, ACC, MASKED)
    if LERP_FROM_END:  # torch.lerp starts from the nearer end
        m = g - (g - m) * (1.0 - weight)
    else:
        m = tl.fma(weight, g - m, m)
    store_block(mp, o, m, mask, MASKED)
    v = load_block(vp, o, mask, ACC, MASKED) * beta2 + weight2 * g * g
    store_block(vp, o, v, mask, MASKED)
    if AMSGRAD:
        v = tl.maximum(v, load_block(xp, o, mask, ACC, MASKED), propagate_nan=tl.PropagateNan.ALL)
        store_block(xp, o, v, mask, MASKED)
    p = load_block(pp, o, mask, ACC, MASKED) * decay
    if tl.float64 == ACC:
        p = p - step_size * m / (tl.sqrt(v) / correction + eps)
    else:
        p = p - tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), correction) + eps)
    store_block(pp, o, p, mask, MASKED)
    if COPY:
        store_block(cp, o, p.to(pp.dtype.element_ty), mask, MASKED)


@entry
def adamw_kernel(addresses, numels, blocks, n_blocks, blocks_per_chunk, coefficients_ptr, found_inf_ptr,
                 PARAM: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr, COPY_TO: tl.constexpr,
                 ACC: tl.constexpr, AMSGRAD: tl.constexpr, COPY: tl.constexpr, LERP_FROM_END: tl.constexpr,
                 HAS_FOUND_INF: tl.constexpr, ALIGNED: tl.constexpr, N_LISTS: tl.constexpr,
                 BLOCK: tl.constexpr):
    go = True
    if HAS_FOUND_INF:
        go = tl.load(found_inf_ptr) == 0.0
    if go:
        lanes = tl.arange(0, BLOCK)
        b = tl.program_id(0)
        while b < n_blocks:
            t, base, length = chunk_extent(numels, blocks, b, blocks_per_chunk, BLOCK)
            pp = list_pointer(addresses, t, base, 0, N_LISTS, PARAM, ALIGNED)
            gp = list_pointer(addresses, t, base, 1, N_LISTS, GRAD, ALIGNED)
            mp = list_pointer(addresses, t, base, 2, N_LISTS, MOMENT, ALIGNED)
            vp = list_pointer(addresses, t, base, 3, N_LISTS, MOMENT, ALIGNED)
            xp = vp
            if AMSGRAD:
                xp = list_pointer(addresses, t, base, 4, N_LISTS, MOMENT, ALIGNED)
            cp = pp
            if COPY:
                cp = list_pointer(addresses, t, base, N_LISTS - 2, N_LISTS, COPY_TO, ALIGNED)
            row = coefficients_ptr + t * 8
            step_size, correction = tl.load(row), tl.load(row + 1)
            decay, factor = tl.load(row + 2), tl.load(row + 3)
            weight, beta2 = tl.load(row + 4), tl.load(row + 5)
            weight2, eps = tl.load(row + 6), tl.load(row + 7)
            n_full = length // BLOCK
            i = 0
            while i < n_full:
                _adamw_block(pp, gp, mp, vp, xp, cp, i * BLOCK + lanes, None, step_size, correction, decay,
                             factor, weight, beta2, weight2, eps, ACC, AMSGRAD, COPY, LERP_FROM_END,
                             False)
                i += 1
            if n_full * BLOCK < length:
                o = n_full * BLOCK + lanes
                _adamw_block(pp, gp, mp, vp, xp, cp, o, o < length, step_size, correction, decay, factor,
                             weight, beta2, weight2, eps, ACC, AMSGRAD, COPY, LERP_FROM_END,
                             True)
            b += tl.num_programs(0)


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    multiplier: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    copies: Sequence[Tensor] | None,
    config: Config | None = None,
) -> None:
    """Launch `prepare_kernel` and `adamw_kernel` per combination of dtypes; see the module's docstring."""
    lists = [params, grads, exp_avgs, exp_avg_sqs]
    if amsgrad:
        lists.append(max_exp_avg_sqs)
    if copies is not None:
        lists.append(copies)
    for parts, rows, aligned in groups(*lists):
        dtypes = [TRITON_DTYPES[part[0].dtype] for part in parts]
        acc = accumulator(parts[0][0].dtype)
        n_lists = len(parts) + 1
        table = table_for([*parts, [steps[i] for i in rows]], config or CONFIGS[8 if acc is tl.float64 else 4])
        coefficients = coefficient_rows(table.n_tensors, N_COEFFICIENTS, acc, parts[0][0].device)
        prepare(
            prepare_kernel, coefficients, lr, multiplier, grad_scale, found_inf, addresses=table.addresses,
            beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, MAXIMIZE=maximize, N_LISTS=n_lists,
        )
        table.launch(
            adamw_kernel, coefficients, coefficients if found_inf is None else found_inf, PARAM=dtypes[0],
            GRAD=dtypes[1], MOMENT=dtypes[2], COPY_TO=dtypes[-1], ACC=acc, AMSGRAD=amsgrad, COPY=copies is not None,
            LERP_FROM_END=1 - beta1 >= 0.5, HAS_FOUND_INF=found_inf is not None, ALIGNED=aligned, N_LISTS=n_lists,
            enable_fp_fusion=False,
        )
