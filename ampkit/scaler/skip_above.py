"""Gradient norms above which a step is not taken: a number, or a multiple of the running median, on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampkit.gradients.collect import parameters
from ampkit.scaler.loss_scale import number, to_python_numbers

__all__ = ["TimesMedian", "checked", "is_outlier", "size"]


@dataclass(frozen=True)
class TimesMedian:
    """A limit for the gradient norms of each optimizer: `factor` times the median of its last ones.

    Norms of skipped steps count too, if finite, so norms that stay large become the median.

    Args:
        factor: above 1.
        window: how many norms the median is of, at most. There is no limit before an eighth of them is there.

    Raises:
        TypeError: an argument that is no number, or no whole one.
        ValueError: one out of range.

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

    def init(self, saved: Sequence[float] = ()) -> Tensor:
        """The last norms, oldest first, on the CPU; inf where there is none yet. `saved` are those of another run."""
        kept = saved[-self.window :]
        return torch.tensor([math.inf] * (self.window - len(kept)) + [*kept], dtype=torch.float32, device="cpu")

    def judge_(self, norms: Tensor, norm: Tensor) -> Tensor:
        """`is_outlier` of a norm beside the last ones, to which it is added if it is finite. Never syncs."""
        norm = norm.detach().float()
        known = torch.isfinite(norms).sum()
        median = norms.sort().values.take((known - 1).clamp(min=0) // 2)     # `nanmedian` would wait for the device
        has_limit = (known >= self.window // 8) & (median > 0)
        with_this = torch.cat((norms[1:], norm.reshape(1)))
        norms.copy_(torch.where(torch.isfinite(norm), with_this, norms))
        return is_outlier(norm, torch.where(has_limit, median * self.factor, math.inf))


def size(optimizer: Any) -> list[int]:
    """The number of an optimizer's parameters, and of their elements: what its saved norms are found by."""
    counts = [param.numel() for param in parameters(optimizer)]
    return [len(counts), sum(counts)]


def is_outlier(norm: Tensor, limit: float | Tensor) -> Tensor:
    """1.0 for a norm above the limit, and for one that is inf or NaN; else 0.0. Never syncs."""
    return (~((norm <= limit) & torch.isfinite(norm))).float()


def checked(limit: Any) -> float | TimesMedian | None:
    """A limit as `GradScaler(skip_above=...)` takes it; raises `TypeError` or `ValueError` for anything else."""
    if limit is None or isinstance(limit, TimesMedian):
        return limit
    if limit is TimesMedian:
        raise TypeError("skip_above is the class TimesMedian; expected a number, or TimesMedian(factor)")
    plain = number(limit, "skip_above")
    if not 0.0 < plain < math.inf:
        raise ValueError(f"skip_above is {plain}; expected a positive finite number, the norm above which to skip")
    return plain
