"""adamw_ and sgd_: a step from gradients that may still be scaled. Two rules of one kernel.

Contract, per tensor, with g = sign * gradient * multiplier / grad_scale. AdamW, as `torch.optim.AdamW` computes it
(https://arxiv.org/abs/1711.05101); with amsgrad the last line has the running maximum of v instead of v:

    step <- step + 1
    p <- p * (1 - lr * weight_decay)
    m <- m + (1 - beta1) * (g - m)
    v <- v * beta2 + (1 - beta2) * g * g
    p <- p - lr / (1 - beta1**step) * m / (sqrt(v) / sqrt(1 - beta2**step) + eps)

SGD, where d is b, with nesterov g + momentum * b, and without momentum g:

    g <- g + weight_decay * p
    b <- momentum * b + g
    p <- p - lr * d

params, state (moments or momentum buffers), grads: dense CUDA tensors with equal strides, any float dtypes. grads are
only read. steps: one float32 element each, on the device. remainders and streams, both optional: see
`ampkit_kernels.rounding`. If found_inf is set, nothing is written. Does not synchronize.

Arithmetic is float32 (float64 for float64 parameters), in the order of `torch.optim`'s `foreach=False`. Division and
square root are correctly rounded. A multiply-add is fused where torch's vectorized CPU kernels fuse one, so that state
and SGD's weights have their bits in float32. torch's square root on a CPU is not correctly rounded, and its CUDA
kernels fuse other operations: one step differs from theirs by at most an ulp of the operands.

Launches per combination of dtypes: `step_kernel`, and before it `prepare_kernel` for AdamW or streams. That one counts
steps up, advances streams, and turns AdamW's hyperparameters into one row of coefficients per tensor, in float64
rounded once.

Bytes per element:

- float32: AdamW 28 (16 read, 12 written), 36 with amsgrad. SGD 20 with momentum (12 read, 8 written), 12 without.
- bfloat16 weights and gradients: AdamW 14 with bfloat16 moments, 22 with float32 moments. SGD 10 with a bfloat16
  momentum, 14 with a float32 one. 4 more with remainders.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..configs import Config, resident_programs
from ..step_cache import Launch, StepCache
from .device_rounding import advance_streams, joined, number_and_key, random_word, rounded_for, split
from .launch import FOUR_WARPS, TRITON_DTYPES, accumulator, flat_rows, groups, jit_kernel, on_device, pick
from .pointer_table import chunk_extent, list_pointer, load_block, step_table, store_block, table_for

# By the rule (AdamW or SGD) and the bytes of the arithmetic.
CONFIGS = {
    (True, 8): Config(block=512, chunk=32768, programs_per_multiprocessor=resident_programs(72, 8)),
    (True, 4): Config(block=1024, chunk=32768),
    (False, 8): Config(block=1024, chunk=32768),
    (False, 4): Config(block=2048, chunk=32768),
}
N_COEFFICIENTS = 8
_BLOCK = 128  # tensors that a program of `prepare_kernel` handles
_STATE = ("exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "momentum_buffers")


@dataclass(frozen=True, eq=False)
class Form:
    """All constants of a step's kernels. Compared by identity, because every launch uses it in a cache key.

    Args:
        adamw: the rule: AdamW, or SGD.
        param, grad, state, acc: dtypes of the lists, and of the arithmetic.
        n_state: lists of state: for AdamW two, or three with amsgrad; for SGD one with momentum, or none.
        remainder, stochastic: whether there are lists of remainders and of streams.
        aligned: whether all addresses are 16-byte aligned.
        has_lr, has_multiplier, has_grad_scale, has_found_inf: whether the number is on the device.
        maximize, nesterov, decays: options of the rules.
        from_end: whether the first moment's weight is at least 0.5; `torch.lerp` starts from the nearer end.
    """

    adamw: bool
    param: tl.dtype
    grad: tl.dtype
    state: tl.dtype
    acc: tl.dtype
    n_state: int
    remainder: bool
    stochastic: bool
    aligned: bool
    has_lr: bool = False
    has_multiplier: bool = False
    has_grad_scale: bool = False
    has_found_inf: bool = False
    maximize: bool = False
    nesterov: bool = False
    decays: bool = True
    from_end: bool = False


_form = functools.cache(Form)


@triton.jit
def integer_power(base, exponent):
    """Return base ** exponent for int32 exponents from 0 to 2**25 - 1, by squaring: float64 products only.

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


