"""The public operations: each validates its arguments, chooses an implementation and calls it.

The contract of a function is its docstring here; the contracts of kernels are in the modules of `triton_ops`. The
tensors of a `FlatList` are not checked again. `ampkit` calls the same functions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import implementation, reference
from .float8_scaling import Quantized, Scaling
from .implementation import select
from .rounding import REMAINDER
from .step_cache import StepCache
from .tensor_lists import (
    FlatList,
    check_one_device,
    check_parallel,
    check_resolved,
    check_same_dtypes,
    check_scalar,
    resolved,
    strided_floats,
)


def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, *, impl: str = "auto") -> None:
    """Multiply gradients by `inv_scale` in place and set `found_inf` to 1.0 if a value is not finite.

    A value counts as non-finite if it is inf or NaN, or if the multiplication makes it inf, which requires an
    `inv_scale` above 1 (a loss scale below 1). The gradients are multiplied either way. Follows torch's operator
    `_amp_foreach_non_finite_check_and_unscale_`, and like it does not change version counters. Never synchronizes.
    Moves 8 bytes per float32 element.

    Args:
        grads: tensors of any shapes on one device: float32, float16, bfloat16, float64, complex (taken as real views)
            or sparse COO (their stored values); contiguous or not. Each stored element of an expanded tensor is
            multiplied once. May be empty.
        inv_scale: the factor: one float32 element on the gradients' device.
        found_inf: the flag: one float32 element on the gradients' device. Set to 1.0 or left as it is, never cleared.
        impl: which implementation computes; see `ampkit_kernels`.

    Raises:
        TypeError: tensors of other dtypes or layouts, and DTensors.
        ValueError: several devices, tensors whose elements overlap, or a scalar that is not one float32 element.

    >>> import torch
    >>> grads, found_inf = [torch.tensor([2.0, 4.0])], torch.zeros(())
    >>> unscale_(grads, torch.tensor(0.5), found_inf)
    >>> grads[0], found_inf
    (tensor([1., 2.]), tensor(0.))
    """
    grads = _checked(grads, "unscale_", inv_scale=inv_scale, found_inf=found_inf)
    _call("unscale_", impl, inv_scale.device, grads, inv_scale, found_inf)


def inverse_scale(scale: Tensor, *, impl: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """Return `1 / scale`, a flag of 0 for `found_inf`, and a copy of the scale, in one launch.

    The quotient is correctly rounded, so that it has the bits of torch.amp's. Never synchronizes.

    Args:
        scale: the loss scale: a 0-d float32 tensor.
        impl: which implementation computes; see `ampkit_kernels`.

    Returns:
        Three 0-d float32 tensors on the scale's device.

    >>> import torch
    >>> inverse_scale(torch.tensor(4.0))
    (tensor(0.2500), tensor(0.), tensor(4.))
    """
    return select(impl, scale.device).inverse_scale(scale)


def norm_and_check(
    grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, norm_type: float = 2.0, *, impl: str = "auto"
) -> Tensor:
    """Return the norm of all gradients times `inv_scale`, as of one vector, and set `found_inf` as `unscale_` would.

    Gradients are only read. A finite gradient whose powers overflow sets no flag. If powers of gradients times
    `inv_scale` overflow float32, the CPU path adds them up again in float64; other paths return inf. The same list on
    the same device gives the same bits every time, captured in a CUDA graph or not. Never synchronizes. Moves 4 bytes
    per float32 element; on a GPU without Triton 16, through float32 copies of 64 MiB or one gradient at a time.

    Args:
        grads, inv_scale, found_inf: as in `unscale_`. Every repetition in an expanded tensor counts.
        norm_type: the order of the norm. Triton computes 1, 2 and inf; PyTorch computes any other order.
        impl: which implementation computes; see `ampkit_kernels`.

    Returns:
        A 0-d tensor on the gradients' device: float64 if any gradient is float64 or complex128, otherwise float32.
        inf or NaN if a gradient holds one; 0 for an empty list.

    Raises:
        TypeError, ValueError: as `unscale_`.

    >>> import torch
    >>> norm_and_check([torch.tensor([3.0]), torch.tensor([4.0])], torch.tensor(1.0), torch.zeros(()))
    tensor(5.)
    """
    grads = _checked(grads, "norm_and_check", inv_scale=inv_scale, found_inf=found_inf)
    return _call("norm_and_check", impl, inv_scale.device, grads, inv_scale, found_inf, float(norm_type))


def norm_and_clip_factor(
    grads: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the norm as `norm_and_check` does, and the factor for `multiply_` or a step that unscales and clips.

    The factor is `inv_scale * min(1, max_norm / (norm + 1e-6))`, with the coefficient of
    `torch.nn.utils.clip_grads_with_norm_`. Never synchronizes. Moves the bytes of `norm_and_check`. Triton takes no
    launch more for the factor if `max_norm` is a number and all gradients are flat memory.

    Args:
        grads, inv_scale, found_inf, norm_type: as in `norm_and_check`.
        max_norm: the largest norm after clipping: a number, or one element on the gradients' device. inf: no clipping.
        impl: which implementation computes; see `ampkit_kernels`.

    Returns:
        The norm, and the factor: a 0-d tensor on the gradients' device, float32, or float64 like the norm if
        PyTorch computes it.

    Raises:
        TypeError, ValueError: as `unscale_`.

    >>> import torch
    >>> grads = [torch.tensor([3.0]), torch.tensor([4.0])]
    >>> norm_and_clip_factor(grads, torch.tensor(0.5), torch.zeros(()), 1.25)
    (tensor(2.5000), tensor(0.2500))
    """
    op = "norm_and_clip_factor"
    grads = _checked(grads, op, inv_scale=inv_scale, found_inf=found_inf)
    return _call(op, impl, inv_scale.device, grads, inv_scale, found_inf, max_norm, float(norm_type))


