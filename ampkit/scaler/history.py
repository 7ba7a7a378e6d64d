"""What a scaler did, counted on the device and read on request.

`History` notes a few 0-d tensors per update and sums them up in blocks, so that an update costs one small copy and no
host sync; an update that is summed up by itself, as every replay of a CUDA graph does, is one launch. Only reading
(`History.totals`, `History.to_dict`, `History.rows`) waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

import ampkit_kernels

_BLOCK = 256
"""Updates between two foldings: a few launches spread over this many iterations."""


@dataclass(frozen=True)
class ScalerStats:
    """Counts since the scaler was made (or since the checkpoint that it loaded was begun).

    `steps` and `skips` count optimizer steps taken and skipped for inf or NaN, over all optimizers, `outliers` those
    skipped for a norm above `skip_above`, `no_gradients` those that found nothing to do. The rest count `update()`
    calls: `overflows` with a non-finite gradient, `consecutive_skips` the overflows since the last clean one, `growths`
    and `backoffs` changes of the scale.
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

    def as_dict(self) -> dict[str, float]:
        """Plain numbers, for TensorBoard's add_scalar or wandb.log."""
        return {f.name: getattr(self, f.name) + 0 for f in fields(self)}


_COUNTED = ("updates", "overflows", "consecutive_skips", "growths", "backoffs", "attempts", "skips", "outliers")
_dtype_of = attrgetter("dtype")
_AT = {name: i for i, name in enumerate(_COUNTED)}
COUNTS = frozenset({*_COUNTED, "no_gradients"})
"""The names under which `History.to_dict` saves its counts."""


_Update = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""The scale that an iteration used, its flag, its gradient norm if known, whether a step was skipped for that alone."""


class _Notes:
    """What is not yet summed up: flags of steps, and updates."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.updates: list[_Update] = []


