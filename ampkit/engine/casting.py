"""Casts of an operator's arguments: the functions that rules apply to tensors, lists of tensors and dtype arguments.

Pure functions of their arguments: no region, no thread, no dispatcher state. A tensor is *eligible* when it is
floating point, on the region's device and not float64 (torch.amp's definition); everything else passes unchanged.
A tuple in which nothing is cast is returned as the same object.

Source: ATen/autocast_mode.h.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit.torch_internals.operators import OpOverload, argument_names, dtype_overload

_FLOATING = frozenset(
    attribute
    for attribute in vars(torch).values()
    if isinstance(attribute, torch.dtype) and attribute.is_floating_point
)
_ELIGIBLE = _FLOATING - {torch.float64}
_WITHOUT_TENSORS = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)  # types of arguments that hold none
# `tensor.bfloat16()` is `tensor.to(torch.bfloat16)` without the parsing of arguments, a third of a small cast's time.
_CONVERT: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
}
_ON_DEVICE: dict[str, Callable[[Tensor], bool]] = {"cpu": attrgetter("is_cpu"), "cuda": attrgetter("is_cuda")}
Lookup = Callable[[Tensor, torch.dtype], Tensor]  # stands in for `leaf.to(dtype)` where casts are cached


class Cast:
    """Casts of the eligible tensors of one device type to one dtype. Never synchronizes with the device."""

    __slots__ = ("castable", "convert", "device_type", "dtype", "on_device")

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self.castable = _ELIGIBLE - {dtype}
        self.convert = _CONVERT.get(dtype) or (lambda tensor: tensor.to(dtype))
        self.on_device = _ON_DEVICE.get(device_type) or (lambda tensor: tensor.device.type == device_type)

    def eligible(self, tensor: Tensor) -> bool:
        """Whether autocast for the device type may cast a tensor."""
        return tensor.dtype in _ELIGIBLE and self.on_device(tensor)

    def tensor(self, tensor: Tensor, lookup: Lookup | None = None) -> Tensor:
        """A tensor in the target dtype if it is eligible, else the tensor itself."""
        if tensor.dtype not in self.castable or not self.on_device(tensor):
            return tensor
        return lookup(tensor, self.dtype) if lookup is not None and tensor.is_leaf else self.convert(tensor)

    def argument(self, argument: Any, lookup: Lookup | None = None) -> Any:
        """An argument with its tensors cast: a tensor, a list or tuple of arguments, or anything else as it is."""
        kind = type(argument)
        if kind in _WITHOUT_TENSORS:
            return argument
        if kind is Tensor or kind is Parameter or isinstance(argument, Tensor):
            return self.tensor(argument, lookup)
        if kind is list or kind is tuple:
            cast = [self.argument(item, lookup) for item in argument]
            return argument if all(map(is_, cast, argument)) else kind(cast)
        return argument

    def args(self, args: tuple[Any, ...], lookup: Lookup | None = None) -> tuple[Any, ...]:
        """Positional arguments with their tensors cast, the last one first: see `kwargs`."""
        cast = [self.argument(argument, lookup) for argument in reversed(args)]
        cast.reverse()
        return args if all(map(is_, cast, args)) else tuple(cast)

    def kwargs(self, kwargs: Mapping[str, Any], lookup: Lookup | None = None) -> Mapping[str, Any]:
        """Keyword arguments with their tensors cast.

        Arguments are cast in torch.amp's order, the last argument first, keyword arguments before positional ones. It
        decides the order in which autograd adds the gradients of a tensor that is given twice.
        """
        if not kwargs:
            return kwargs
        return dict(zip(kwargs, self.args(tuple(kwargs.values()), lookup), strict=True))


@functools.cache
def cast_to(device_type: str, dtype: torch.dtype) -> Cast:
    """The `Cast` for a device type and a dtype; one object for each pair."""
    return Cast(device_type, dtype)


def without_cache(device_type: str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """`RegionCache.weights` of a region without a cache."""
    return cast_to(device_type, dtype).tensor


def is_eligible(argument: Any, device_type: str) -> bool:
    """Whether an argument is a tensor that autocast for `device_type` may cast."""
    return isinstance(argument, Tensor) and argument.dtype in _ELIGIBLE and argument.device.type == device_type


def tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor among arguments, also in lists and tuples."""
    for argument in args:
        kind = type(argument)
        if kind in _WITHOUT_TENSORS:
            continue
        if kind is Tensor or kind is Parameter or isinstance(argument, Tensor):
            yield argument
        elif kind is list or kind is tuple:
            yield from tensors(argument)


def widest_dtype(args: Iterable[Any], device_type: str, so_far: torch.dtype | None = None) -> torch.dtype | None:
    """The dtype that PROMOTE casts to, whatever the order of the arguments; None if no tensor is eligible.

    The dtype that all eligible tensors share, otherwise float32; also for float16 with bfloat16, where torch.amp
    raises. `so_far` is the result for the arguments before these.
    """
    on_device = cast_to(device_type, torch.float32).on_device
    for argument in args:
        kind = type(argument)
        if kind in _WITHOUT_TENSORS:
            continue
        if kind is list or kind is tuple:
            so_far = widest_dtype(argument, device_type, so_far)
        elif (kind is Tensor or isinstance(argument, Tensor)) and argument.dtype in _ELIGIBLE and on_device(argument):
            if so_far is None:
                so_far = argument.dtype
            elif so_far is not argument.dtype:
                return torch.float32
    return so_far


def with_float32_dtype(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], device_type: str
) -> tuple[OpOverload, tuple[Any, ...], Mapping[str, Any]]:
    """The call with `dtype=torch.float32`, unless the caller gave a dtype or the first argument is not eligible."""
    if not args or not is_eligible(args[0], device_type):
        return op, args, kwargs
    target = dtype_overload(op)
    assert target is not None, op  # `operator_keys.overloads` has refused the rule
    if target is not op:
        # The dispatcher omits arguments equal to their default, and the target may have no default for them.
        defaults = {a.name: a.default_value for a in op._schema.arguments[len(args) :] if a.has_default_value()}
        return target, args, {**defaults, **kwargs, "dtype": torch.float32}
    position = argument_names(op).index("dtype")
    dtype = args[position] if position < len(args) else kwargs.get("dtype")
    if dtype is not None:
        return op, args, kwargs
    if position < len(args):
        return op, (*args[:position], torch.float32, *args[position + 1 :]), kwargs
    return op, args, {**kwargs, "dtype": torch.float32}