def multiply_(grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None, *, impl: str = "auto") -> None:
    """Multiply gradients in place by a factor on their device, unless it is 1 or `found_inf` is set.

    The device decides. inf and NaN are multiplied as any value; nothing is checked. Never synchronizes. Moves 8 bytes
    per float32 element, or none.

    Args:
        grads: tensors as `unscale_` takes them. May be empty.
        factor: one float32 element on the gradients' device, such as `inv_scale * clip_coefficient`. A float64 element
            is rounded to float32, except for float64 gradients if PyTorch computes.
        found_inf: one float32 element on the gradients' device, only read; other than 0, nothing is multiplied. None:
            always multiply.
        impl: which implementation computes; see `ampkit_kernels`.

    Raises:
        TypeError, ValueError: as `unscale_`.

    >>> import torch
    >>> grads = [torch.tensor([2.0])]
    >>> multiply_(grads, torch.tensor(0.25))
    >>> grads[0]
    tensor([0.5000])
    """
    grads = _checked(grads, "multiply_", factor=factor, found_inf=found_inf)
    _call("multiply_", impl, factor.device, grads, factor, found_inf)


def cast_(sources: Sequence[Tensor], destinations: Sequence[Tensor], *, impl: str = "auto") -> None:
    """Copy each source into its destination and convert its dtype: float32 masters to half copies, and back.

    Rounds to nearest, ties to even, float64 to 16 bits through float32 as PyTorch's copy does. inf and NaN are
    unchanged; numbers beyond the destination's range become inf. Never synchronizes. Moves 6 bytes per element from
    float32 to float16.

    Args:
        sources: tensors as `unscale_` takes them; only read. May be empty.
        destinations: as many tensors, of the same shapes, on the same device, of any such dtypes; overwritten.
        impl: which implementation computes; see `ampkit_kernels`.

    Raises:
        TypeError: as `unscale_`.
        ValueError: lengths, shapes or devices that differ, lazily negated or conjugated destinations.

    >>> import torch
    >>> half = torch.empty(2, dtype=torch.float16)
    >>> cast_([torch.tensor([1.0, 2.5])], [half])
    >>> half
    tensor([1.0000, 2.5000], dtype=torch.float16)
    """
    sources, destinations = _checked_pair("cast_", sources, destinations)
    if sources:
        _call("cast_", impl, sources[0].device, sources, destinations)


