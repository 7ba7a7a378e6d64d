"""Counts of a scaler's steps, skips and updates, kept on the device and read on request.

`History` keeps a few 0-d tensors per update and adds them up in blocks, so that an update costs one small copy and no
synchronization. Only `History.totals`, `History.to_dict` and `History.rows` wait for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

import ampkit_kernels

_BLOCK = 256
"""Updates that are added to the totals at once, by a few launches."""
_ROWS = 1000
"""Maximum number of updates kept for `rows`."""


@dataclass(frozen=True)
class ScalerStats:
    """Counts over all optimizers, since the scaler was made; a loaded state continues its own counts.

    Args:
        scale: the current loss scale.
        updates: calls of `update()`.
        steps: optimizer steps that were taken.
        skips: optimizer steps that were skipped for inf or NaN.
        no_gradients: optimizer steps that found no gradients.
        overflows: updates after an inf or NaN.
        consecutive_skips: overflows since the last update without one.
        growths: updates that raised the scale.
        backoffs: updates that lowered the scale.
        outliers: optimizer steps that were skipped for a norm above `skip_above` alone.
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
_AT = {name: i for i, name in enumerate(_COUNTED)}
COUNTS = frozenset({*_COUNTED, "no_gradients"})
"""The keys of `History.to_dict`."""

_Update = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""An iteration's scale, its flag, its norm if it has one, and whether a step was skipped for the norm alone."""


class History:
    """Counters on one device, and the last updates.

    During a CUDA graph capture steps and updates are added to the totals within the graph, so that its replays count.
    Earlier ones wait until the capture has ended: a replay must not count them again, nor read memory that has been
    freed. Once there is a graph, a replay may change the scale between any two updates that the host sees, and each of
    these is added at once.

    Args:
        device: the device of the scale.
        saved: counts to continue, from `to_dict`.

    Attributes:
        no_gradients: optimizer steps that found no gradients.
        may_be_captured: whether the device is one that CUDA graphs are captured on.
    """

    def __init__(self, device: torch.device, saved: Mapping[str, int]) -> None:
        start = [saved.get(name, 0) for name in _COUNTED]
        self._totals = torch.tensor(start, dtype=torch.int64, device="cpu").to(device)
        self.no_gradients = saved.get("no_gradients", 0)
        self._device = self._totals.device
        self.may_be_captured = device.type == "cuda"
        self._steps: dict[bool, list[Tensor]] = {False: [], True: []}  # flags, under capture (True) or not
        self._updates: dict[bool, list[_Update]] = {False: [], True: []}
        self._has_updates = self._has_graph = False
        self._rows: deque[_Update] = deque(maxlen=_ROWS)

    def note_step(self, found_inf: Tensor, outlier: Tensor | None = None) -> None:
        """Note an optimizer step with its 0-d flags: inf or NaN was found, or (a bool) only the norm was too large."""
        if outlier is not None:
            self._totals[_AT["outliers"]].add_(outlier)
        captured = self.may_be_captured and ampkit_kernels.is_capturing(self._device)
        self._steps[captured].append(found_inf)

    def note_update(
        self, scale: Tensor, found_inf: Tensor, norms: Collection[Tensor], outlier: Tensor | None = None
    ) -> bool:
        """Note an update, with a copy of the scale that the iteration used and the norms, of which the largest counts.

        Returns whether to `fold` once the scale has changed: if a block is full, always during and after a CUDA graph
        capture, and the first time, because a capture must find its kernels loaded.
        """
        norm = reduce(torch.maximum, norms) if norms else None
        captured = self.may_be_captured and ampkit_kernels.is_capturing(self._device)
        update = scale, found_inf, norm, outlier
        if captured:
            self._has_graph = True
        else:
            self._rows.append(update)
        self._updates[captured].append(update)
        first, self._has_updates = not self._has_updates, True
        return first or self._has_graph or len(self._updates[captured]) >= _BLOCK

    def fold(self, scale: Tensor) -> None:
        """Add pending steps and updates to the totals; `scale` is the scale after them. Never synchronizes."""
        captured = self.may_be_captured and ampkit_kernels.is_capturing(self._device)
        steps, updates = self._steps[captured], self._updates[captured]
        self._steps[captured], self._updates[captured] = [], []
        if steps:
            self._totals[_AT["attempts"]].add_(len(steps))
            self._totals[_AT["skips"]].add_((torch.stack(steps) != 0).sum())
        if not updates:
            return
        n = len(updates)
        before, overflow = _stacked(updates)
        after = torch.cat((before[1:], scale.detach().reshape(1)))
        # position (from 1) of the last clean update; 0 when there is none
        last_clean = (torch.arange(1, n + 1, device=overflow.device) * ~overflow).max()
        in_a_row = self._totals[_AT["consecutive_skips"]]
        in_a_row.copy_(torch.where(last_clean > 0, n - last_clean, in_a_row + n))
        self._totals[_AT["updates"]].add_(n)
        for name, happened in (("overflows", overflow), ("growths", after > before), ("backoffs", after < before)):
            self._totals[_AT[name]].add_(happened.sum())

    def totals(self, scale: Tensor) -> ScalerStats:
        """All counts so far. Reads the device once."""
        self.fold(scale)
        *totals, scale_now = torch.cat((self._totals.double(), scale.detach().double().reshape(1))).tolist()
        counts = {name: int(count) for name, count in zip(_COUNTED, totals, strict=True)}
        steps = counts.pop("attempts") - counts["skips"] - counts["outliers"]
        return ScalerStats(scale=scale_now, steps=steps, no_gradients=self.no_gradients, **counts)

    def to_dict(self, scale: Tensor) -> dict[str, int]:
        """The counts as plain integers for a checkpoint, without rows. Reads the device once."""
        self.fold(scale)
        counts = zip(_COUNTED, self._totals.tolist(), strict=True)
        return {**dict(counts), "no_gradients": self.no_gradients}

    def rows(self, scale: Tensor) -> list[dict[str, Any]]:
        """The last updates as `GradScaler.history` has them. Waits for the device."""
        self.fold(scale)
        if not self._rows:
            return []
        before, overflow = _stacked(self._rows)
        norms = torch.stack([before[0] if norm is None else norm.to(before) for _, _, norm, _ in self._rows])
        outliers = torch.stack([before[0] * 0 if flag is None else flag.to(before) for *_, flag in self._rows])
        table = torch.stack((before, overflow, norms, outliers), dim=1).tolist()
        first = int(self._totals[_AT["updates"]]) - len(table) + 1
        rows = []
        for i, (values, (_, _, norm, _)) in enumerate(zip(table, self._rows, strict=True)):
            scale_used, overflowed, grad_norm, outlier = values
            rows.append(
                {
                    "update": first + i,
                    "scale": scale_used,
                    "overflow": bool(overflowed),
                    "grad_norm": None if norm is None else grad_norm,
                    "outlier": bool(outlier),
                }
            )
        return rows


def _stacked(updates: Sequence[_Update]) -> tuple[Tensor, Tensor]:
    """For each update, as vectors, the scale that it used, in float32, and whether it overflowed."""
    scales, flags, *_ = zip(*updates, strict=True)
    return torch.stack([used.float() for used in scales]), torch.stack(flags) != 0
