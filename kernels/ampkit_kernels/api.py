"""The public operations: validate, choose an implementation, hand over.

What each function promises is written here once; how a kernel keeps the promise is written in its own module
(`unscale`, `norm`, `apply`, `adamw`, `sgd`, `cast`, `scale`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .dispatch import pick, split, uses_triton
from .tensors import check_one_device, check_parallel, check_scalar, resolved, strided_floats


@torch.no_grad()
def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, *, impl: str = "auto") -> None:
    """Multiply gradients by `inv_scale` in place and set `found_inf` to 1.0 where a value is not finite.

    A value counts as non-finite when it comes in as inf or NaN, or when the multiplication makes it so
    (possible only for `inv_scale` above 1, a loss scale below 1). `found_inf` is never cleared. Gradients
    may be float32, float16, bfloat16, float64, complex (as their real views) or sparse COO (their stored
    values), contiguous or not; expanded ones are multiplied once. `inv_scale` and `found_inf` are one
    float32 element each, beside the gradients. Never synchronises. Moves 8 bytes per float32 element.

    Raises TypeError for integer tensors and DTensors, ValueError for mixed devices and tensors whose elements
    overlap. Follows torch's `_amp_foreach_non_finite_check_and_unscale_`.

    >>> import torch
    >>> grads, found_inf = [torch.tensor([2.0, 4.0])], torch.zeros(())
    >>> unscale_(grads, torch.tensor(0.5), found_inf)
    >>> grads[0], found_inf
    (tensor([1., 2.]), tensor(0.))
    """
    grads = _prepared(grads, "unscale_", inv_scale=inv_scale, found_inf=found_inf)
    if not grads:
        return
    if not uses_triton(impl, grads[0].device):
        reference.unscale_(grads, inv_scale, found_inf)
        return
    from . import unscale

    flat, other = split(impl, "unscale_", grads)
    unscale.unscale_(pick(grads, flat), inv_scale, found_inf)
    if other:
        reference.unscale_(pick(grads, other), inv_scale, found_inf)


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
    overflow is no overflow. Where they do overflow float32 the Triton path returns inf, the CPU path adds
    them up again in float64. The same list on the same device gives the same bits every time. An empty list
    has norm 0. Triton serves orders 1, 2 and inf, PyTorch any. Never synchronises. Moves 4 bytes per
    float32 element.

    >>> import torch
    >>> norm_and_check([torch.tensor([3.0]), torch.tensor([4.0])], torch.tensor(1.0), torch.zeros(()))
    tensor(5.)
    """
    grads = _prepared(grads, "norm_and_check", inv_scale=inv_scale, found_inf=found_inf)
    norm_type = float(norm_type)
    if not grads or not uses_triton(impl, grads[0].device):
        return reference.norm_and_check(grads, inv_scale, found_inf, norm_type)
    from . import norm

    if norm_type not in norm.ORDERS:
        if impl == "triton":
            raise ValueError(
                f"norm_and_check: impl='triton' got norm_type {norm_type}; expected one of {norm.ORDERS}: "
                f"use impl='auto' for other orders"
            )
        return reference.norm_and_check(grads, inv_scale, found_inf, norm_type)
    flat, other = split(impl, "norm_and_check", grads)
    result = norm.norm_and_check(pick(grads, flat), inv_scale, found_inf, norm_type)
    if other:
        rest = reference.norm_and_check(pick(grads, other), inv_scale, found_inf, norm_type)
        wide = torch.promote_types(result.dtype, rest.dtype)
        result = torch.linalg.vector_norm(torch.stack((result.to(wide), rest.to(wide))), norm_type)
    return result


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
    if not grads:
        return
    if not uses_triton(impl, grads[0].device):
        reference.multiply_(grads, factor, found_inf)
        return
    from . import apply

    flat, other = split(impl, "multiply_", grads)
    apply.multiply_(pick(grads, flat), factor, found_inf)
    if other:
        reference.multiply_(pick(grads, other), factor, found_inf)


@torch.no_grad()
def nonfinite_counts(grads: Sequence[Tensor], *, impl: str = "auto") -> Tensor:
    """How many elements of each tensor are inf and how many are NaN: int64 `[len(grads), 2]` on their device.

    Meant for the report after a skipped step. Complex tensors count their real and imaginary parts apart.
    Never synchronises. Moves 4 bytes per float32 element.

    >>> import torch
    >>> nonfinite_counts([torch.tensor([float("inf"), 1.0]), torch.tensor([float("nan")])])
    tensor([[1, 0],
            [0, 1]])
    """
    grads = _prepared(grads, "nonfinite_counts")
    if not grads or not uses_triton(impl, grads[0].device):
        return reference.nonfinite_counts(grads)
    from . import counts

    flat, other = split(impl, "nonfinite_counts", grads)
    if len(flat) == len(grads):
        return counts.nonfinite_counts(grads)
    result = torch.zeros((len(grads), 2), dtype=torch.int64, device=grads[0].device)
    for i, row in zip(flat, counts.nonfinite_counts(pick(grads, flat)) if flat else (), strict=True):
        result[i] = row
    for i in other:
        result[i] = reference.nonfinite_counts([grads[i]])[0]
    return result