@triton.jit
def rate_and_factor(one, lr, lr_ptr, multiplier_ptr, grad_scale_ptr, FORM: tl.constexpr):
    """Return the learning rate and the factor on gradients, each times `one`, which gives shape and type."""
    rate = one * lr
    if FORM.has_lr:
        rate = one * tl.load(lr_ptr).to(tl.float64)
    factor = one
    if FORM.has_multiplier:
        factor = factor * tl.load(multiplier_ptr).to(tl.float64)
    if FORM.has_grad_scale:
        inverse = (one / tl.load(grad_scale_ptr).to(tl.float64)).to(tl.float32)
        factor = factor * inverse.to(tl.float64)
    if FORM.maximize:
        factor = -factor
    return rate, factor


@jit_kernel
def prepare_kernel(
    addresses,
    n,
    coefficients_ptr,
    lr: tl.float64,
    weight_decay: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    eps: tl.float64,
    lr_ptr,
    multiplier_ptr,
    grad_scale_ptr,
    found_inf_ptr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < n
    go = True
    if FORM.has_found_inf:
        go = tl.load(found_inf_ptr) == 0.0
    if go:
        column: tl.constexpr = 2 + FORM.n_state + FORM.remainder
        if FORM.stochastic:
            advance_streams(addresses, n, lanes, mask, column + FORM.adamw)
        if FORM.adamw:
            address = tl.load(addresses + column * n + lanes, mask=mask, other=0)
            step_ptr = address.to(tl.pointer_type(tl.float32))
            step = tl.load(step_ptr, mask=mask, other=0.0) + 1.0
            tl.store(step_ptr, step, mask=mask)
            one = tl.full((BLOCK,), 1.0, tl.float64)
            count = step.to(tl.int32)
            rate, factor = rate_and_factor(one, lr, lr_ptr, multiplier_ptr, grad_scale_ptr, FORM)
            row = coefficients_ptr + lanes * 8
            tl.store(row, factor.to(FORM.acc), mask=mask)
            tl.store(row + 1, (1.0 - rate * weight_decay).to(FORM.acc), mask=mask)
            tl.store(row + 2, (rate / (1.0 - integer_power(beta1, count))).to(FORM.acc), mask=mask)
            tl.store(row + 3, tl.sqrt(1.0 - integer_power(beta2, count)).to(FORM.acc), mask=mask)
            tl.store(row + 4, (1.0 - one * beta1).to(FORM.acc), mask=mask)
            tl.store(row + 5, (one * beta2).to(FORM.acc), mask=mask)
            tl.store(row + 6, (1.0 - one * beta2).to(FORM.acc), mask=mask)
            tl.store(row + 7, (one * eps).to(FORM.acc), mask=mask)


@triton.jit
def _adamw(p, g, m, v, largest, c, FORM: tl.constexpr):
    """AdamW's rule, with the coefficients of `prepare_kernel` from the second on."""
    _, decay, step_size, correction, weight, beta2, weight2, eps = c
    if FORM.from_end:
        m = tl.fma(weight - 1.0, g - m, g)
    else:
        m = tl.fma(weight, g - m, m)
    v = tl.fma(weight2 * g, g, v * beta2)
    second = v
    if FORM.n_state == 3:
        largest = tl.maximum(v, largest, propagate_nan=tl.PropagateNan.ALL)
        second = largest
    p = p * decay
    if FORM.acc == tl.float64:
        p = p - step_size * m / (tl.sqrt(second) / correction + eps)
    else:
        p = p - tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(second), correction) + eps)
    return p, m, v, largest


@triton.jit
def _sgd(p, g, buffer, c, FORM: tl.constexpr):
    """SGD's rule; the coefficients are factor, weight decay, learning rate and momentum."""
    _, decay, rate, momentum = c
    if FORM.decays:
        g = tl.fma(p, decay, g)
    if FORM.n_state == 1:
        buffer = buffer * momentum + g
        if FORM.nesterov:
            g = tl.fma(buffer, momentum, g)
        else:
            g = buffer
    return tl.fma(g, -rate, p), buffer


