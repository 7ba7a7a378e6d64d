"""Casts of tensors in any nesting of containers, such as the inputs and outputs of a module.

Lists, tuples, named tuples, mappings and dataclasses are rebuilt in their own type; a container in which nothing is
cast is returned unchanged, so that a call without work to do allocates nothing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.dtypes import REAL_FLOATS

_COMMON_LEAVES = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)


def cast_tree(value: Any, dtype: torch.dtype) -> Any:
    """Cast every real floating-point tensor in `value` to `dtype`, recorded by autograd. Never synchronizes.

    An object of another class that has a `to` method, such as a batch class of the user, is cast by `value.to(dtype)`,
    as in Apex; modules and all other objects are returned unchanged.

    >>> cast_tree({"x": [torch.ones(1)], "ids": torch.ones(1, dtype=torch.int64)}, torch.float16)
    {'x': [tensor([1.], dtype=torch.float16)], 'ids': tensor([1])}
    """

    def other(item: Any) -> Any:
        convert = getattr(item, "to", None)
        return convert(dtype) if callable(convert) and not isinstance(item, Module | type) else item

    return map_tensors(value, lambda tensor: cast(tensor, dtype), other)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast `tensor` to `dtype` if it is real and floating point, else return it unchanged."""
    return tensor.to(dtype) if tensor.dtype in REAL_FLOATS and tensor.dtype is not dtype else tensor


def map_tensors(
    value: Any, function: Callable[[Tensor], Tensor], other: Callable[[Any], Any] = lambda item: item
) -> Any:
    """Apply `function` to the tensors in `value`, and `other` to every other leaf."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _COMMON_LEAVES):       # to skip the checks below
        return other(value)
    if isinstance(value, list | tuple):
        items = [map_tensors(item, function, other) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(item, function, other) for key, item in value.items()}
        changed = {key: item for key, item in changed.items() if item is not value[key]}
        return _with_items(value, changed) if changed else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if hasattr(value, field.name)
        }
        changed = {name: map_tensors(item, function, other) for name, item in fields.items()}
        changed = {name: item for name, item in changed.items() if item is not fields[name]}
        return _with_fields(value, changed) if changed else value
    return other(value)


def _with_items(mapping: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same type with some values replaced; a plain dict if it cannot be copied or written."""
    if type(mapping) is dict:       # Dynamo cannot trace `copy.copy`
        return {**mapping, **changed}
    try:
        copied: Any = copy.copy(mapping)
        for key, item in changed.items():
            copied[key] = item
    except TypeError:
        return {**mapping, **changed}
    return copied


def _with_fields(value: Any, changed: dict[str, Any]) -> Any:
    """A copy of a dataclass, frozen or not, with some fields replaced; `__post_init__` does not run again."""
    copied = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(copied, name, item)
    return copied