@torch.no_grad()
def cast_(sources: Sequence[Tensor], destinations: Sequence[Tensor], *, impl: str = "auto") -> None:
    """Copy each source into its destination, converting dtype: float32 masters to half copies, and back.

    Any pair of float dtypes, rounded to nearest even. Never synchronises. Moves 6 bytes per float32-to-half
    element.

    Raises ValueError when lengths, shapes or devices differ.

    >>> import torch
    >>> half = torch.empty(2, dtype=torch.float16)
    >>> cast_([torch.tensor([1.0, 2.5])], [half])
    >>> half
    tensor([1.0000, 2.5000], dtype=torch.float16)
    """
    sources, destinations = strided_floats(resolved(sources), "cast_"), strided_floats(destinations, "cast_")
    check_parallel("cast_", sources=sources, destinations=destinations)
    check_one_device([*sources, *destinations], "cast_")
    if not sources:
        return
    if not uses_triton(impl, sources[0].device):
        reference.cast_(sources, destinations)
        return
    from . import cast

    flat, other = split(impl, "cast_", sources, destinations)
    cast.cast_(pick(sources, flat), pick(destinations, flat))
    if other:
        reference.cast_(pick(sources, other), pick(destinations, other))


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
    is taken in float32 (float64 beside a float64 tensor) and rounded to the destination's dtype; a sum is
    rounded once more. `found_inf` is set to 1.0 where a product is not finite, and never cleared. Sources
    are only read, and share no memory with destinations. Never synchronises. Moves 6 bytes per float16
    element, 10 with `accumulate`.

    Raises ValueError when lengths, shapes or devices differ.

    >>> import torch
    >>> gradient, found_inf = torch.zeros(2), torch.zeros(())
    >>> unscale_into_([torch.tensor([2.0, 4.0]).half()], [gradient], torch.tensor(0.5), found_inf)
    >>> gradient, found_inf
    (tensor([1., 2.]), tensor(0.))
    """
    op = "unscale_into_"
    sources, destinations = strided_floats(sources, op), strided_floats(destinations, op)
    check_parallel(op, sources=sources, destinations=destinations)
    check_one_device([*sources, *destinations], op)
    for name, value in (("inv_scale", inv_scale), ("found_inf", found_inf)):
        check_scalar(name, value, sources, op)
    if not sources:
        return
    if not uses_triton(impl, sources[0].device):
        reference.unscale_into_(sources, destinations, inv_scale, found_inf, accumulate)
        return
    from . import unscale_into

    flat, other = split(impl, op, sources, destinations)
    unscale_into.unscale_into_(
        pick(sources, flat), pick(destinations, flat), inv_scale, found_inf, accumulate
    )
    if other:
        reference.unscale_into_(
            pick(sources, other), pick(destinations, other), inv_scale, found_inf, accumulate
        )


@torch.no_grad()
def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor | None,
    found_inf: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int = 1,
    refill: str = "clean",
    min_scale: float | None = None,
    max_scale: float | None = None,
    impl: str = "auto",
) -> None:
    """Move the loss scale, its growth tracker and its patience on by one iteration, in place, on the device.

    Without overflow the tracker counts up, and on reaching `growth_interval` the scale is multiplied by
    `growth_factor` and the tracker starts over. On overflow (any nonzero `found_inf`) the tracker starts
    over, and the scale is multiplied by `backoff_factor`, at the `hysteresis`-th overflow in a row of them.
    `refill` says what restores that patience: a `"clean"` step, or `"growth"` of the scale. A product that
    would be 0 or not finite is dropped; `min_scale` and `max_scale` bound what a product may reach, but
    never move a scale that was set beyond them. `scale` and `found_inf` are one float32 element, the
    trackers one int32 element each; `hysteresis_tracker` may be None when `hysteresis` is 1. Products are
    taken in float64, then rounded. Never synchronises.

    Follows torch's `_amp_update_scale_`; hysteresis as in Apex (`"clean"`) and DeepSpeed (`"growth"`).

    >>> import torch
    >>> scale, tracker = torch.tensor(8.0), torch.zeros((), dtype=torch.int32)
    >>> options = dict(growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)
    >>> update_scale_(scale, tracker, None, torch.tensor(1.0), **options)
    >>> scale
    tensor(4.)
    """
    op = "update_scale_"
    check_scalar("scale", scale, [], op)
    check_scalar("found_inf", found_inf, [scale], op)
    for name, tracker in (("growth_tracker", growth_tracker), ("hysteresis_tracker", hysteresis_tracker)):
        if tracker is None:
            continue
        if tracker.dtype != torch.int32 or tracker.numel() != 1 or tracker.device != scale.device:
            raise ValueError(
                f"{op}: {name} is a {tracker.dtype} tensor of shape {tuple(tracker.shape)} "
                f"on {tracker.device}; expected one int32 element on {scale.device}"
            )
    if hysteresis < 1 or (hysteresis > 1 and hysteresis_tracker is None):
        raise ValueError(
            f"{op}: got hysteresis {hysteresis} with hysteresis_tracker "
            f"{'None' if hysteresis_tracker is None else 'given'}; "
            f"expected hysteresis >= 1, and a tracker where it is above 1"
        )
    if refill not in ("clean", "growth"):
        raise ValueError(f"{op}: unknown refill {refill!r}; expected 'clean' or 'growth'")
    if uses_triton(impl, scale.device):
        from . import scale as kernels
    else:
        kernels = reference
    kernels.update_scale_(
        scale,
        growth_tracker,
        hysteresis_tracker,
        found_inf,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        refill=refill,
        min_scale=min_scale,
        max_scale=max_scale,
    )


def _prepared(grads: Sequence[Tensor], op: str, **scalars: Tensor) -> list[Tensor]:
    """The list as strided real floats, once its devices and the scalars beside it have been checked."""
    grads = strided_floats(grads, op)
    check_one_device(grads, op)
    for name, value in scalars.items():
        check_scalar(name, value, grads, op)
    return grads