@triton.jit
def _step_block(pointers, o, mask, c, key, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Step the elements at offsets `o` of a chunk: parameter, up to three tensors of state, remainder."""
    pp, gp, ap, bp, xp, rp = pointers
    # Every load before the first store: the compiler cannot infer that the lists do not overlap, so it would make each
    # load wait for the stores above it.
    g = load_block(gp, o, mask, FORM.acc, MASKED) * c[0]
    a, b, x = g, g, g
    if FORM.n_state > 0:
        a = load_block(ap, o, mask, FORM.acc, MASKED)
    if FORM.n_state > 1:
        b = load_block(bp, o, mask, FORM.acc, MASKED)
    p = load_block(pp, o, mask, FORM.acc, MASKED)
    if FORM.remainder:
        p = joined(p, load_block(rp, o, mask, tl.int32, MASKED))
    if FORM.n_state > 2:
        x = load_block(xp, o, mask, FORM.acc, MASKED)
    if FORM.adamw:
        p, a, b, x = _adamw(p, g, a, b, x, c, FORM)
    else:
        p, a = _sgd(p, g, a, c, FORM)
    if FORM.remainder:
        p, remainder = split(p)
        store_block(rp, o, remainder, mask, MASKED)
    if FORM.stochastic:
        word = random_word(key, o)
        if FORM.n_state > 1:
            b, x = rounded_for(bp, b, word, 0x291471E9), rounded_for(xp, x, word, 0x449ED6F5)
        p, a = rounded_for(pp, p, word, 1), rounded_for(ap, a, word, 0xADB4A92D)
    store_block(pp, o, p, mask, MASKED)
    if FORM.n_state > 0:
        store_block(ap, o, a, mask, MASKED)
    if FORM.n_state > 1:
        store_block(bp, o, b, mask, MASKED)
    if FORM.n_state > 2:
        store_block(xp, o, x, mask, MASKED)


@triton.jit
def _pointers(addresses, n, tensor, base, FORM: tl.constexpr):
    """Pointers to element `base` of a tensor in each elementwise list; the parameter's for lists that do not exist."""
    p = list_pointer(addresses, n, tensor, base, 0, FORM.param, FORM.aligned)
    g = list_pointer(addresses, n, tensor, base, 1, FORM.grad, FORM.aligned)
    a = list_pointer(addresses, n, tensor, base, 2 if FORM.n_state > 0 else 0, FORM.state, FORM.aligned)
    b = list_pointer(addresses, n, tensor, base, 3 if FORM.n_state > 1 else 0, FORM.state, FORM.aligned)
    x = list_pointer(addresses, n, tensor, base, 4 if FORM.n_state > 2 else 0, FORM.state, FORM.aligned)
    r = list_pointer(addresses, n, tensor, base, 2 + FORM.n_state if FORM.remainder else 0, tl.int16, FORM.aligned)
    return p, g, a, b, x, r


@jit_kernel
def step_kernel(
    addresses,
    numels,
    blocks,
    n_blocks,
    blocks_per_chunk,
    n_tensors,
    coefficients_ptr,
    lr: tl.float64,
    weight_decay: tl.float64,
    momentum: tl.float64,
    lr_ptr,
    multiplier_ptr,
    grad_scale_ptr,
    found_inf_ptr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    go = True
    if FORM.has_found_inf:
        go = tl.load(found_inf_ptr) == 0.0
    if go:
        if not FORM.adamw:
            one = tl.full((), 1.0, tl.float64)
            rate, factor = rate_and_factor(one, lr, lr_ptr, multiplier_ptr, grad_scale_ptr, FORM)
            decay, kept = one * weight_decay, one * momentum
            c = factor.to(FORM.acc), decay.to(FORM.acc), rate.to(FORM.acc), kept.to(FORM.acc)
        lanes = tl.arange(0, BLOCK)
        b = tl.program_id(0)
        chunk = tl.load(blocks + b)
        while b < n_blocks:
            if FORM.adamw and not FORM.aligned:
                chunk = tl.load(blocks + b)
            t, base, length = chunk_extent(numels, chunk, blocks_per_chunk, BLOCK)
            pointers = _pointers(addresses, n_tensors, t, base, FORM)
            if FORM.adamw:
                c = ()
                for number in tl.static_range(8):
                    c += (tl.load(coefficients_ptr + t * 8 + number),)
            key = ()
            if FORM.stochastic:
                key = number_and_key(addresses, n_tensors, t, base, 2 + FORM.n_state + FORM.remainder + FORM.adamw)
            # The next chunk's entry, ahead of the arithmetic: addresses wait for it, and elements for addresses.
            # AdamW over unaligned lists has no registers for it.
            if not FORM.adamw or FORM.aligned:
                chunk = tl.load(blocks + tl.minimum(b + tl.num_programs(0), n_blocks - 1))
            n_full = length // BLOCK
            i = 0
            while i < n_full:
                _step_block(pointers, i * BLOCK + lanes, None, c, key, FORM, False)
                i += 1
            if n_full * BLOCK < length:
                o = n_full * BLOCK + lanes
                _step_block(pointers, o, o < length, c, key, FORM, True)
            b += tl.num_programs(0)


def adamw_(lists: Mapping[str, Sequence[Tensor]], *, cache: StepCache | None, **options: Any) -> None:
    """Launch both kernels once per combination of dtypes; see the module's docstring, and `_step`."""
    _step(True, reference.adamw_, lists, cache, **options)


def sgd_(lists: Mapping[str, Sequence[Tensor]], *, cache: StepCache | None, **options: Any) -> None:
    """Launch `step_kernel` once per combination of dtypes; see the module's docstring, and `_step`."""
    _step(False, reference.sgd_, lists, cache, **options)


def _step(
    adamw: bool, fallback: Callable[..., None], lists: Mapping[str, Any], cache: StepCache | None, **options: Any
) -> None:
    """Take one optimizer step over parallel lists.

    Args:
        adamw: the rule.
        fallback: steps the rows that no kernel can address; takes lists and the options.
        lists: by name: parameters, gradients, state, then remainders; and `steps` and `streams`, of one element per
            parameter, which come last in the table and in the cache.
        cache: has tables of its own, and is filled if kernels can address all rows. None: the thread's tables.
        options: for `_launch`: the arguments of `adamw_` or `sgd_` from `lr` on.
    """
    per_parameter = [name for name in ("steps", "streams") if name in lists]
    elementwise = [name for name in lists if name not in per_parameter]
    flat, other, empty = flat_rows(*(lists[name] for name in elementwise))
    rest = [*other, *empty]
    if rest:
        cache = None
        fallback({name: pick(tensors, rest) for name, tensors in lists.items()}, **options)
        if not flat:
            return
    picked = {name: pick(lists[name], flat) for name in (*elementwise, *per_parameter)}
    n_state = sum(name in lists for name in _STATE)
    launches = []
    for parts, indices, aligned in groups(*(picked[name] for name in elementwise)):
        param, grad, state = (TRITON_DTYPES[parts[i][0].dtype] for i in (0, 1, 2 if n_state else 0))
        acc = accumulator(parts[0][0].dtype)
        rule = adamw, param, grad, state, acc, n_state, "remainders" in lists, "streams" in lists, aligned
        # All tables are made before the first launch, so no two launches may share one; alignment is in the key.
        columns = [*parts, *(pick(picked[name], indices) for name in per_parameter)]
        config = CONFIGS[adamw, 8 if acc is tl.float64 else 4]
        table = table_for(columns, config, aligned=aligned) if cache is None else step_table(columns, config)
        dtype = torch.float64 if acc is tl.float64 else torch.float32
        coefficients = torch.empty((table.n_tensors, N_COEFFICIENTS * adamw), dtype=dtype, device=table.device)
        rows = None if len(indices) == len(flat) else indices
        launches.append(Launch(_launch, table, coefficients, rule, rows, n_elementwise=len(parts)))
    for launch in launches:
        _launch(launch, **options)
    torch.autograd.graph.increment_version(picked["params"])
    if cache is not None:
        cache.fill(list(picked.values()), launches)


def _launch(
    rows: Launch,
    *,
    lr: float | Tensor,
    weight_decay: float = 0.0,
    beta1: float = 0.0,
    beta2: float = 0.0,
    eps: float = 0.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    multiplier: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Launch the kernels over these rows."""
    table, unused, lr_is_tensor = rows.table, rows.table.numels, isinstance(lr, Tensor)
    form = _form(
        *rows.constants,
        has_lr=lr_is_tensor,
        has_multiplier=multiplier is not None,
        has_grad_scale=grad_scale is not None,
        has_found_inf=found_inf is not None,
        maximize=maximize,
        nesterov=nesterov,
        decays=weight_decay != 0,
        from_end=rows.constants[0] and 1 - beta1 >= 0.5,
    )
    rate = 0.0 if lr_is_tensor else lr
    # In place of a scalar that is not on the device, a pointer that is not read.
    scalars = [unused if t is None else t for t in (lr if lr_is_tensor else None, multiplier, grad_scale, found_inf)]
    if form.adamw or form.stochastic:
        numbers = rate, weight_decay, beta1, beta2, eps
        with on_device(table.device):
            prepare_kernel[(triton.cdiv(table.n_tensors, _BLOCK),)](
                table.addresses,
                table.n_tensors,
                rows.coefficients,
                *numbers,
                *scalars,
                FORM=form,
                BLOCK=_BLOCK,
                **FOUR_WARPS,
            )
    numbers = rate, weight_decay, momentum
    table.launch(step_kernel, table.n_tensors, rows.coefficients, *numbers, *scalars, FORM=form)
