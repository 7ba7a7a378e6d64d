"""The public operations: validate, choose an implementation, call it.

Each function's contract is written here; the kernels' own are in the modules of `triton_ops`. A `FlatList` goes to the
kernels unchecked, and so do the scalars beside it, which must be as documented.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from . import reference
from .dispatch import select
from .float8_scaling import Quantized, Scaling
from .rounding import REMAINDER
from .step_cache import StepCache
from .tensors import (
    check_one_device,
    check_parallel,
    check_resolved,
    check_same_dtypes,
    check_scalar,
    resolved,
    strided_floats,
)


@torch.no_grad()
def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, *, impl: str = "auto") -> None:
    """Multiply gradients by `inv_scale` in place and set `found_inf` to 1.0 where a value is not finite.

    A value counts as non-finite when it comes in as inf or NaN, or when the multiplication makes it so
    (possible only for `inv_scale` above 1, a loss scale below 1). `found_inf` is never cleared. Gradients
    may be float32, float16, bfloat16, float64, complex (as their real views) or sparse COO (their stored
    values), contiguous or not; expanded ones are multiplied once. `inv_scale` and `found_inf` are one
    float32 element each, on the gradients' device. Never synchronises. Moves 8 bytes per float32 element.

    Follows torch's `_amp_foreach_non_finite_check_and_unscale_`.

    Raises:
        TypeError: integer tensors and DTensors.
        ValueError: mixed devices, or tensors whose elements overlap.

    >>> import torch
    >>> grads, found_inf = [torch.tensor([2.0, 4.0])], torch.zeros(())
    >>> unscale_(grads, torch.tensor(0.5), found_inf)
    >>> grads[0], found_inf
    (tensor([1., 2.]), tensor(0.))
    """
    grads = _prepared(grads, "unscale_", inv_scale=inv_scale, found_inf=found_inf)
    select(impl, inv_scale.device).unscale_(grads, inv_scale, found_inf)


@torch.no_grad()
def norm_and_check(
    grads: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    norm_type: float = 2.0,
    *,
    impl: str = "auto",
) -> Tensor:
    """The norm of all gradients times `inv_scale`, as one vector; gradients are only read.

    Returns a 0-d tensor on the gradients' device: float64 when any gradient is float64 or complex128, else
    float32. `found_inf` is set to 1.0 exactly as `unscale_` would set it: a finite gradient whose squares
    overflow sets nothing. Where those of gradients times `inv_scale` overflow float32 the CPU path adds
    them up again in float64, others return inf. The same list on the same device gives the same bits every
    time, captured in a CUDA graph or not. An empty list has norm 0. Triton computes orders 1, 2 and inf,
    PyTorch any. Never synchronises. Moves 4 bytes per float32 element; on a GPU without Triton 16, by way of
    copies in float32, 64 MiB or one gradient at a time.

    >>> import torch
    >>> norm_and_check([torch.tensor([3.0]), torch.tensor([4.0])], torch.tensor(1.0), torch.zeros(()))
    tensor(5.)
    """
    grads = _prepared(grads, "norm_and_check", inv_scale=inv_scale, found_inf=found_inf)
    return select(impl, inv_scale.device).norm_and_check(grads, inv_scale, found_inf, float(norm_type))


@torch.no_grad()
def multiply_(
    grads: Sequence[Tensor], factor: Tensor, found_inf: Tensor | None = None, *, impl: str = "auto"
) -> None:
    """Multiply gradients by a factor that lives on their device; leave them alone where it is 1 or
    `found_inf` is set.

    The decision is taken on the device. `factor` is one float32 element, as `inv_scale * clip_coefficient`
    is. Tensors as in `unscale_`. Never synchronises. Moves 8 bytes per float32 element, or none.

    >>> import torch
    >>> grads = [torch.tensor([2.0])]
    >>> multiply_(grads, torch.tensor(0.25))
    >>> grads[0]
    tensor([0.5000])
    """
    scalars = {"factor": factor} if found_inf is None else {"factor": factor, "found_inf": found_inf}
    grads = _prepared(grads, "multiply_", **scalars)
    select(impl, factor.device).multiply_(grads, factor, found_inf)


@torch.no_grad()
def cast_(sources: Sequence[Tensor], destinations: Sequence[Tensor], *, impl: str = "auto") -> None:
    """Copy each source into its destination, converting dtype: float32 masters to half copies, and back.

    Any pair of float dtypes, rounded to nearest even. Never synchronises. Moves 6 bytes per float32-to-half
    element.

    Raises:
        ValueError: lengths, shapes or devices that differ.

    >>> import torch
    >>> half = torch.empty(2, dtype=torch.float16)
    >>> cast_([torch.tensor([1.0, 2.5])], [half])
    >>> half
    tensor([1.0000, 2.5000], dtype=torch.float16)
    """
    sources, destinations = strided_floats(resolved(sources), "cast_"), strided_floats(destinations, "cast_")
    check_parallel("cast_", sources=sources, destinations=destinations)
    check_one_device([*sources, *destinations], "cast_")
    if sources:
        select(impl, sources[0].device).cast_(sources, destinations)


@torch.no_grad()
def unscale_into_(
    sources: Sequence[Tensor],
    destinations: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    *,
    accumulate: bool = False,
    impl: str = "auto",
) -> None:
    """Write each source times `inv_scale` into its destination, or add it with `accumulate`; check on the way.

    Half gradients become unscaled float32 gradients of master weights. Any pair of float dtypes; the product
    is taken in float32 (float64 if either tensor is float64) and rounded to the destination's dtype; a sum is
    rounded once more. `found_inf` is set to 1.0 where a product is not finite, and never cleared. Sources
    are only read, and share no memory with destinations. Never synchronises. Moves 6 bytes per float16
    element, 10 with `accumulate`.

    Raises:
        ValueError: lengths, shapes or devices that differ.

    >>> import torch
    >>> gradient, found_inf = torch.zeros(2), torch.zeros(())
    >>> unscale_into_([torch.tensor([2.0, 4.0]).half()], [gradient], torch.tensor(0.5), found_inf)
    >>> gradient, found_inf
    (tensor([1., 2.]), tensor(0.))
    """
    op = "unscale_into_"
    sources, destinations = strided_floats(resolved(sources), op), strided_floats(destinations, op)
    check_parallel(op, sources=sources, destinations=destinations)
    check_one_device([*sources, *destinations], op)
    for name, value in (("inv_scale", inv_scale), ("found_inf", found_inf)):
        check_scalar(name, value, sources, op)
    select(impl, inv_scale.device).unscale_into_(sources, destinations, inv_scale, found_inf, accumulate=accumulate)


@torch.no_grad()
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
    copies: Sequence[Tensor] | None = None,
    remainders: Sequence[Tensor] | None = None,
    streams: Sequence[Tensor] | None = None,
    cache: StepCache | None = None,
    impl: str = "auto",
) -> None:
    """One AdamW step over lists of tensors, from gradients that may still be scaled; gradients are only read.

    Each gradient is multiplied by `multiplier` (say, `inv_scale * clip_coefficient`) and divided by `grad_scale` as it
    is read; either may be None. Where `found_inf` is set nothing changes. `steps` are one float32 element per
    parameter, counted up in place. `max_exp_avg_sqs` is read and written with `amsgrad` only, and may be empty
    otherwise. `copies` receive the new parameters in their own dtype (float16 or bfloat16 weights for the next
    forward). `lr` may be a one-element tensor on the device. `cache` keeps what kernels need for the next step.
    Arithmetic is float32 (float64 for float64 parameters), rounded once per stored value. Never synchronises. Moves 28
    bytes per float32 element, 2 more with a half copy.

    Moments may have another dtype than parameters, one for all of a parameter. With `streams`, one int64 element each,
    bfloat16 parameters and moments are rounded at random; with `remainders`, held as float16 beside bfloat16 parameters
    and in place of `copies`, both together are one float32 number, which is stepped: see `ampkit_kernels.rounding`.
    Loshchilov and Hutter, "Decoupled Weight Decay Regularization"; operations in the order of `torch.optim.AdamW`.

    >>> import torch
    >>> p, g, m, v, step = (torch.ones(1), torch.ones(1), torch.zeros(1), torch.zeros(1), torch.zeros(()))
    >>> adamw_([p], [g], [m], [v], [], [step], lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    >>> p, step
    (tensor([0.9000]), tensor(1.))
    """
    op = "adamw_"
    given = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    given |= {"max_exp_avg_sqs": max_exp_avg_sqs if amsgrad else None, "copies": copies, "remainders": remainders}
    lists = _step_lists(op, given, streams, multiplier, grad_scale, found_inf)
    if len(steps) != len(params):
        raise ValueError(f"{op}: got {len(steps)} steps for {len(params)} params; expected one for each")
    for value in steps:
        check_scalar("an element of steps", value, [], op)
    ops = select(impl, params[0].device) if params else reference
    if ops is not reference:
        check_one_device([lists["params"][0], *steps], op)
    ops.adamw_(
        {**lists, "steps": steps}, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
        maximize=maximize, multiplier=multiplier, grad_scale=grad_scale, found_inf=found_inf, cache=cache,
    )


@torch.no_grad()
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
    copies: Sequence[Tensor] | None = None,
    remainders: Sequence[Tensor] | None = None,
    streams: Sequence[Tensor] | None = None,
    cache: StepCache | None = None,
    impl: str = "auto",
) -> None:
    """One SGD step over lists of tensors, from gradients that may still be scaled; gradients are only read.

    `momentum_buffers` may be empty when `momentum` is 0; one that has not begun holds zeros. `multiplier`,
    `grad_scale`, `found_inf`, `copies`, `remainders`, `streams`, `lr` and `cache` as in `adamw_`. Never synchronises.
    Moves 20 bytes per float32 element with momentum, 12 without.

    >>> import torch
    >>> p, g = torch.ones(1), torch.full((1,), 4.0)
    >>> sgd_([p], [g], [], lr=0.1, multiplier=torch.tensor(0.5))
    >>> p
    tensor([0.8000])
    """
    op = "sgd_"
    given = {"params": params, "grads": grads, "momentum_buffers": momentum_buffers if momentum != 0 else None}
    given |= {"copies": copies, "remainders": remainders}
    lists = _step_lists(op, given, streams, multiplier, grad_scale, found_inf)
    if nesterov and momentum <= 0:
        raise ValueError(f"{op}: nesterov needs momentum > 0, got {momentum}")
    ops = select(impl, params[0].device) if params else reference
    ops.sgd_(
        lists, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, maximize=maximize,
        multiplier=multiplier, grad_scale=grad_scale, found_inf=found_inf, cache=cache,
    )


@torch.no_grad()
def quantize(
    x: Tensor, along_rows: Scaling | None, along_columns: Scaling | None, *, impl: str = "auto"
) -> tuple[Quantized | None, Quantized | None]:
    """`x` in FP8, and `x.T` in FP8, each by a scaling of its own; None for one that is not asked for.

    x: a matrix of float32, bfloat16 or float16, of any strides, not empty. A rowwise scale is one for each row of `x`,
    or of `x.T`. No finite value is beyond FP8's range, and a group with an inf or a NaN has a NaN. Tensors that are
    traced or distributed need "reference". Never synchronises. Moves 6 bytes per 16-bit element for both forms, 3 for
    rows alone.

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
    return select(impl, x.device).quantize(x, along_rows, along_columns)


def _prepared(grads: Sequence[Tensor], op: str, **scalars: Tensor) -> list[Tensor]:
    """The list as strided real floats, after checking its devices and the scalars."""
    grads = strided_floats(grads, op)
    check_one_device(grads, op)
    for name, value in scalars.items():
        check_scalar(name, value, grads, op)
    return grads


def _step_lists(
    op: str,
    given: Mapping[str, Sequence[Tensor] | None],
    streams: Sequence[Tensor] | None,
    multiplier: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> dict[str, Sequence[Tensor]]:
    """The lists that are not None as strided real floats, streams last, checked with each other and the scalars."""
    plain: dict[str, Sequence[Tensor]] = {}
    for name, tensors in given.items():
        if tensors is None:
            continue
        if name == "grads":     # only read, so a copy may stand for them
            tensors = resolved(tensors)
        check_resolved(op, name, tensors)
        plain[name] = strided_floats(tensors, op)
    check_parallel(op, **plain)
    if moments := {name: tensors for name, tensors in plain.items() if "exp_avg" in name}:
        check_same_dtypes(op, **moments)
    check_one_device([t for tensors in (*plain.values(), streams or ()) for t in tensors], op)
    for name, value in (("multiplier", multiplier), ("grad_scale", grad_scale), ("found_inf", found_inf)):
        if value is not None:
            check_scalar(name, value, plain["params"], op)
    if "copies" in plain and "remainders" in plain:
        raise ValueError(f"{op}: got both copies and remainders; expected one of them")
    for i, (p, remainder) in enumerate(zip(plain["params"], plain.get("remainders", ()), strict=False)):
        if (p.dtype, remainder.dtype) != (torch.bfloat16, REMAINDER):
            raise TypeError(
                f"{op}: params[{i}] is {p.dtype}, remainders[{i}] {remainder.dtype}; expected bfloat16 and float16"
            )
    if streams is not None:
        if len(streams) != len(plain["params"]) or any(s.dtype != torch.int64 or s.numel() != 1 for s in streams):
            raise ValueError(
                f"{op}: expected streams of one int64 element, one for each of {len(plain['params'])} params"
            )
        plain["streams"] = streams
    return plain
