"""What a scaler did, counted on the device and read on request.

`History` notes a few 0-d tensors per update and sums them up in blocks, so that an update costs one small copy and no
host sync; where Triton runs, an update that is summed up by itself, as every replay of a CUDA graph does, is one
launch. Only reading (`History.totals`, `History.to_dict`, `History.rows`) waits for the device.
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
"""Updates between two foldings: a few launches spread over this many iterations."""
_ROWS = 1000
"""Updates that `History.rows` goes back."""


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

# the first seven as `tally_update_` has them
_COUNTED = ("updates", "overflows", "consecutive_skips", "growths", "backoffs", "attempts", "skips", "outliers")
_AT = {name: i for i, name in enumerate(_COUNTED)}
COUNTS = frozenset({*_COUNTED, "no_gradients"})
"""The names under which `History.to_dict` saves its counts."""


_Update = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""The scale that an iteration used, its flag, its gradient norm if known, whether a step was skipped for that alone."""


class History:
    """Counters on one device, and the last updates.

    Notes taken under CUDA graph capture are summed up within the graph, so that its replays count; those taken
    before it wait until after it, because a replay must not count them again, nor read memory that is gone by then.
    Once there is a graph, its replays may move the scale between any two updates that the host sees: each of these
    is summed up at once.

    Args:
        device: where the scale lives.
        saved: counts of an earlier history, from `to_dict`.

    Attributes:
        triton: the kernels for a scaler's single numbers (`ampkit_kernels.triton_ops`), None where Triton does not run
            on the device.
        no_gradients: optimizer steps that found no gradients.
        may_be_captured: whether the device is one that CUDA graphs are captured on.
    """

    def __init__(self, device: torch.device, saved: Mapping[str, int]) -> None:
        start = [saved.get(name, 0) for name in _COUNTED]
        self._totals = torch.tensor(start, dtype=torch.int64, device="cpu").to(device)
        ops: Any = ampkit_kernels.backend(self._totals)
        self.triton = None if ops is ampkit_kernels.reference else ops
        self.no_gradients = saved.get("no_gradients", 0)
        self._device = self._totals.device
        self.may_be_captured = device.type == "cuda"
        self._steps: dict[bool, list[Tensor]] = {False: [], True: []}       # flags, under capture (True) or not
        self._updates: dict[bool, list[_Update]] = {False: [], True: []}
        self._has_updates = self._has_graph = False
        self._rows: deque[_Update] = deque(maxlen=_ROWS)

    def note_step(self, found_inf: Tensor, outlier: Tensor | None = None) -> None:
        """Note an optimizer step, skipped where a 0-d flag is set: for inf or NaN, or, a bool, only for the norm."""
        if outlier is not None:
            self._totals[_AT["outliers"]].add_(outlier)
        captured = self.may_be_captured and ampkit_kernels.is_capturing(self._device)
        self._steps[captured].append(found_inf)

    def note_update(
        self, scale: Tensor, found_inf: Tensor, norms: Collection[Tensor], outlier: Tensor | None = None
    ) -> bool:
        """Note an update: a copy of the scale that the iteration used, and what else `_Update` has; the largest norm.

        Returns whether to `fold` once the scale has moved: when a block is full, always under CUDA graph capture and
        after it, and the first time, because a capture must find its kernels loaded.
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
        """Add what is pending to the totals; `scale` is the scale after the last noted update. Never syncs."""
        captured = self.may_be_captured and ampkit_kernels.is_capturing(self._device)
        steps, updates = self._steps[captured], self._updates[captured]
        self._steps[captured], self._updates[captured] = [], []
        if len(updates) == 1 and self._tally(updates[0], steps, scale):
            return
        if steps:
            self._totals[_AT["attempts"]].add_(len(steps))
            self._totals[_AT["skips"]].add_((torch.stack(steps) != 0).sum())
        if not updates:
            return
        n, (before, overflow) = len(updates), _stacked(updates)
        after = torch.cat((before[1:], scale.detach().reshape(1)))
        # position (from 1) of the last clean update; 0 when there is none
        last_clean = (torch.arange(1, n + 1, device=overflow.device) * ~overflow).max()
        run = self._totals[_AT["consecutive_skips"]]
        run.copy_(torch.where(last_clean > 0, n - last_clean, run + n))
        self._totals[_AT["updates"]].add_(n)
        for name, happened in (("overflows", overflow), ("growths", after > before), ("backoffs", after < before)):
            self._totals[_AT[name]].add_(happened.sum())

    def _tally(self, update: _Update, steps: list[Tensor], scale: Tensor) -> bool:
        """Add one update to the totals, in one launch; False, with nothing done, where there is no kernel for that."""
        used, flag, *_ = update
        if self.triton is None or any(
            each.dtype is not torch.float32 or each.device != scale.device for each in (scale, used, flag, *steps)
        ):
            return False
        self.triton.tally_update_(self._totals, used, scale, flag, steps)
        return True

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
        """The last updates, oldest first, as plain dicts. Waits for the device.

        Keys: `update` (counted from 1), `scale` (the one the iteration used), `overflow`, `grad_norm`, None where the
        iteration took no norm, and `outlier`: a step was skipped for its norm alone.
        """
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
            rows.append({
                "update": first + i, "scale": scale_used, "overflow": bool(overflowed),
                "grad_norm": None if norm is None else grad_norm, "outlier": bool(outlier),
            })
        return rows


def _stacked(updates: Sequence[_Update]) -> tuple[Tensor, Tensor]:
    """The scales that updates used, in float32, and whether each overflowed."""
    scales, flags, *_ = zip(*updates, strict=True)
    return torch.stack([used.float() for used in scales]), torch.stack(flags) != 0
