"""The public operations: validate, choose an implementation, hand over.

Each function's contract is written here; the kernels' own are in the modules of `triton_ops`. A `FlatList` goes to the
kernels unchecked, and so do the scalars beside it, which must be as documented.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .dispatch import select
from .tensors import check_one_device, check_parallel, check_scalar, resolved, strided_floats


@torch.no_grad()
def unscale_(grads: Sequence[Tensor], inv_scale: Tensor, found_inf: Tensor, *, impl: str = "auto") -> None:
    """Multiply gradients by `inv_scale` in place and set `found_inf` to 1.0 where a value is not finite.

    A value counts as non-finite when it comes in as inf or NaN, or when the multiplication makes it so
    (possible only for `inv_scale` above 1, a loss scale below 1). `found_inf` is never cleared. Gradients
    may be float32, float16, bfloat16, float64, complex (as their real views) or sparse COO (their stored
    values), contiguous or not; expanded ones are multiplied once. `inv_scale` and `found_inf` are one
    float32 element each, on the gradients' device. Never synchronises. Moves 8 bytes per float32 element.

    Raises TypeError for integer tensors and DTensors, ValueError for mixed devices and tensors whose elements
    overlap. Follows torch's `_amp_foreach_non_finite_check_and_unscale_`.

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
    overflow sets nothing. Where they do overflow float32 the Triton path returns inf, the CPU path adds
    them up again in float64. The same list on the same device gives the same bits every time, captured in a
    CUDA graph or not. An empty list has norm 0. Triton serves orders 1, 2 and inf, PyTorch any. Never
    synchronises. Moves 4 bytes per float32 element.

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
def nonfinite_counts(grads: Sequence[Tensor], *, impl: str = "auto") -> Tensor:
    """How many elements of each tensor are inf and how many are NaN: int64 `[len(grads), 2]` on their device.

    Meant for the report after a skipped step. Complex tensors count their real and imaginary parts separately.
    Never synchronises. Moves 4 bytes per float32 element.

    >>> import torch
    >>> nonfinite_counts([torch.tensor([float("inf"), 1.0]), torch.tensor([float("nan")])])
    tensor([[1, 0],
            [0, 1]])
    """
    grads = _prepared(grads, "nonfinite_counts")
    return (select(impl, grads[0].device) if grads else reference).nonfinite_counts(grads)


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
    select(impl, inv_scale.device).unscale_into_(sources, destinations, inv_scale, found_inf, accumulate=accumulate)


def _prepared(grads: Sequence[Tensor], op: str, **scalars: Tensor) -> list[Tensor]:
    """The list as strided real floats, after checking its devices and the scalars."""
    grads = strided_floats(grads, op)
    check_one_device(grads, op)
    for name, value in scalars.items():
        check_scalar(name, value, grads, op)
    return grads
