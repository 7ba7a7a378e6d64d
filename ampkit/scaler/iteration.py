"""What happens between two updates of a scaler: a record per optimizer, and notes for the history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients import ranks
from ampkit.scaler.live_scale import LiveScale
from ampkit.scaler.optimizer_record import OptimizerRecord
from ampkit.scaler.shared_gradients import SharedGradients


class Iteration:
    """The current iteration.

    `records` is torch's dict by `id(optimizer)`, which other code may replace; `norm` is the largest norm that was
    clipped, `scale_used` a copy of the scale that gradients were unscaled by and `inv_scale` its inverse, each None if
    there is none; `scale_calls` counts calls of `scale`.
    """

    def __init__(self) -> None:
        self.shared = SharedGradients()
        self.begin()

    def begin(self) -> None:
        """Begin the next one. `records` becomes a new dict, as in torch; the old one stays valid for who holds it."""
        self.records: MutableMapping[int, Any] = defaultdict(OptimizerRecord)
        self.shared.losses = []
        self.norm: Tensor | None = None
        self.scale_used: Tensor | None = None
        self.inv_scale: Tensor | None = None
        self.scale_calls = 0

    def keep_versions(self, _: Tensor | None = None) -> None:
        """A backward pass may follow; also as a hook of a scaled loss."""
        self.shared.keep_versions(self.records)

    def record_of(self, optimizer: Any) -> OptimizerRecord:
        """What is known about an optimizer."""
        record = self.records[id(optimizer)]
        if type(record) is not OptimizerRecord:  # made by code that knows torch's scaler
            record = self.records[id(optimizer)] = OptimizerRecord.of(record)
        record.optimizer = optimizer
        return record

    def note_norm(self, norm: Tensor) -> None:
        """Keep the largest norm for the history."""
        self.norm = norm if self.norm is None else torch.maximum(self.norm, norm.to(self.norm))

    def advance(self, live: LiveScale) -> None:
        """Update the scale from the flags of the checks.

        Raises:
            AssertionError: nothing has been checked, unscaled or stepped.
        """
        flags: list[Tensor] = []
        known_finite = idle = True
        for state in self.records.values():
            record = OptimizerRecord.of(state)
            flags += record.found_inf_per_device.values()
            known_finite = known_finite and record.known_finite
            idle = idle and record.stage is OptState.READY
        if flags:
            found_inf = ranks.combined(flags, live.tensor.device)
            live.advance(found_inf, self.norm, self.scale_used, known_finite=known_finite)
        elif idle:
            raise AssertionError(
                "No inf checks were recorded prior to update. Call scaler.step(optimizer), or scaler.unscale_, in "
                "every iteration before update()."
            )
