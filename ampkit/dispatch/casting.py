"""Casts of an operator's arguments: tensors, lists of tensors and dtype arguments.

A tensor is *eligible* when it is floating point, on the region's device and not float64 (torch.amp's definition);
everything else passes unchanged. A tuple in which nothing is cast is returned as the same object.

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

from ampkit.policy.operators import argument_names, dtype_overload
from ampkit.torch_private import OpOverload

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
PLAIN_TENSORS = frozenset({Tensor, Parameter})  # other types may dispatch operators in their own way
_ON_DEVICE: dict[str, Callable[[Tensor], bool]] = {"cpu": attrgetter("is_cpu"), "cuda": attrgetter("is_cuda")}


class Cast:
    """The cast of eligible tensors of one device type to one dtype. Never synchronizes with the device.

    `cache` in its methods is the region's `WeightCasts`, or None: to it go weights.
    """

    __slots__ = ("castable", "convert", "device_type", "dtype", "on_device", "source_dtypes")

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self.castable = _ELIGIBLE - {dtype}
        self.source_dtypes = frozenset({torch.float32})  # of weights whose casts are cached, as in torch.amp
        self.convert = _CONVERT.get(dtype) or (lambda tensor: tensor.to(dtype))
        self.on_device = _ON_DEVICE.get(device_type) or (lambda tensor: tensor.device.type == device_type)

    def tensor(self, tensor: Tensor, cache: Any = None) -> Tensor:
        """Cast a tensor if it is eligible and not in the target dtype."""
        if tensor.dtype not in self.castable or not self.on_device(tensor):
            return tensor
        if cache is not None and tensor.requires_grad and tensor.is_leaf:
            return cache.get(tensor, self)
        return self.convert(tensor)

    def is_eligible(self, tensor: Tensor) -> bool:
        """Whether a tensor is eligible, whatever its dtype."""
        return tensor.dtype in _ELIGIBLE and self.on_device(tensor)

    def argument(self, argument: Any, cache: Any = None) -> Any:
        """Cast the tensors in an argument: a tensor, a list or tuple of arguments, or anything else as it is."""
        kind = type(argument)
        if kind in _WITHOUT_TENSORS:
            return argument
        if kind is Tensor or kind is Parameter or isinstance(argument, Tensor):
            return self.tensor(argument, cache)
        if kind is list or kind is tuple:
            cast = [self.argument(item, cache) for item in argument]
            return argument if all(map(is_, cast, argument)) else kind(cast)
        return argument

    def args(self, args: tuple[Any, ...], cache: Any = None) -> tuple[Any, ...]:
        """Cast the tensors in positional arguments, the last one first: see `kwargs`."""
        cast = [self.argument(argument, cache) for argument in reversed(args)]
        cast.reverse()
        return args if all(map(is_, cast, args)) else tuple(cast)

    def kwargs(self, kwargs: Mapping[str, Any], cache: Any = None) -> Mapping[str, Any]:
        """Cast the tensors in keyword arguments.

        Arguments are cast in torch.amp's order, the last argument first, keyword arguments before positional ones. It
        decides the order in which autograd adds the gradients of a tensor that is given twice.
        """
        if not kwargs:
            return kwargs
        return dict(zip(kwargs, self.args(tuple(kwargs.values()), cache), strict=True))


@functools.cache
def cast_to(device_type: str, dtype: torch.dtype) -> Cast:
    """Return the `Cast` for a device type and a dtype; one object for each pair."""
    return Cast(device_type, dtype)


def is_eligible(argument: Any, device_type: str) -> bool:
    """Whether an argument is a tensor that autocast for `device_type` may cast."""
    return isinstance(argument, Tensor) and argument.dtype in _ELIGIBLE and argument.device.type == device_type


def tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor among arguments, including lists and tuples."""
    for argument in args:
        kind = type(argument)
        if kind in _WITHOUT_TENSORS:
            continue
        if kind is Tensor or kind is Parameter or isinstance(argument, Tensor):
            yield argument
        elif kind is list or kind is tuple:
            yield from tensors(argument)


def widest_dtype(args: Iterable[Any], device_type: str) -> torch.dtype | None:
    """Return the dtype that PROMOTE casts to, whatever the order of the arguments; None if no tensor is eligible.

    The dtype that all eligible tensors share, otherwise float32. This includes float16 with bfloat16, for which
    torch.amp raises.
    """
    on_device = cast_to(device_type, torch.float32).on_device
    dtypes = {tensor.dtype for tensor in tensors(args) if tensor.dtype in _ELIGIBLE and on_device(tensor)}
    if len(dtypes) > 1:
        return torch.float32
    return next(iter(dtypes), None)


def with_float32_dtype(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], device_type: str
) -> tuple[OpOverload, tuple[Any, ...], Mapping[str, Any]]:
    """Return the call with `dtype=torch.float32`, unless a dtype was given or the first argument is not eligible."""
    if not args or not is_eligible(args[0], device_type):
        return op, args, kwargs
    target = dtype_overload(op)
    assert target is not None, op  # `policy.operators.overloads` has refused the rule
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