def unscale_into_(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    *,
    accumulate: bool = False,
    impl: str = "auto",
) -> None:
    """Write each source times `inv_scale` into its destination, or add it there, and set `found_inf` as in `unscale_`.

    Half gradients become unscaled float32 gradients of master weights. The product is taken in float32 (float64 if
    either tensor is float64) and rounded to the destination's dtype; a sum is rounded once more. Never synchronizes.
    Moves 6 bytes per float16 element, 10 with `accumulate`.

    Args:
        sources: tensors as `unscale_` takes them; only read. May be empty.
        destinations: as many tensors, of the same shapes, on the same device, of any such dtypes; overwritten. They
            share no memory with the sources.
        inv_scale, found_inf: as in `unscale_`; the products are checked, sums are not.
        accumulate: add the products to the destinations.
        impl: which implementation computes; see `ampkit_kernels`.

    Raises:
        TypeError, ValueError: as `cast_`; also a scalar that is not one float32 element.

    >>> import torch
    >>> gradient, found_inf = torch.zeros(2), torch.zeros(())
    >>> unscale_into_([torch.tensor([2.0, 4.0]).half()], [gradient], torch.tensor(0.5), found_inf)
    >>> gradient, found_inf
    (tensor([1., 2.]), tensor(0.))
    """
    op = "unscale_into_"
    sources, destinations = _checked_pair(op, sources, destinations)
    check_scalar("inv_scale", inv_scale, sources, op)
    check_scalar("found_inf", found_inf, sources, op)
    _call(op, impl, inv_scale.device, sources, destinations, inv_scale, found_inf, accumulate=accumulate)


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
    amsgrad: bool = False,
    maximize: bool = False,
    multiplier: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    remainders: Sequence[Tensor] | None = None,
    streams: Sequence[Tensor] | None = None,
    cache: StepCache | None = None,
    impl: str = "auto",
) -> None:
    """Take one AdamW step over lists of tensors, from gradients that may still be scaled.

    The operations and their order equal `torch.optim.AdamW(foreach=False)` (https://arxiv.org/abs/1711.05101).
    Arithmetic is float32 (float64 for float64 parameters), rounded once per stored value. inf and NaN in gradients are
    used unless `found_inf` is set. Never synchronizes. Moves 28 bytes per float32 element.

    Args:
        params: parameters as `unscale_` takes tensors, on one device; updated in place. May be empty.
        grads: one gradient per parameter, of its shape and any such dtype; only read.
        exp_avgs, exp_avg_sqs: one first and one second moment per parameter, of its shape and of one dtype, which may
            differ from the parameter's; updated in place.
        max_exp_avg_sqs: one maximum of the second moment per parameter, of its dtype; updated in place with `amsgrad`,
            otherwise not used.
        steps: one float32 element per parameter, counted up in place. For Triton on the parameters' device.
        lr: the learning rate: a number, or one element on the parameters' device.
        beta1, beta2: decay rates of the moments.
        eps: is added to the denominator.
        weight_decay: decoupled weight decay; each parameter shrinks by `lr * weight_decay` of itself.
        amsgrad: divide by the running maximum of the second moment.
        maximize: step up the gradient.
        multiplier, grad_scale: one float32 element each, by which gradients are multiplied, and divided, as they are
            read. None: 1.
        found_inf: one float32 element; other than 0, nothing at all is written. None: always step.
        remainders: one float16 tensor per bfloat16 parameter, updated in place; both together are one float32 number,
            which is stepped: see `ampkit_kernels.rounding`.
        streams: one int64 element per parameter, advanced in place, from which its bfloat16 values and moments are
            rounded at random: see `ampkit_kernels.rounding`. None: round to nearest.
        cache: keeps the launches of Triton for the next step over alike lists: one for each parameter group.
        impl: which implementation computes; see `ampkit_kernels`.

    Raises:
        TypeError: as `unscale_`; moments of several dtypes, remainders for parameters that are not bfloat16.
        ValueError: lengths, shapes or devices that differ, lazily negated or conjugated tensors other than gradients, a
            scalar that is not one float32 element, or streams that are not int64.

    >>> import torch
    >>> p, g, m, v, step = (torch.ones(1), torch.ones(1), torch.zeros(1), torch.zeros(1), torch.zeros(()))
    >>> adamw_([p], [g], [m], [v], [], [step], lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    >>> p, step
    (tensor([0.9000]), tensor(1.))
    """
    op = "adamw_"
    by_name = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    by_name |= {"max_exp_avg_sqs": max_exp_avg_sqs if amsgrad else None, "remainders": remainders}
    scalars = {"multiplier": multiplier, "grad_scale": grad_scale, "found_inf": found_inf}
    lists = _step_lists(op, by_name, streams, scalars)
    if len(steps) != len(params):
        raise ValueError(f"{op}: got {len(steps)} steps for {len(params)} params; expected one for each")
    for step in steps:
        check_scalar("an element of steps", step, [], op)
    if not params:
        return
    device = params[0].device
    if select(impl, device) is not reference:
        check_one_device([lists["params"][0], *steps], op)
    options = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    _call(op, impl, device, {**lists, "steps": steps}, cache=cache, **options, **scalars)


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    multiplier: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    remainders: Sequence[Tensor] | None = None,
    streams: Sequence[Tensor] | None = None,
    cache: StepCache | None = None,
    impl: str = "auto",
) -> None:
    """Take one SGD step over lists of tensors, from gradients that may still be scaled.

    The operations and their order equal `torch.optim.SGD(foreach=False)`, without dampening. Arithmetic, inf and
    NaN as in `adamw_`. Never synchronizes. Moves 20 bytes per float32 element with momentum, 12 without.

    Args:
        params, grads: as in `adamw_`.
        momentum_buffers: one buffer per parameter, of its shape and any float dtype, zeros before the first step;
            updated in place, or not used if `momentum` is 0.
        lr: the learning rate: a number, or one element on the parameters' device.
        momentum: decay rate of the momentum buffers; 0 for none.
        weight_decay: L2 penalty; this times the parameter is added to the gradient.
        nesterov: step by the gradient plus `momentum` times the new buffer.
        maximize, multiplier, grad_scale, found_inf, remainders, streams, cache: as in `adamw_`.
        impl: which implementation computes; see `ampkit_kernels`.

    Raises:
        TypeError, ValueError: as `adamw_`; also `nesterov` without momentum.

    >>> import torch
    >>> p, g = torch.ones(1), torch.full((1,), 4.0)
    >>> sgd_([p], [g], [], lr=0.1, multiplier=torch.tensor(0.5))
    >>> p
    tensor([0.8000])
    """
    op = "sgd_"
    by_name = {"params": params, "grads": grads, "momentum_buffers": momentum_buffers if momentum != 0 else None}
    scalars = {"multiplier": multiplier, "grad_scale": grad_scale, "found_inf": found_inf}
    lists = _step_lists(op, {**by_name, "remainders": remainders}, streams, scalars)
    if nesterov and momentum <= 0:
        raise ValueError(f"{op}: nesterov needs momentum > 0, got {momentum}")
    if not params:
        return
    options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov, "maximize": maximize}
    _call(op, impl, params[0].device, lists, cache=cache, **options, **scalars)


