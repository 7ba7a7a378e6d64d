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


def cast_tree(tree: Any, dtype: torch.dtype) -> Any:
    """Cast every real floating-point tensor in `tree` to `dtype`, recorded by autograd. Never synchronizes.

    An object of another class that has a `to` method, such as a batch class of the user, is cast by its `to(dtype)`,
    as in Apex; modules and all other objects are returned unchanged.

    >>> cast_tree({"x": [torch.ones(1)], "ids": torch.ones(1, dtype=torch.int64)}, torch.float16)
    {'x': [tensor([1.], dtype=torch.float16)], 'ids': tensor([1])}
    """

    def cast_other(item: Any) -> Any:
        convert = getattr(item, "to", None)
        return convert(dtype) if callable(convert) and not isinstance(item, Module | type) else item

    return map_tensors(tree, lambda tensor: cast(tensor, dtype), cast_other)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast `tensor` to `dtype` if it is real and floating point. Return other tensors unchanged."""
    return tensor.to(dtype) if tensor.dtype in REAL_FLOATS and tensor.dtype is not dtype else tensor


def map_tensors(
    tree: Any, function: Callable[[Tensor], Tensor], other_leaf: Callable[[Any], Any] = lambda item: item
) -> Any:
    """Apply `function` to the tensors in `tree`, and `other_leaf` to all other leaves."""
    return _mapped(tree, function, other_leaf)[0]


def _mapped(tree: Any, function: Callable[[Tensor], Tensor], other_leaf: Callable[[Any], Any]) -> tuple[Any, bool]:
    """Return the mapped tree, and whether it differs: Dynamo of torch 2.11 cannot compare lists by identity."""
    if isinstance(tree, Tensor):
        tensor = function(tree)
        return tensor, tensor is not tree
    if isinstance(tree, _COMMON_LEAVES):  # to skip the checks below
        leaf = other_leaf(tree)
        return leaf, leaf is not tree
    if isinstance(tree, list | tuple):
        items = [_mapped(item, function, other_leaf) for item in tree]
        if not any(differs for _, differs in items):
            return tree, False
        values = [item for item, _ in items]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values), True
    if isinstance(tree, Mapping):
        mapped = {key: _mapped(item, function, other_leaf) for key, item in tree.items()}
        changed = {key: item for key, (item, differs) in mapped.items() if differs}
        return (_with_items(tree, changed), True) if changed else (tree, False)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {
            field.name: getattr(tree, field.name) for field in dataclasses.fields(tree) if hasattr(tree, field.name)
        }
        mapped = {name: _mapped(item, function, other_leaf) for name, item in fields.items()}
        changed = {name: item for name, (item, differs) in mapped.items() if differs}
        return (_with_fields(tree, changed), True) if changed else (tree, False)
    leaf = other_leaf(tree)
    return leaf, leaf is not tree


def _with_items(mapping: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same type with some values replaced; a plain dict if it cannot be copied or written."""
    if type(mapping) is dict:  # Dynamo cannot trace `copy.copy`
        return {**mapping, **changed}
    try:
        copied: Any = copy.copy(mapping)
        for key, item in changed.items():
            copied[key] = item
    except TypeError:
        return {**mapping, **changed}
    return copied


def _with_fields(value: Any, changed: dict[str, Any]) -> Any:
    """Return a copy of a dataclass, frozen or not, with some fields replaced; `__post_init__` does not run again."""
    copied = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(copied, name, item)
    return copied