class History:
    """Counters on one device, and the last updates.

    Notes taken under CUDA graph capture are summed up within the graph, so that its replays count; those taken
    before it wait until after it, because a replay must not count them again, nor read memory that is gone by then.
    Once there is a graph, its replays may move the scale between any two updates that the host sees: each of these
    is summed up at once.

    Args:
        device: where the scale lives.
        size: updates to keep for `rows`; 0 keeps none.
        saved: counts of an earlier history, from `to_dict`.

    Attributes:
        triton: the kernels for a scaler's single numbers (`ampkit_kernels.triton_ops`), None where Triton does not run
            on the device.
        no_gradients: optimizer steps that found no gradients.
    """

    def __init__(self, device: torch.device, size: int, saved: dict[str, int] | None = None) -> None:
        saved = saved or {}
        start = [int(saved.get(name, 0)) for name in _COUNTED]
        self._totals = torch.tensor(start, dtype=torch.int64, device="cpu").to(device)
        ops: Any = ampkit_kernels.backend(self._totals)
        self.triton = None if ops is ampkit_kernels.reference else ops
        self.no_gradients = int(saved.get("no_gradients", 0))
        self._device = self._totals.device
        self._notes, self._captured = _Notes(), _Notes()
        self._has_graph = False
        self._has_updates = False
        self._rows: deque[_Update] = deque(maxlen=size)

    def note_step(self, found_inf: Tensor, outlier: Tensor | None = None) -> None:
        """Note an optimizer step, skipped where a 0-d flag is set: for inf or NaN, or, a bool, only for the norm."""
        if outlier is not None:
            self._totals[_AT["outliers"]].add_(outlier)
        (self._captured if ampkit_kernels.is_capturing(self._device) else self._notes).steps.append(found_inf)

    def note_update(
        self, scale: Tensor, found_inf: Tensor, norm: Tensor | None, outlier: Tensor | None = None
    ) -> bool:
        """Note an update: a copy of the scale that the iteration used, and what else `_Update` has.

        Returns whether to `fold` once the scale has moved: when a block is full, always under CUDA graph capture and
        after it, and at once where a kernel does it, which has to be loaded before a capture.
        """
        notes, update = self._notes, (scale, found_inf, norm, outlier)
        if ampkit_kernels.is_capturing(self._device):
            notes, self._has_graph = self._captured, True
        else:
            self._rows.append(update)
        notes.updates.append(update)
        first, self._has_updates = not self._has_updates, True
        return self._has_graph or (first and self.triton is not None) or len(notes.updates) >= _BLOCK

    def fold(self, scale: Tensor) -> None:
        """Add what is pending to the totals; `scale` is the scale after the last noted update. Never syncs."""
        if ampkit_kernels.is_capturing(self._device):
            notes, self._captured = self._captured, _Notes()
        else:
            notes, self._notes = self._notes, _Notes()
        if len(notes.updates) == 1 and self._tally(notes, scale):
            return
        if notes.steps:
            self._totals[_AT["attempts"]] += len(notes.steps)
            self._totals[_AT["skips"]] += (torch.stack(notes.steps) != 0).sum()
        if notes.updates:
            self._sum_up(*_stacked(notes.updates), scale)

    def _tally(self, notes: _Notes, scale: Tensor) -> bool:
        """Add one update to the totals, in one launch; False, with nothing done, where there is no kernel for that."""
        used, flag, *_ = notes.updates[0]
        if self.triton is None or any(
            each.dtype is not torch.float32 or each.device != scale.device for each in (scale, used, flag, *notes.steps)
        ):
            return False
        self.triton.tally_update_(self._totals, used, scale, flag, notes.steps)
        return True

    def _sum_up(self, before: Tensor, overflow: Tensor, scale: Tensor) -> None:
        """Add any number of updates to the totals, with torch's operators."""
        n = len(before)
        after = torch.cat((before[1:], scale.detach().reshape(1)))
        # position (from 1) of the last clean update; 0 when there is none
        last_clean = (torch.arange(1, n + 1, device=overflow.device) * ~overflow).max()
        run = self._totals[_AT["consecutive_skips"]]
        run.copy_(torch.where(last_clean > 0, n - last_clean, run + n))
        self._totals[_AT["updates"]] += n
        self._totals[_AT["overflows"]] += overflow.sum()
        self._totals[_AT["growths"]] += (after > before).sum()
        self._totals[_AT["backoffs"]] += (after < before).sum()

    def totals(self, scale: Tensor) -> ScalerStats:
        """Everything counted so far. One host read."""
        self.fold(scale)
        *counts, value = torch.cat((self._totals.double(), scale.detach().double().reshape(1))).tolist()
        known = {name: int(count) for name, count in zip(_COUNTED, counts, strict=True)}
        steps = known.pop("attempts") - known["skips"] - known["outliers"]
        return ScalerStats(scale=value, steps=steps, no_gradients=self.no_gradients, **known)

    def to_dict(self, scale: Tensor) -> dict[str, int]:
        """The counts as plain integers for a checkpoint; rows are not kept. One host read."""
        self.fold(scale)
        counts = zip(_COUNTED, self._totals.tolist(), strict=True)
        return {**dict(counts), "no_gradients": self.no_gradients}

    def rows(self, scale: Tensor) -> list[dict[str, Any]]:
        """The last updates, oldest first, as plain dicts. One host read.

        Keys: `update` (counted from 1), `scale` (the one the iteration used), `overflow`, `grad_norm`, None where the
        iteration took no norm, and `outlier`: a step was skipped for its norm alone.
        """
        self.fold(scale)
        if not self._rows:
            return []
        before, overflow = _stacked(self._rows)
        norms = torch.stack([before[0] if norm is None else norm.to(before) for _, _, norm, _ in self._rows])
        outliers = torch.stack([before[0] * 0 if flag is None else flag.to(before) for *_, flag in self._rows])
        table = torch.stack((before, overflow, norms, outliers), dim=1).double()
        *values, last = torch.cat((table.flatten(), self._totals[_AT["updates"]].double().reshape(1))).tolist()
        first = int(last) - len(self._rows) + 1
        return [
            {
                "update": first + i,
                "scale": values[4 * i],
                "overflow": bool(values[4 * i + 1]),
                "grad_norm": None if norm is None else values[4 * i + 2],
                "outlier": bool(values[4 * i + 3]),
            }
            for i, (_, _, norm, _) in enumerate(self._rows)
        ]


def _stacked(updates: Sequence[_Update]) -> tuple[Tensor, Tensor]:
    """The scales that updates used, in float32, and whether each overflowed."""
    scales, flags, *_ = zip(*updates, strict=True)
    # copies come as float32 or float64; one conversion of the block is cheaper than one of each
    alike = len(set(map(_dtype_of, scales))) == 1
    before = torch.stack(scales if alike else [used.float() for used in scales]).float()
    return before, torch.stack(flags) != 0
