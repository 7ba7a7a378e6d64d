"""Casting an operator's arguments: what each rule does to a tensor, a list of tensors, a dtype argument.

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
    value for value in vars(torch).values() if isinstance(value, torch.dtype) and value.is_floating_point
)
_ELIGIBLE = _FLOATING - {torch.float64}
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
# `tensor.bfloat16()` is `tensor.to(torch.bfloat16)` without the parsing of arguments, a third of a small cast's time.
_CONVERT: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16, torch.float32: Tensor.float,
}
_ON_DEVICE: dict[str, Callable[[Tensor], bool]] = {"cpu": attrgetter("is_cpu"), "cuda": attrgetter("is_cuda")}
Lookup = Callable[[Tensor, torch.dtype], Tensor]        # stands in for `leaf.to(dtype)` where casts are cached


class Cast:
    """Casts the eligible tensors of one device type to one dtype. Never syncs."""

    __slots__ = ("castable", "convert", "device_type", "dtype", "on_device")

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self.castable = _ELIGIBLE - {dtype}
        self.convert = _CONVERT.get(dtype) or (lambda tensor: tensor.to(dtype))
        self.on_device = _ON_DEVICE.get(device_type) or (lambda tensor: tensor.device.type == device_type)

    def eligible(self, value: Tensor) -> bool:
        """Whether autocast for the device type may cast `value`."""
        return value.dtype in _ELIGIBLE and self.on_device(value)

    def tensor(self, value: Tensor, lookup: Lookup | None = None) -> Tensor:
        """`value` in the target dtype if it is eligible, else `value` itself."""
        if value.dtype not in self.castable or not self.on_device(value):
            return value
        return lookup(value, self.dtype) if lookup is not None and value.is_leaf else self.convert(value)

    def value(self, value: Any, lookup: Lookup | None = None) -> Any:
        """An argument with its tensors cast: a tensor, a list or tuple of arguments, or anything else as is."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is Tensor or kind is Parameter or isinstance(value, Tensor):
            return self.tensor(value, lookup)
        if kind is list or kind is tuple:
            cast = [self.value(item, lookup) for item in value]
            return value if all(map(is_, cast, value)) else kind(cast)
        return value

    def args(self, args: tuple[Any, ...], lookup: Lookup | None = None) -> tuple[Any, ...]:
        """Positional arguments with their tensors cast, the last one first: see `kwargs`."""
        cast = [self.value(value, lookup) for value in reversed(args)]
        cast.reverse()
        return args if all(map(is_, cast, args)) else tuple(cast)

    def kwargs(self, kwargs: Mapping[str, Any], lookup: Lookup | None = None) -> Mapping[str, Any]:
        """Keyword arguments with their tensors cast.

        Arguments are cast in torch.amp's order, which decides in which order autograd adds up the gradients of a
        tensor that is given twice: the last argument first, keyword arguments before positional ones.
        """
        if not kwargs:
            return kwargs
        return dict(zip(kwargs, self.args(tuple(kwargs.values()), lookup), strict=True))


@functools.cache
def cast_to(device_type: str, dtype: torch.dtype) -> Cast:
    """The `Cast` for a device type and a dtype; one object for each pair."""
    return Cast(device_type, dtype)


def is_eligible(value: Any, device_type: str) -> bool:
    """Whether autocast for `device_type` may cast `value`."""
    return isinstance(value, Tensor) and value.dtype in _ELIGIBLE and value.device.type == device_type


def tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor among arguments, lists and tuples looked into."""
    for value in args:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if isinstance(value, Tensor):
            yield value
        elif kind is list or kind is tuple:
            yield from tensors(value)


def widest_dtype(args: Iterable[Any], device_type: str, found: torch.dtype | None = None) -> torch.dtype | None:
    """The dtype that PROMOTE casts to, whatever the order of the arguments; None if nothing is eligible.

    The dtype that all eligible tensors share, otherwise float32; also for float16 with bfloat16, where torch.amp
    raises. `found` is the result for the arguments before these.
    """
    on_device = cast_to(device_type, torch.float32).on_device
    for value in args:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is list or kind is tuple:
            found = widest_dtype(value, device_type, found)
        elif (kind is Tensor or isinstance(value, Tensor)) and value.dtype in _ELIGIBLE and on_device(value):
            if found is None:
                found = value.dtype
            elif found is not value.dtype:
                return torch.float32
    return found


def with_float32_dtype(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], device_type: str
) -> tuple[OpOverload, tuple[Any, ...], Mapping[str, Any]]:
    """The call with `dtype=torch.float32` asked for, unless the caller asked for a dtype or arg 0 is not eligible."""
    if not args or not is_eligible(args[0], device_type):
        return op, args, kwargs
    target = dtype_overload(op)
    assert target is not None, op       # `operator_keys.overloads` has refused the rule
    if target is not op:
        # The dispatcher omits arguments equal to their default, and the other overload may have no default for them.
        defaults = {a.name: a.default_value for a in op._schema.arguments[len(args) :] if a.has_default_value()}
        return target, args, {**defaults, **kwargs, "dtype": torch.float32}
    position = argument_names(op).index("dtype")
    given = args[position] if position < len(args) else kwargs.get("dtype")
    if given is not None:
        return op, args, kwargs
    if position < len(args):
        return op, (*args[:position], torch.float32, *args[position + 1 :]), kwargs
    return op, args, {**kwargs, "dtype": torch.float32}
