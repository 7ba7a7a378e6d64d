"""Casts that an optimizer's step brings up to date, in place of dropping them: `WeightCache.follow`.

An optimizer that can, writes them itself, in the launch that writes the weights. Those of any other are written in one
call per dtype when the next region is entered, from the weights as they are then. Either way the memory of a cast stays
and its version moves, as a weight's does: it may be saved for backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ampkit.region.optimizer_steps import Step, capturing, seen
from ampkit.region.unseen_writes import collectives
from ampkit.torch_internals.optimizers import foreach_copy_

__all__ = ["UNUSED", "FollowedCasts"]

Key = tuple[int, torch.dtype]
UNUSED = -1     # the epoch of a cast that no region has used since it was written
_STALE = -1     # the version of a cast that is not its weight's


class FollowedCasts:
    """What a `WeightCache` does for the optimizers that it follows, and what those of `ampkit.optim` ask in a step."""

    def __init__(self, entries: Mapping[Key, Any]) -> None:
        self._entries = entries
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stale: dict[Key, None] = {}

    def add(self, optimizer: Any) -> None:
        """Follow this optimizer, as long as it lives."""
        self._optimizers.add(optimizer)

    def not_followed(self, step: Step, outdated: list[Key]) -> list[Key]:
        """Of the casts that a step outdates those to drop: of weights that it does not hold, and of unused ones."""
        if step.optimizer not in self._optimizers:
            return outdated
        dropped = []
        for key in outdated:
            entry = self._entries.get(key)
            if entry is None or (key in self._stale and entry.version == _STALE):
                continue
            if key[0] not in step.held or entry.epoch == UNUSED:
                dropped.append(key)
                continue
            if entry.writer != id(step.optimizer) or step.later or step.everything:
                entry.version = _STALE
                self._stale[key] = None
            entry.writer, entry.epoch, entry.cast = None, UNUSED, entry.cast.detach()
        return dropped

    def casts_to_write(self, optimizer: Any) -> dict[Tensor, Tensor]:
        """Casts that an optimizer is about to write, by weight: right as of now, for the step may be skipped.

        Where it is interrupted, caches are told of the step before they are used. None while a CUDA graph is captured:
        its replays would go on writing where a cast was.
        """
        found: dict[Tensor, Tensor] = {}
        if capturing():
            return found
        held = {id(param) for group in optimizer.param_groups for param in group["params"] if param.grad is not None}
        for key, entry in list(self._entries.items()):
            weight = entry.weight() if key[0] in held else None
            if (
                weight is None or weight in found or entry.epoch == UNUSED or entry.version != weight._version
                or entry.address is None or entry.address != weight.data_ptr() or weight.dtype is not torch.float32
                or (weight.shape, weight.stride()) != entry.layout or entry.cast.stride() != weight.stride()
            ):
                continue
            if entry.values is None:
                entry.values = entry.cast.detach()
            found[weight] = entry.values
        return found

    def casts_written(self, optimizer: Any, casts: Mapping[Tensor, Tensor], *, changed: bool) -> None:
        """An optimizer has written these casts with their weights; not `changed`, if it skipped the step."""
        if changed:
            torch.autograd.graph.increment_version(list(casts.values()))
        for weight, values in casts.items():
            entry = self._entries.get((id(weight), values.dtype))
            if entry is not None and entry.values is values:
                entry.cast, entry.version, entry.writer = values, weight._version, id(optimizer)

    def refresh(self, keeps: Callable[[Tensor], bool]) -> tuple[int, list[Key]]:
        """Write what is out of date. Returns how many casts that were, and those to drop: of weights that moved."""
        keys, dropped = list(self._stale), []
        lists: dict[tuple[torch.device, torch.dtype], tuple[list[Any], list[Tensor], list[Tensor]]] = {}
        begun = collectives()
        for key in keys:
            entry = self._entries.get(key)
            weight = None if entry is None else entry.weight()
            if entry is None or weight is None or entry.version != _STALE:
                continue
            moved = entry.address is None or entry.address != weight.data_ptr() or weight.shape != entry.cast.shape
            if moved or not keeps(weight):
                dropped.append(key)
                continue
            entry.layout, entry.collectives, entry.steps = (weight.shape, weight.stride()), begun, seen.count
            entries, casts, weights = lists.setdefault((weight.device, key[1]), ([], [], []))
            entries.append((entry, weight._version))
            casts.append(entry.cast.detach())
            weights.append(weight.detach())
        with torch.inference_mode(False), torch.no_grad():
            for entries, casts, weights in lists.values():
                foreach_copy_(casts, weights)
                for entry, version in entries:
                    entry.version = version
        for key in keys:
            self._stale.pop(key, None)
        return sum(len(entries) for entries, _, _ in lists.values()), dropped
