"""Every operation of this package in plain PyTorch: the CPU path, and the reference for the Triton kernels.

Nothing here synchronizes. On the CPU, branches are taken on the host (values are read through NumPy, so that tests
that count `.item()` calls see none); on other devices the same decisions are made with tensor arithmetic. The functions
validate nothing and run without autograd: they take lists that `tensor_lists.strided_floats` returned; `adamw_` and
`sgd_` take the lists that the step has in a dictionary, under the names of the public functions' arguments.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from . import rounding
from .float8_scaling import quantize as quantize
from .tensor_lists import FlatList, by_dtype, written_in_place

INF = math.inf
COPIED = 1 << 24  # gradient elements that a norm copies at a time: 64 MiB
PIECE = 1 << 20  # elements that an optimizer's step works on at a time; it needs up to 100 bytes for each
_DTYPE = attrgetter("dtype")


def is_on_host(scalar: Tensor) -> bool:
    """Whether `host_value` can read the scalar: it is on the CPU, and no FakeTensor, which holds no number."""
    return scalar.is_cpu and type(scalar) is Tensor


def host_value(scalar: Tensor) -> float:
    """Return the number in a one-element CPU tensor, read from memory: no dispatch, nothing to wait for."""
    return scalar.numpy().item()


def largest_magnitudes(tensors: Sequence[Tensor]) -> Tensor:
    """Return max |x| of each nonempty tensor, as a vector: float64 if a tensor is, or float32; NaN wins, then inf."""
    filled = [t for t in tensors if t.numel()]
    dtype = torch.float64 if torch.float64 in set(map(_DTYPE, filled)) else torch.float32  # Metal has no fp64
    if not filled:
        return torch.zeros(1, dtype=dtype, device=tensors[0].device if tensors else "cpu")
    if filled[0].device.type == "cpu":  # where an infinity norm takes twenty times as long as aminmax
        return torch.stack([torch.stack(torch.aminmax(t)).abs().amax().to(dtype) for t in filled])
    return torch.cat([torch.stack(torch._foreach_norm(group, INF)).to(dtype) for group in by_dtype(filled)])


def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Multiply in place and flag non-finite values; see `ampkit_kernels.unscale_`."""
    if not grads:
        return
    if type(grads) is not FlatList:
        grads = written_in_place(grads, "unscale_")
    if is_on_host(inv_scale):
        # torch's CPU operator takes mixed dtypes in one call. Only a factor above 1 can turn a finite value into inf.
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        if host_value(inv_scale) <= 1.0:
            return
    else:
        for group in by_dtype(grads):
            if group[0].is_cuda and group[0].dtype is torch.bfloat16:  # which torch's CUDA operator refuses
                for g in group:
                    g.mul_(inv_scale)
            else:
                torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, inv_scale)
    _set_unless(torch.isfinite(largest_magnitudes(grads)).all(), found_inf)


def _set_unless(finite: Tensor, found_inf: Tensor) -> None:
    found_inf.copy_(torch.where(finite, found_inf, 1.0))


