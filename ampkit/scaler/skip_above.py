"""Limits for gradient norms, above which a step is skipped: a number, or a multiple of the running median.

Norms are compared on the device; nothing here synchronizes with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampkit.gradients.collect import parameters
from ampkit.scaler.loss_scale import number, to_python_numbers

__all__ = ["TimesMedian", "checked", "compare_", "first_norms", "is_outlier", "size"]


@dataclass(frozen=True)
class TimesMedian:
    """A limit for gradient norms: `factor` times the running median, for each optimizer by its own norms.

    Finite norms of skipped steps also count for the median, so lasting large norms are accepted in the end. Norms are
    compared on the device, which never synchronizes.

    Args:
        factor: multiplies the median; above 1.
        window: number of last norms of which the median is taken, 8 to 65,536. Until an eighth of them exists, no
            step is skipped.

    Raises:
        TypeError: `factor` is not a number, or `window` not an integer.
        ValueError: one of them is out of range.

    >>> TimesMedian(10.0)
    TimesMedian(factor=10.0, window=128)
    """

    factor: float
    window: int = 128

    def __post_init__(self) -> None:
        to_python_numbers(self)
        if not 1.0 < self.factor < math.inf:
            raise ValueError(f"factor is {self.factor}; expected a number above 1")
        if not 8 <= self.window <= 2**16:
            raise ValueError(f"window is {self.window}; expected 8 to {2**16} norms")


def first_norms(limit: TimesMedian, saved: Sequence[float] = ()) -> Tensor:
    """Return the first norms, oldest first, on the CPU: the saved ones, after inf for missing ones."""
    last = saved[-limit.window :]
    return torch.tensor([math.inf] * (limit.window - len(last)) + [*last], dtype=torch.float32, device="cpu")


def compare_(limit: TimesMedian, norms: Tensor, norm: Tensor) -> Tensor:
    """Return `is_outlier` of a norm by the median of the last ones; add it to them if it is finite."""
    norm = norm.detach().float()
    n_finite = torch.isfinite(norms).sum()
    median = norms.sort().values.take((n_finite - 1).clamp(min=0) // 2)  # `nanmedian` would wait for the device
    has_limit = (n_finite >= limit.window // 8) & (median > 0)
    with_this = torch.cat((norms[1:], norm.reshape(1)))
    norms.copy_(torch.where(torch.isfinite(norm), with_this, norms))
    return is_outlier(norm, torch.where(has_limit, median * limit.factor, math.inf))


def size(optimizer: Any) -> list[int]:
    """Return the numbers of an optimizer's parameters and of their elements, by which its saved norms are found."""
    counts = [param.numel() for param in parameters(optimizer)]
    return [len(counts), sum(counts)]


def is_outlier(norm: Tensor, limit: float | Tensor) -> Tensor:
    """Return a flag: 1.0 if the norm is above the limit, inf or NaN; otherwise 0.0."""
    return (~((norm <= limit) & torch.isfinite(norm))).float()


def checked(limit: Any) -> float | TimesMedian | None:
    """Check the argument `skip_above` of `GradScaler`; `TypeError` or `ValueError` if it is not a limit."""
    if limit is None or isinstance(limit, TimesMedian):
        return limit
    if limit is TimesMedian:
        raise TypeError("skip_above is the class TimesMedian; expected a number, or TimesMedian(factor)")
    plain = number(limit, "skip_above")
    if not 0.0 < plain < math.inf:
        raise ValueError(f"skip_above is {plain}; expected a positive finite number, the norm above which to skip")
    return plain