def quantize(
    x: Tensor, along_rows: Scaling | None, along_columns: Scaling | None, *, impl: str = "auto"
) -> tuple[Quantized | None, Quantized | None]:
    """Convert a matrix to FP8 along its rows, along its columns, or both.

    A scale is the largest FP8 number over the largest magnitude (at least 1e-12) of its group: the matrix, or a row of
    the converted matrix. No finite value is beyond FP8's range, and a group that holds an inf or NaN gets a NaN. Never
    synchronizes. Moves 6 bytes per 16-bit element for both forms, 3 for only rows.

    Args:
        x: [rows, columns]: float32, bfloat16 or float16, of any strides, not empty; only read. Tensors that are traced
            or distributed need `impl="reference"`.
        along_rows: how `x` is converted. None: it is not.
        along_columns: how `x.T` is converted; a rowwise scale belongs to a column of `x`. None: it is not.
        impl: which implementation computes; see `ampkit_kernels`.

    Returns:
        `x` and `x.T` in FP8, each None if it was not requested.

    Raises:
        ValueError: anything but such a matrix.

    >>> import torch
    >>> x = torch.tensor([[1.0, -2.0], [0.5, 0.0]])
    >>> rows, _ = quantize(x, Scaling(rowwise=True, dtype=torch.float8_e4m3fn, power_of_2=True), None)
    >>> rows.data.float() / rows.scale
    tensor([[ 1.0000, -2.0000],
            [ 0.5000,  0.0000]])
    """
    if x.dim() != 2 or x.numel() == 0 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"quantize takes a matrix of float32 or 16 bits, not empty; got {x.dtype} {tuple(x.shape)}")
    return _call("quantize", impl, x.device, x, along_rows, along_columns)