def inverse_scale(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """1 / scale, a flag of 0, and a copy of the scale; see `ampkit_kernels.inverse_scale`.

    The float32 quotient has the bits of torch.amp's float64 reciprocal rounded to float32: rounding twice is innocuous
    where the wider format has at least 2 * 24 + 2 bits (Figueroa 1995), and float64 has 53.
    """
    inverse = scale.reciprocal()
    return inverse, torch.zeros_like(inverse), scale.clone()


def norm_and_check(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, norm_type: float = 2.0) -> Tensor:
    """Norm of grads * inv_scale without writing them; see `ampkit_kernels.norm_and_check`.

    A finite norm of any order above 0 proves that every element was finite, so on the host elements are checked only
    where the norm is not finite.
    """
    out_dtype = torch.float64 if torch.float64 in set(map(_DTYPE, grads)) else torch.float32
    filled: Sequence[Tensor] = list(filter(Tensor.numel, grads))
    if not filled:
        return torch.zeros((), dtype=out_dtype, device=inv_scale.device)
    if 0 < norm_type < INF:
        # torch.nn.utils.clip_grad_norm_ adds a zero for each empty gradient, which changes the order of summation.
        filled = grads
    on_host, has_powers = is_on_host(inv_scale), norm_type not in (0.0, INF)
    if not on_host:
        _set_unless(_unscaled_is_finite(filled, inv_scale), found_inf)
        if has_powers:  # powers of scaled elements may overflow or vanish, which nothing here can see
            return _total_unscaled(filled, inv_scale, norm_type, out_dtype)
    factor = (inv_scale if inv_scale.ndim == 0 else inv_scale.reshape(())) if norm_type != 0 else 1.0
    norm = _total(filled, norm_type, out_dtype) * factor
    if not on_host:
        return norm
    inv = host_value(inv_scale)
    if norm_type > 0 and inv <= 1.0 and math.isfinite(host_value(norm)):
        return norm
    if not host_value(_unscaled_is_finite(filled, inv_scale)):
        found_inf.fill_(1.0)
    elif has_powers and (inv > 1.0 or not math.isfinite(host_value(norm))):
        # Finite elements whose powers float32 may not hold. It mostly holds powers of unscaled elements, which give the
        # bits of unscaling first; otherwise the norm is computed in float64.
        norm = _total_unscaled(filled, inv_scale, norm_type, out_dtype)
        if not math.isfinite(host_value(norm)):
            norm = (_total(filled, norm_type, torch.float64) * factor).to(out_dtype)
    return norm


def norm_and_clip_factor(
    grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, max_norm: float | Tensor, norm_type: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Return the norm, and the factor that unscales and clips; see `ampkit_kernels.norm_and_clip_factor`."""
    norm = norm_and_check(grads, inv_scale, found_inf, norm_type)
    return norm, clip_factor(norm, inv_scale, max_norm)


def clip_factor(norm: Tensor, inv_scale: Tensor, max_norm: float | Tensor) -> Tensor:
    """`inv_scale` times the coefficient of `torch.nn.utils.clip_grads_with_norm_`."""
    if isinstance(max_norm, float) and max_norm == INF:  # inf / inf would be NaN
        return inv_scale
    return inv_scale * torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _total(grads: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """Norm of the norms, each accumulated and returned in `dtype`."""
    norms: list[Tensor] = []
    for group in by_dtype(grads):
        norms += torch._foreach_norm(group, norm_type, dtype=dtype)
    if norm_type == 0:
        return torch.stack(norms).sum()
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _total_unscaled(grads: Sequence[Tensor], inv_scale: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    """`_total` of multiplied copies, 16-bit gradients in float32; a few tensors at a time."""
    factor = inv_scale.reshape(())
    norms: list[Tensor] = []
    for group in by_dtype(grads):
        is_half = group[0].dtype.itemsize == 2
        for part in _parts(group):
            # A 0-d factor would give 16-bit products.
            products = [g * factor[None] for g in part] if is_half else torch._foreach_mul(part, factor)
            norms += torch._foreach_norm(products, norm_type, dtype=dtype)
            del products  # before the next copies are made
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _parts(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, at most `COPIED` elements at a time, or one tensor that has more."""
    part: list[Tensor] = []
    n = 0
    for t in tensors:
        n += t.numel()
        if part and n > COPIED:
            yield part
            part, n = [], t.numel()
        part.append(t)
    yield part


def _unscaled_is_finite(grads: Sequence[Tensor], inv_scale: Tensor) -> Tensor:
    """Return whether every element is finite, and finite in its own dtype when it is multiplied by `inv_scale`."""
    finite = torch.ones((), dtype=torch.bool, device=inv_scale.device)
    for group in by_dtype(grads):
        # Rounding keeps order, so the largest magnitude is the first to overflow.
        largest = largest_magnitudes(group)
        unscaled = (largest * inv_scale).to(group[0].dtype)
        finite &= (torch.isfinite(largest) & torch.isfinite(unscaled)).all()
    return finite


def multiply_(grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None) -> None:
    """Multiply in place unless the factor is 1 or found_inf is set; see `ampkit_kernels.multiply_`."""
    if factor.dtype is torch.float64:
        multiply_([g for g in grads if g.dtype is not torch.float64], factor.float(), found_inf)
        grads = [g for g in grads if g.dtype is torch.float64]
    if not grads:
        return
    if type(grads) is not FlatList:
        grads = written_in_place(grads, "multiply_")
    if is_on_host(factor):
        if host_value(factor) == 1.0 or (found_inf is not None and host_value(found_inf) != 0.0):
            return
        # A tensor as the factor: with a number torch takes several times as long, for the same bits.
        torch._foreach_mul_(grads, factor.reshape(()))
        return
    if found_inf is not None:
        factor = torch.where(found_inf.reshape(()) != 0, 1.0, factor.reshape(()))
    for group in by_dtype(grads):
        torch._foreach_mul_(group, factor.reshape(()))


def cast_(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Copy with conversion; see `ampkit_kernels.cast_`. Grouped by dtype pair, for torch's fast path."""
    pairs: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for source, destination in zip(sources, destinations, strict=True):
        group = pairs.setdefault((source.dtype, destination.dtype), ([], []))
        group[0].append(source)
        group[1].append(destination)
    for group_sources, group_destinations in pairs.values():
        torch._foreach_copy_(group_destinations, group_sources)


def unscale_into_(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    *,
    accumulate: bool = False,
) -> None:
    """Multiply into other tensors and flag non-finite values; see `ampkit_kernels.unscale_into_`."""
    if not sources:
        return
    wide = [torch.promote_types(s.dtype, d.dtype) for s, d in zip(sources, destinations, strict=True)]
    same = all(d.dtype is dtype for d, dtype in zip(destinations, wide, strict=True))
    products = list(destinations)
    if accumulate or not same:
        products = [torch.empty_like(d, dtype=dtype) for d, dtype in zip(destinations, wide, strict=True)]
    cast_(sources, products)
    unscale_(products, inv_scale, found_inf)
    if not same:
        rounded = [torch.empty_like(d) for d in destinations]
        cast_(products, rounded)
        _set_unless(torch.isfinite(largest_magnitudes(rounded)).all(), found_inf)
        products = rounded
    if accumulate:
        torch._foreach_add_(list(destinations), products)
    elif not same:
        cast_(products, destinations)


def adamw_(
    lists: Mapping[str, Sequence[Tensor]],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    **scalars: Any,
) -> None:
    """Take one AdamW step, rounded once per stored value; see `ampkit_kernels.adamw_`, and `rounding`.

    The operations and their order equal `torch.optim.AdamW(foreach=False)`, so that float32 and float64 results
    are equal to torch's bit for bit on the CPU. `scalars`: as for `_pieces`.
    """
    for row, numbers, is_last, skip in _pieces(lists, **scalars):
        p, m, v, step = row["params"], row["exp_avgs"], row["exp_avg_sqs"], row["steps"]
        acc = torch.float64 if p.dtype is torch.float64 else torch.float32
        count, rate = _count_and_rate(step, lr)
        step_size = _scalar(rate / (1 - beta1**count), p, acc)
        correction = _scalar((1 - beta2**count) ** 0.5, p, acc)
        g, new_p = _incoming(row["grads"], acc, **scalars), _weight(row, acc)
        if weight_decay != 0:
            new_p = new_p * _scalar(1 - rate * weight_decay, p, acc)
        new_m = torch.lerp(m.to(acc), g, 1 - beta1)
        new_v = torch.addcmul(v.to(acc) * beta2, g, g, value=1 - beta2)
        second, state = new_v, [(m, new_m), (v, new_v)]
        if "max_exp_avg_sqs" in row:
            largest = row["max_exp_avg_sqs"]
            second = torch.maximum(largest.to(acc), new_v)
            state.append((largest, second))
        new_p = new_p - step_size * new_m / (second.sqrt() / correction + eps)
        _store([(p, new_p), *state], [(step, step + 1)] if is_last else [], skip, row, numbers, is_last)


def sgd_(
    lists: Mapping[str, Sequence[Tensor]],
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    **scalars: Any,
) -> None:
    """Take one SGD step, rounded once per stored value; see `ampkit_kernels.sgd_`, and `rounding`.

    The operations and their order equal `torch.optim.SGD(foreach=False)`. `scalars`: as for `_pieces`.
    """
    for row, numbers, is_last, skip in _pieces(lists, **scalars):
        p = row["params"]
        acc = torch.float64 if p.dtype is torch.float64 else torch.float32
        g, old_p = _incoming(row["grads"], acc, **scalars), _weight(row, acc)
        if weight_decay != 0:
            g = torch.add(g, old_p, alpha=weight_decay)
        state = []
        if momentum != 0:
            buffer = row["momentum_buffers"]
            new_buffer = buffer.to(acc) * momentum + g
            state.append((buffer, new_buffer))
            g = torch.add(g, new_buffer, alpha=momentum) if nesterov else new_buffer
        if isinstance(lr, Tensor):
            new_p = old_p - lr.to(p.device, acc) * g
        else:
            new_p = torch.add(old_p, g, alpha=-lr)
        _store([(p, new_p), *state], [], skip, row, numbers, is_last)


def _pieces(
    lists: Mapping[str, Sequence[Tensor]], *, found_inf: Tensor | None = None, **_: Any
) -> Iterator[tuple[dict[str, Tensor], Tensor | None, bool, Tensor | None]]:
    """Yield the tensors of each parameter by the name of their list; large parameters in pieces.

    Each piece comes with the numbers of its elements, for random bits (None for a whole parameter), with whether it is
    the parameter's last, and with the flag on a device by which it is skipped (None: no such flag). Pieces are ranges
    of memory, or if the tensors' strides differ, ranges of the longest dimension. Nothing is yielded for a flag on the
    host that is set.
    """
    skip = None
    if found_inf is not None:
        if not is_on_host(found_inf):
            skip = found_inf.reshape(()) != 0
        elif host_value(found_inf) != 0.0:
            return
    for tensors in zip(*lists.values(), strict=True):
        row = dict(zip(lists, tensors, strict=True))
        p = row["params"]
        if p.numel() <= PIECE:
            yield row, None, True, skip
            continue
        single_elements = {name: row.pop(name) for name in ("steps", "streams") if name in row}
        strides = rounding.dense_strides(p)
        if set(map(Tensor.stride, row.values())) == {strides}:
            row = {name: t.as_strided((t.numel(),), (1,)) for name, t in row.items()}
            dim, size, most, strides = 0, p.numel(), PIECE, (1,)
        else:
            dim = max(range(p.dim()), key=p.size)
            size, most = p.size(dim), max(1, PIECE * p.size(dim) // p.numel())
        for first in range(0, size, most):
            length = min(most, size - first)
            piece = {name: t.narrow(dim, first, length) for name, t in row.items()} | single_elements
            numbers = None
            if "streams" in piece:
                numbers = rounding.element_numbers(piece["params"], strides, first * strides[dim])
            yield piece, numbers, first + length == size, skip


def _count_and_rate(step: Tensor, lr: float | Tensor) -> tuple[float | Tensor, float | Tensor]:
    """Return this step's count and the learning rate: numbers if the host can read both, or float64 tensors.

    A rate that is a number remains one.
    """
    rate = lr.detach() if isinstance(lr, Tensor) else lr
    if is_on_host(step) and (not isinstance(rate, Tensor) or is_on_host(rate)):
        return host_value(step) + 1, host_value(rate) if isinstance(rate, Tensor) else rate
    return step.double() + 1, lr.to(step.device, torch.float64) if isinstance(lr, Tensor) else lr


def _scalar(value: float | Tensor, like: Tensor, dtype: torch.dtype) -> Tensor | float:
    return value.to(like.device, dtype) if isinstance(value, Tensor) else value


def _incoming(
    grad: Tensor,
    acc: torch.dtype,
    *,
    maximize: bool = False,
    multiplier: Tensor | None = None,
    grad_scale: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return the gradient that the update uses: widened, multiplied, divided, negated."""
    g = grad.to(acc)
    if multiplier is not None:
        g = g * multiplier.to(g.device, acc)
    if grad_scale is not None:
        g = g * grad_scale.double().reciprocal().float().to(g.device, acc)
    return -g if maximize else g


def _weight(row: dict[str, Tensor], acc: torch.dtype) -> Tensor:
    return rounding.joined(row["params"], row["remainders"]) if "remainders" in row else row["params"].to(acc)


def _store(
    values: list[tuple[Tensor, Tensor]],
    exact: list[tuple[Tensor, Tensor]],
    skip: Tensor | None,
    row: dict[str, Tensor],
    numbers: Tensor | None,
    is_last: bool,
) -> None:
    """Write new values, or the old values again if a device flag is set.

    Args:
        values: old and new parameter, then old and new state; without a remainder, bfloat16 values are rounded by the
            stream, if there is one.
        exact: old and new counts.
        skip, row, numbers, is_last: of an item of `_pieces`.
    """
    p, new_p = values[0]
    if "remainders" in row:
        new_p, remainder = rounding.split(new_p)
        exact.append((row["remainders"].view(torch.int16), remainder.view(torch.int16)))
        values[0] = (p, new_p)
    if "streams" in row:
        advanced = row["streams"] + rounding.STEP
        if is_last:
            exact.append((row["streams"], advanced))
        values = [
            (old, rounding.rounded(new.float(), bits) if old.dtype is torch.bfloat16 else new)
            for (old, new), bits in zip(values, rounding.random_bits(advanced, p, numbers), strict=False)
        ]
    for old, new in (*values, *exact):
        old.copy_(new if skip is None else torch.where(skip, old, new.to(old.dtype)))
