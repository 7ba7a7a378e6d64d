"""Multiplying whatever a user passes to `scale`: a loss, or a nested collection of outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor


def map_tensors(outputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`function` applied to every tensor in `outputs`, containers rebuilt as they were.

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
        return values if type(outputs) is dict else type(outputs)(values)  # pyright: ignore[reportCallIssue]
    mapped = (map_tensors(value, function) for value in outputs)
    if hasattr(outputs, "_fields") and isinstance(outputs, tuple):
        return type(outputs)(*mapped)
    if isinstance(outputs, list | tuple):
        return type(outputs)(mapped)
    return mapped