def _checked(grads: Sequence[Tensor], op: str, **scalars: Tensor | None) -> Sequence[Tensor]:
    """Return the gradients as strided real floats, after checks of their devices and of the scalars."""
    if type(grads) is not FlatList:
        grads = strided_floats(grads, op)
        check_one_device(grads, op)
    device = grads[0].device if grads else None
    for name, scalar in scalars.items():
        if scalar is None or (
            scalar.dtype is torch.float32 and scalar.numel() == 1 and (device is None or scalar.device == device)
        ):
            continue  # without a further call: a short list takes no longer than these checks
        check_scalar(name, scalar, grads, op, (torch.float32, torch.float64) if name == "factor" else (torch.float32,))
    return grads


def _call(op: str, impl: str, device: torch.device, *args: Any, **options: Any) -> Any:
    """Call the implementation's function of this name without autograd."""
    on_torch = impl == "auto" and device.type not in implementation.AUTO  # as most calls on a CPU
    function = getattr(reference if on_torch else select(impl, device), op)
    if not torch.is_grad_enabled():
        return function(*args, **options)
    with torch.no_grad():
        return function(*args, **options)


def _checked_pair(op: str, sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return both lists as strided real floats, after checks of their shapes and devices."""
    check_resolved(op, "destinations", destinations)
    lists = [strided_floats(resolved(sources), op), strided_floats(destinations, op)]
    check_parallel(op, sources=lists[0], destinations=lists[1])
    check_one_device([*lists[0], *lists[1]], op)
    return lists


def _step_lists(
    op: str, by_name: dict[str, Any], streams: Sequence[Tensor] | None, scalars: dict[str, Tensor | None]
) -> dict[str, Sequence[Tensor]]:
    """Return the lists that are not None as strided real floats, streams last, after checking lists and scalars."""
    plain: dict[str, Sequence[Tensor]] = {}
    for name, tensors in by_name.items():
        if tensors is None:
            continue
        if name == "grads":  # only read, so a copy may replace one
            tensors = resolved(tensors)
        check_resolved(op, name, tensors)
        plain[name] = strided_floats(tensors, op)
    check_parallel(op, **plain)
    if moments := {name: tensors for name, tensors in plain.items() if "exp_avg" in name}:
        check_same_dtypes(op, **moments)
    check_one_device([t for tensors in (*plain.values(), streams or ()) for t in tensors], op)
    for name, scalar in scalars.items():
        if scalar is not None:
            check_scalar(name, scalar, plain["params"], op)
    for i, (p, remainder) in enumerate(zip(plain["params"], plain.get("remainders", ()), strict=False)):
        if (p.dtype, remainder.dtype) != (torch.bfloat16, REMAINDER):
            found = f"params[{i}] is {p.dtype}, remainders[{i}] {remainder.dtype}"
            raise TypeError(f"{op}: {found}; expected bfloat16 and float16")
    if streams is not None:
        if len(streams) != len(plain["params"]) or any(s.dtype != torch.int64 or s.numel() != 1 for s in streams):
            expected = f"streams of one int64 element, one for each of {len(plain['params'])} params"
            raise ValueError(f"{op}: expected {expected}")
        plain["streams"] = streams
    return plain
