"""The least and the greatest value of a tensor: one pass tells inf, NaN and headroom."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ampkit.debugging.taint import Record

__all__ = ["extremes", "item_at_fault", "mark", "ordered"]


def item_at_fault(outputs: list[Tensor], arguments: Any) -> tuple[list[Tensor], Any]:
    """Of an operator on lists of tensors, the first broken result and the arguments that it was made of."""
    place = next(i for i, one in enumerate(outputs) if not math.isfinite(sum(extremes(one))))

    def pick(value: Any) -> Any:
        return [value[place]] if isinstance(value, (list, tuple)) and len(value) == len(outputs) else value

    args, kwargs = arguments
    return [outputs[place]], ([pick(value) for value in args], {key: pick(value) for key, value in kwargs.items()})


def ordered(tensor: Tensor) -> Tensor:
    """In a form that has an order."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.float() if tensor.element_size() == 1 else tensor


def extremes(tensor: Tensor) -> tuple[float, float]:
    """The least and the greatest value, both NaN if one is."""
    low, high = torch.aminmax(ordered(tensor))
    return low.item(), high.item()


def mark(record: Record, found: list[tuple[float, float]]) -> None:
    """Note on a record what least and greatest values say."""
    for low, high in found:
        if not math.isfinite(high - low):       # of float16, too: these are Python's
            record.nan |= low != low
            record.posinf |= high == math.inf
            record.neginf |= low == -math.inf
