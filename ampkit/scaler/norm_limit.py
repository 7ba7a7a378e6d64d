"""Gradient norms above which a step is not taken: a number, or a multiple of the running median, on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampkit.scaler.loss_scale import number

__all__ = ["RecentNorms", "TimesMedian", "checked", "is_outlier"]


@dataclass(frozen=True)
class TimesMedian:
    """A limit for the gradient norms of each optimizer: `factor` times the median of its last ones.

    Norms of skipped steps count too, if finite, so norms that stay large become the median.

    Args:
        factor: above 1.
        window: how many norms the median is of, at most.
        warmup: norms before there is a limit.

    Raises:
        TypeError: an argument that is no number, or no whole one.
        ValueError: one out of range.

    >>> TimesMedian(10.0)
    TimesMedian(factor=10.0, window=128, warmup=16)
    """

    factor: float
    window: int = 128
    warmup: int = 16

    def __post_init__(self) -> None:
        factor, window = number(self.factor, "factor"), number(self.window, "window", whole=True)
        if not 1.0 < factor < math.inf:
            raise ValueError(f"factor is {self.factor}; expected a number above 1")
        if not 1 <= number(self.warmup, "warmup", whole=True) <= window <= 2**16:
            raise ValueError(
                f"warmup is {self.warmup} and window {self.window}; expected 1 <= warmup <= window <= {2**16}"
            )


def checked(limit: Any) -> float | TimesMedian | None:
    """A limit as `GradScaler(skip_above=...)` takes it; raises `TypeError` or `ValueError` for anything else."""
    if limit is None or isinstance(limit, TimesMedian):
        return limit
    norm = number(limit, "skip_above")
    if not 0.0 < norm < math.inf:
        raise ValueError(f"skip_above is {limit}; expected a positive finite number, the norm above which to skip")
    return norm


def is_outlier(norm: Tensor, limit: float | Tensor) -> Tensor:
    """1.0 for a norm above the limit, and for one that is inf or NaN; else 0.0. Never syncs."""
    return (~((norm <= limit) & torch.isfinite(norm))).float()


class RecentNorms:
    """The last finite norms of one optimizer, on its device.

    Args:
        rule: how many, and what they limit.
        device: where the norms are.
        saved: those of an earlier run, oldest first.
    """

    def __init__(self, rule: TimesMedian, device: torch.device, saved: Sequence[float] = ()) -> None:
        self._rule = rule
        self._ring = torch.empty(rule.window, dtype=torch.float32, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self.load(saved)

    def load(self, saved: Sequence[float]) -> None:
        """Go on from these norms, oldest first; tensors keep their addresses."""
        kept = saved[-self._rule.window :]
        self._ring.fill_(math.inf)
        if kept:
            self._ring[: len(kept)] = torch.tensor(kept, dtype=torch.float32, device="cpu")
        self._count.fill_(len(kept))

    def judge(self, norm: Tensor) -> Tensor:
        """`is_outlier` beside the norms so far, to which this one is added. Never syncs."""
        rule, norm = self._rule, norm.detach().float()
        known = self._count.clamp(max=rule.window)
        middle = (known - 1).clamp(min=0) // 2
        # `torch.nanmedian` would wait for the device
        median = self._ring.sort().values.index_select(0, middle.reshape(1)).reshape(())
        has_limit = (known >= rule.warmup) & (median > 0)
        place = (self._count % rule.window).reshape(1)
        finite = torch.isfinite(norm)
        self._ring.index_copy_(0, place, torch.where(finite, norm, self._ring.index_select(0, place)).reshape(1))
        self._count.add_(finite)
        return is_outlier(norm, torch.where(has_limit, median * rule.factor, math.inf))

    def norms(self) -> list[float]:
        """The norms, oldest first. Reads the device."""
        ring, count = self._ring.tolist(), int(self._count)
        oldest = count % len(ring) if count > len(ring) else 0
        return [*ring[oldest:], *ring[:oldest]][:count]
