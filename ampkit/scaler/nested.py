"""Losses in containers, as `GradScaler.scale` takes them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor


def map_tensors(outputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply `function` to every tensor in `outputs`; containers keep their types.

    Lists, tuples, named tuples and mappings keep their type; any other iterable becomes a lazy iterator, as in torch.

    Raises:
        ValueError: a leaf that is not a tensor, or a string.
    """
    if isinstance(outputs, Tensor):
        return function(outputs)
    if isinstance(outputs, str | bytes) or not isinstance(outputs, Iterable):
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors; got {type(outputs).__name__}")
    if isinstance(outputs, Mapping):
        values = {key: map_tensors(value, function) for key, value in outputs.items()}
        return values if type(outputs) is dict else _mapping_like(outputs, values)
    mapped = (map_tensors(value, function) for value in outputs)
    if hasattr(outputs, "_fields") and isinstance(outputs, tuple):
        return type(outputs)(*mapped)
    if isinstance(outputs, list | tuple):
        return type(outputs)(mapped)
    return mapped


def _mapping_like(mapping: Any, values: dict[Any, Any]) -> Any:
    """A mapping of the same type; one whose constructor takes no mapping (`defaultdict`) is copied and updated."""
    try:
        return type(mapping)(values)
    except TypeError:
        found = copy.copy(mapping)
        found.update(values)
        return found
