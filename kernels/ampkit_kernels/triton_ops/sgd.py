"""sgd_: one SGD step from gradients that may still be scaled. Two launches per combination of dtypes.

Contract, per tensor, with g = sign * gradient * multiplier / grad_scale + weight_decay * p:

    b <- momentum * b + (1 - dampening) * g, or g itself while the tensor's `started` flag is 0
    p <- p - lr * d, where d is b, or g + momentum * b under nesterov, or g without momentum

params, momentum_buffers: dense CUDA tensors with equal strides, any float dtypes; grads are only read;
copies (optional) receive the new p in their own dtype; started (optional): one float32 element each, set to 1 by a
step that is not skipped. Where found_inf is set nothing is written. While `started` is 0 the buffer's contents
do not matter, NaN included: it is overwritten. Arithmetic in float32 (float64 for float64 parameters), in
the order of `torch.optim.SGD(foreach=False)`, with a multiply-add fused where, and only where, its CPU
kernels fuse one. Does not synchronise.

`prepare_kernel` turns the hyperparameters into one row of coefficients per tensor and sets the flags;
`sgd_kernel` reads that row.

Bytes per element: 20 for float32 with momentum (12 read, 8 written), 12 without; 2 more with a half copy.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..configs import Config
from ..step_cache import StepCache
from .chunks import chunk_extent, list_pointer, load_block, store_block
from .launch import entry, flat_rows, pick
from .steps import Rows, fill, prepare, rows_of

CONFIGS = {
    8: Config(block=1024, chunk=32768),
    4: Config(block=2048, chunk=32768),
}  # by bytes of the arithmetic
N_COEFFICIENTS = 6


@entry
def prepare_kernel(coefficients_ptr, started_ptr, n, lr_ptr, lr: tl.float64, momentum: tl.float64,
                   dampening: tl.float64, weight_decay: tl.float64, multiplier_ptr, grad_scale_ptr,
                   found_inf_ptr, HAS_STARTED: tl.constexpr, HAS_LR: tl.constexpr,
                   HAS_MULTIPLIER: tl.constexpr, HAS_GRAD_SCALE: tl.constexpr, HAS_FOUND_INF: tl.constexpr,
                   MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < n
    go = True
    if HAS_FOUND_INF:
        go = tl.load(found_inf_ptr) == 0.0
    if go:
        one = tl.full((BLOCK,), 1.0, tl.float64)
        rate = one * lr
        if HAS_LR:
            rate = one * tl.load(lr_ptr).to(tl.float64)
        factor = one
        if HAS_MULTIPLIER:
            factor = factor * tl.load(multiplier_ptr).to(tl.float64)
        if HAS_GRAD_SCALE:
            inverse = (one / tl.load(grad_scale_ptr).to(tl.float64)).to(tl.float32)
            factor = factor * inverse.to(tl.float64)
        if MAXIMIZE:
            factor = -factor
        flag = one
        if HAS_STARTED:
            flag = tl.load(started_ptr + lanes, mask=mask, other=0.0).to(tl.float64)
            tl.store(started_ptr + lanes, one.to(tl.float32), mask=mask)
        row = coefficients_ptr + lanes * 6
        dtype = coefficients_ptr.dtype.element_ty
        tl.store(row, rate.to(dtype), mask=mask)
        tl.store(row + 1, (one * momentum).to(dtype), mask=mask)
        tl.store(row + 2, (1.0 - one * dampening).to(dtype), mask=mask)
        tl.store(row + 3, (one * weight_decay).to(dtype), mask=mask)
        tl.store(row + 4, factor.to(dtype), mask=mask)
        tl.store(row + 5, flag.to(dtype), mask=mask)


@triton.jit
def _sgd_block(pp, gp, bp, cp, o, mask, lr, momentum, weight, weight_decay, factor, started,
               ACC: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, COPY: tl.constexpr,
               DECAY: tl.constexpr, MASKED: tl.constexpr):
    # Every load before the first store, as in adamw.
    p = load_block(pp, o, mask, ACC, MASKED)
    g = load_block(gp, o, mask, ACC, MASKED) * factor
    if MOMENTUM:
        buffer = load_block(bp, o, mask, ACC, MASKED)
    if DECAY:
        g = tl.fma(p, weight_decay, g)
    if MOMENTUM:
        buffer = tl.where(started != 0.0, tl.fma(g, weight, buffer * momentum), g)
        if NESTEROV:
            g = tl.fma(buffer, momentum, g)
        else:
            g = buffer
    p = tl.fma(g, -lr, p)
    if MOMENTUM:
        store_block(bp, o, buffer, mask, MASKED)
    store_block(pp, o, p, mask, MASKED)
    if COPY:
        store_block(cp, o, p.to(pp.dtype.element_ty), mask, MASKED)


@entry
def sgd_kernel(addresses, numels, blocks, n_blocks, blocks_per_chunk, n_tensors, coefficients_ptr,
               found_inf_ptr, PARAM: tl.constexpr, GRAD: tl.constexpr, MOMENT: tl.constexpr,
               COPY_TO: tl.constexpr, ACC: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
               DECAY: tl.constexpr, COPY: tl.constexpr, HAS_FOUND_INF: tl.constexpr, ALIGNED: tl.constexpr,
               BLOCK: tl.constexpr):
    go = True
    if HAS_FOUND_INF:
        go = tl.load(found_inf_ptr) == 0.0
    if go:
        lanes = tl.arange(0, BLOCK)
        b = tl.program_id(0)
        while b < n_blocks:
            t, base, length = chunk_extent(numels, blocks, b, blocks_per_chunk, BLOCK)
            pp = list_pointer(addresses, n_tensors, t, base, 0, PARAM, ALIGNED)
            gp = list_pointer(addresses, n_tensors, t, base, 1, GRAD, ALIGNED)
            bp = pp
            if MOMENTUM:
                bp = list_pointer(addresses, n_tensors, t, base, 2, MOMENT, ALIGNED)
            cp = pp
            if COPY:
                cp = list_pointer(addresses, n_tensors, t, base, 2 + MOMENTUM, COPY_TO, ALIGNED)
            row = coefficients_ptr + t * 6
            lr, momentum, weight = tl.load(row), tl.load(row + 1), tl.load(row + 2)
            weight_decay, factor, started = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
            n_full = length // BLOCK
            i = 0
            while i < n_full:
                _sgd_block(pp, gp, bp, cp, i * BLOCK + lanes, None, lr, momentum, weight, weight_decay,
                           factor, started, ACC, MOMENTUM, NESTEROV, COPY, DECAY, False)
                i += 1
            if n_full * BLOCK < length:
                o = n_full * BLOCK + lanes
                _sgd_block(pp, gp, bp, cp, o, o < length, lr, momentum, weight, weight_decay, factor,
                           started, ACC, MOMENTUM, NESTEROV, COPY, DECAY, True)
            b += tl.num_programs(0)


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    momentum: float = 0.0,
    started: Sequence[Tensor] | None = None,
    copies: Sequence[Tensor] | None = None,
    cache: StepCache | None = None,
    config: Config | None = None,
    **options: Any,
) -> None:
    """Launch both kernels per combination of dtypes; see the module's docstring. `options` are those of `_launch`."""
    lists = [params, grads]
    lists += [momentum_buffers] if momentum != 0 else []
    lists += [] if copies is None else [copies]
    configs = CONFIGS if config is None else dict.fromkeys(CONFIGS, config)
    flat, other, empty = flat_rows(*lists)
    if other or empty:
        rest = [*other, *empty]
        reference.sgd_(
            pick(params, rest), pick(grads, rest), pick(momentum_buffers, rest) if momentum != 0 else (),
            momentum=momentum, started=None if started is None else pick(started, rest),
            copies=None if copies is None else pick(copies, rest), **options,
        )
        if not flat:
            return
    launch = partial(_launch, copy=copies is not None)
    cached = cache is not None and started is None and len(flat) == len(params)
    found = rows_of([pick(tensors, flat) for tensors in lists], (), configs, N_COEFFICIENTS, own_tables=cached)
    for rows in found:
        own = [] if started is None else [started[flat[i]] for i in rows.indices]
        flags = torch.stack(own) if own else None
        launch(rows, momentum=momentum, started=flags, **options)
        if flags is not None:
            torch._foreach_copy_(own, list(flags.unbind()))
    if cache is not None and cached:
        fill(cache, lists, (), found, launch)


def _launch(
    rows: Rows,
    *,
    copy: bool,
    lr: float | Tensor,
    momentum: float = 0.0,
    started: Tensor | None = None,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    multiplier: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    table, coefficients = rows.table, rows.coefficients
    prepare(
        prepare_kernel, table.device, table.n_tensors, coefficients, lr, multiplier, grad_scale, found_inf,
        started_ptr=coefficients if started is None else started, HAS_STARTED=started is not None,
        momentum=momentum, dampening=dampening, weight_decay=weight_decay, MAXIMIZE=maximize,
    )
    table.launch(
        sgd_kernel, table.n_tensors, coefficients, coefficients if found_inf is None else found_inf,
        MOMENTUM=momentum != 0, NESTEROV=nesterov, DECAY=weight_decay != 0, COPY=copy,
        HAS_FOUND_INF=found_inf is not None, **rows.constants, enable_fp_fusion=False,
    )
