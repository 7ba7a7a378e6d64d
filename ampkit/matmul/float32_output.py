"""Products of 16-bit operands with a float32 result, for operators under `Rule.LOWER_FLOAT32_OUT`.

The operands are rounded by the same casts as under LOWER; the sums, which matrix units have in float32, are not rounded
at the end. On CUDA that is one product of 16-bit matrices (`aten::mm.dtype`, `aten::bmm.dtype`); elsewhere a
float32 product of the rounded operands. Backward rounds the float32 gradient of the result to 16 bits and multiplies
as LOWER's backward does, at the same cost.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ampkit.dispatch import casting
from ampkit.dispatch.dispatcher import in_forward_ad, keysets
from ampkit.policy.rules import Rule
from ampkit.torch_private import Exclude, OpOverload, functorch_level, is_dtensor, jit_tracing_state

__all__ = ["OPERATORS", "expands", "prepare", "product"]

OPERATORS = ("aten::linear", "aten::mm", "aten::addmm", "aten::matmul", "aten::bmm", "aten::baddbmm")
_DIMS = {"mm": 2, "addmm": 2, "bmm": 3, "baddbmm": 3}  # the number of dimensions that both operands must have


def prepare(
    rule: Rule, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], device_type: str, cache: Any
) -> Any:
    """Return the call of `product` with LOWER's casts."""
    cast = casting.cast_to(device_type, torch.get_autocast_dtype(device_type))
    kwargs, args = cast.kwargs(kwargs, cache), cast.args(args, cache)
    return functools.partial(product, op, cast), args, kwargs


def product(op: OpOverload, cast: casting.Cast, *args: Any, **kwargs: Any) -> Tensor:
    """Run `op` on arguments that LOWER has cast, with a float32 result.

    Calls other than a product of two matrices, or of two batches of matrices, run the operator on float32 copies of the
    rounded operands, in backward as well: vectors, broadcast batches, `alpha` and `beta`, transforms of `torch.func`,
    `torch.jit.trace`. So do shapes that do not fit, for which the operator raises.
    """
    tensors = list(casting.tensors((*args, *kwargs.values())))
    if any(each.dtype is not cast.dtype or not cast.on_device(each) for each in tensors) or cast.dtype.itemsize != 2:
        return op._op(*args, **kwargs)
    # `torch.jit.trace` would record the call of an autograd function, which cannot be saved.
    if kwargs or functorch_level() is not None or in_forward_ad() or jit_tracing_state() is not None:
        return _on_float32_copies(op, cast, args, kwargs)
    name = op.overloadpacket.__name__
    operands: Any = args if len(args) > 2 else (*args, None)
    left, right, added = operands
    if name in ("addmm", "baddbmm"):
        added, left, right = operands
    elif name == "linear":
        right = right.t()
    shape = *left.shape[:-1], *right.shape[-1:]
    fits = right.dim() == 2 <= left.dim() or (right.dim() > 2 and left.shape[:-2] == right.shape[:-2])
    fits = fits and _DIMS.get(name, left.dim()) == left.dim() and right.dim() == _DIMS.get(name, right.dim())
    fits = fits and (added is None or expands(added.shape, shape))
    dense = all(each.layout is torch.strided and not each.is_nested for each in tensors)
    if not fits or not dense:
        return _on_float32_copies(op, cast, args, kwargs)
    if right.dim() > 3:
        right = right.flatten(0, -3)
    if left.dim() > right.dim():
        left = left.flatten(0, -right.dim())
    result = _Product.apply(left, right)
    if len(shape) > result.dim():
        result = torch.ops.aten._unsafe_view(result, shape)  # LOWER's can be written in place; a view could not
    return result if added is None else result + added


def _on_float32_copies(op: OpOverload, cast: casting.Cast, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return op._op(*casting.cast_to(cast.device_type, torch.float32).args(args), **kwargs)


def expands(shape: torch.Size, target: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can be added in place to a tensor of the target shape."""
    end = target[len(target) - len(shape) :]
    return len(shape) <= len(target) and all(a in (1, b) for a, b in zip(shape, end, strict=True))


class _Product(torch.autograd.Function):
    """`left @ right` of 16-bit matrices, or batches of them, in float32."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        if left.is_cuda and torch.version.hip is None and not is_dtensor(left):
            return (torch.mm if left.dim() == 2 else torch.bmm)(left, right, out_dtype=torch.float32)
        return left.float() @ right.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        left, right = ctx.saved_tensors
        needs_left, needs_right = ctx.needs_input_grad
        rounded = grad.to(left.dtype)
        with Exclude(keysets((left.device.type,))[0]):  # an open region would give these products float32 results
            return rounded @ right.mT if needs_left else None, left.mT @ rounded if needs_right else None
