"""Counts of a scaler's steps, skips and updates, and the last updates, read on request.

An update appends a few 0-d tensors to a list, and launches nothing for them. Blocks of updates are added to the counts.
Only `History.totals`, `History.to_dict` and `History.rows` wait for the device. Steps and updates inside a CUDA graph
capture are not counted, and neither are its replays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import ampkit_kernels

_BLOCK = 256
"""Updates that are added to the counts together, by a few launches."""
_ROWS = 1000
"""Maximum number of updates in `rows`."""


@dataclass(frozen=True)
class ScalerStats:
    """Counts over all optimizers, since the scaler was made; a loaded state continues its own counts.

    Args:
        scale: the current loss scale.
        updates: calls of `update()`.
        steps: optimizer steps that were executed.
        skips: optimizer steps that were skipped for inf or NaN.
        no_gradients: optimizer steps that found no gradients.
        overflows: updates after an inf or NaN.
        consecutive_skips: overflows since the last update without one.
        growths: updates that raised the scale.
        backoffs: updates that lowered the scale.
        outliers: optimizer steps that were skipped only for a norm above `skip_above`.
    """

    scale: float
    updates: int = 0
    steps: int = 0
    skips: int = 0
    no_gradients: int = 0
    overflows: int = 0
    consecutive_skips: int = 0
    growths: int = 0
    backoffs: int = 0
    outliers: int = 0


_COUNTED = ("updates", "overflows", "consecutive_skips", "growths", "backoffs", "attempts", "skips", "outliers")
COUNTS = frozenset({*_COUNTED, "no_gradients"})
"""The keys of `History.to_dict`."""


class _Update(NamedTuple):
    """One iteration: its scale, its flag, its norm, and whether a step was skipped only for the norm, each 0-d."""

    scale: Tensor
    found_inf: Tensor
    norm: Tensor | None
    outlier: Tensor | None


class History:
    """Counters on one device, and the last updates.

    Args:
        device: the device of the scale.
        saved: counts to continue, from `to_dict`.

    Attributes:
        no_gradients: optimizer steps that found no gradients.
    """

    def __init__(self, device: torch.device, saved: Mapping[str, int]) -> None:
        start = [saved.get(name, 0) for name in _COUNTED]
        self._totals = torch.tensor(start, dtype=torch.int64, device="cpu").to(device)
        self._device = self._totals.device
        self.no_gradients = saved.get("no_gradients", 0)
        self._steps: list[Tensor] = []  # flags of inf and NaN
        self._outliers: list[Tensor] = []  # flags of steps that were skipped only for their norm
        self._updates: list[_Update] = []
        self._rows: deque[_Update] = deque(maxlen=_ROWS)

    def note_step(self, found_inf: Tensor, outlier: Tensor | None = None) -> None:
        """Note an optimizer step with its 0-d flags: inf or NaN was found, or (a bool) only the norm was too large."""
        if ampkit_kernels.is_capturing(self._device):
            return
        self._steps.append(found_inf)
        if outlier is not None:
            self._outliers.append(outlier)

    def note_update(self, scale: Tensor, found_inf: Tensor, norm: Tensor | None, outlier: Tensor | None = None) -> bool:
        """Note an update, with a copy of the scale that the iteration used and the norm of its gradients.

        Returns whether to `fold` after the scale has changed.
        """
        if ampkit_kernels.is_capturing(self._device):
            return False
        update = _Update(scale, found_inf, norm, outlier)
        self._rows.append(update)
        self._updates.append(update)
        return len(self._updates) >= _BLOCK

    def fold(self, scale: Tensor) -> None:
        """Add pending steps and updates to the counts; `scale` is the scale after them. Never synchronizes."""
        if ampkit_kernels.is_capturing(self._device):
            return
        steps, outliers, updates = self._steps, self._outliers, self._updates
        self._steps, self._outliers, self._updates = [], [], []
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        skips = (torch.stack(steps) != 0).sum() if steps else zero
        skipped_for_norm = torch.stack(outliers).sum() if outliers else zero
        counts = [zero] * 5
        if updates:
            n = len(updates)
            before, overflow = torch.stack([update.scale for update in updates]), _overflows(updates)
            after = torch.cat((before[1:], scale.detach().reshape(1)))
            # position (from 1) of the last clean update; 0 when there is none
            last_clean = (torch.arange(1, n + 1, device=overflow.device) * ~overflow).max()
            in_a_row = torch.where(last_clean > 0, n - last_clean - self._totals[2], n)  # added to the count so far
            counts = [zero + n, overflow.sum(), in_a_row, (after > before).sum(), (after < before).sum()]
        self._totals += torch.stack([*counts, zero + len(steps), skips, skipped_for_norm])

    def totals(self, scale: Tensor) -> ScalerStats:
        """Return all counts so far. Reads the device once."""
        self.fold(scale)
        *totals, scale_now = torch.cat((self._totals.double(), scale.detach().double().reshape(1))).tolist()
        counts = {name: int(count) for name, count in zip(_COUNTED, totals, strict=True)}
        steps = counts.pop("attempts") - counts["skips"] - counts["outliers"]
        return ScalerStats(scale=scale_now, steps=steps, no_gradients=self.no_gradients, **counts)

    def to_dict(self, scale: Tensor) -> dict[str, int]:
        """Return the counts as plain integers for a checkpoint, without rows. Reads the device once."""
        self.fold(scale)
        counts = zip(_COUNTED, self._totals.tolist(), strict=True)
        return {**dict(counts), "no_gradients": self.no_gradients}

    def rows(self, scale: Tensor, most: int = _ROWS) -> list[dict[str, Any]]:
        """Return the last updates, `most` at most, as `GradScaler.history` does. Reads the device once."""
        self.fold(scale)
        updates = list(self._rows)[-most:]
        if not updates:
            return []
        zero = torch.zeros((), device=self._device)
        norms = [zero if update.norm is None else update.norm for update in updates]
        outliers = [zero if update.outlier is None else update.outlier for update in updates]
        scales = torch.stack([update.scale for update in updates])
        columns = scales, _overflows(updates), torch.stack(norms), torch.stack(outliers)
        number = self._totals[:1].double().expand(len(updates))  # as a column, so that one read is enough
        table = torch.stack([number, *(column.double() for column in columns)], dim=1).tolist()
        return [
            {
                "update": int(number) - len(updates) + i,
                "scale": used,
                "overflow": bool(overflow),
                "grad_norm": None if update.norm is None else norm,
                "outlier": bool(outlier),
            }
            for i, (update, (number, used, overflow, norm, outlier)) in enumerate(zip(updates, table, strict=True), 1)
        ]


def _overflows(updates: Sequence[_Update]) -> Tensor:
    """Return a vector of bools: whether each update overflowed."""
    return torch.stack([update.found_inf for update in updates]) != 0
