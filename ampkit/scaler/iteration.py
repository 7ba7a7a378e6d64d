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
from ampkit.scaler.optimizer_record import OptimizerRecord, fresh_state
from ampkit.scaler.shared_gradients import SharedGradients


class Iteration:
    """The current iteration.

    `states` is torch's dict by `id(optimizer)`, which other code may replace; `records` what is known beside it; `norm`
    is the largest norm that was clipped, `scale_used` a copy of the scale that gradients were unscaled by and
    `inv_scale` its inverse, each None if there is none; `scale_calls` counts calls of `scale`.
    """

    def __init__(self) -> None:
        self.shared = SharedGradients()
        self.begin()

    def begin(self) -> None:
        """Begin the next one. `states` becomes a new dict, as in torch; the old one stays valid for who holds it."""
        self._states: MutableMapping[int, Any] = defaultdict(fresh_state)
        self.records: dict[int, OptimizerRecord] = {}
        self.shared.losses = []
        self.norm: Tensor | None = None
        self.scale_used: Tensor | None = None
        self.inv_scale: Tensor | None = None
        self.scale_calls = 0

    def keep_versions(self, _: Tensor | None = None) -> None:
        """A backward pass may follow; also as a hook of a scaled loss."""
        self.shared.keep_versions(self.records)

    @property
    def states(self) -> MutableMapping[int, Any]:
        """torch's dict. Setting it begins an iteration: that is how torch's `update` ends, and those of others."""
        return self._states

    @states.setter
    def states(self, states: MutableMapping[int, Any]) -> None:
        self.begin()
        self._states = states

    def record_of(self, optimizer: Any) -> OptimizerRecord:
        """What is known about an optimizer. Its state is the one in `states`, whoever made it."""
        state = self._states[id(optimizer)]
        record = self.records.get(id(optimizer))
        if record is None or record.state is not state:
            record = self.records[id(optimizer)] = OptimizerRecord(state)
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
        for key, state in self._states.items():
            flags += state["found_inf_per_device"].values()
            known_finite = known_finite and key in self.records and self.records[key].known_finite
            idle = idle and state.get("stage", OptState.READY) is OptState.READY
        if flags:
            found_inf = ranks.combined(flags, live.tensor.device)
            live.advance(found_inf, self.norm, self.scale_used, known_finite=known_finite)
        elif idle:
            raise AssertionError(
                "No inf checks were recorded prior to update. Call scaler.step(optimizer), or scaler.unscale_, in "
                "every iteration before update()."
            )
