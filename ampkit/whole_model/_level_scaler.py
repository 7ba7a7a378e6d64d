"""A GradScaler for whole-model precision, where gradients are unscaled when backward ends, not when step begins.

Several backwards, each under a scale of its own, may then add up in one optimizer's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients import ranks
from ampkit.scaler import saved_state
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.shared_gradients import Notes
from ampkit.whole_model._gradient_flow import GradientFlow


class LevelScaler(GradScaler):
    """The scale of one loss. `updates` counts how often a level has moved it."""

    updates = 0

    def take(self, flow: GradientFlow) -> Tensor | None:
        """Unscale and check what a backward has left at an optimizer. Never syncs.

        Returns a flag, 1 where a gradient was not finite; None where none had arrived.
        """
        self._check_scale_growth_tracker("unscale_")
        found, groups = flow.unscale_and_merge(self._inverse_scale()[0])
        notes = self._notes_of(flow.optimizer)
        self._agree(flow.optimizer, found, groups)
        both = ranks.merged(notes.state["found_inf_per_device"], found)
        notes.state.update(stage=OptState.UNSCALED, found_inf_per_device=both)
        return self._found_inf(notes) if both else None

    def take_all(self, flows: Sequence[GradientFlow]) -> list[Tensor | None]:
        """`take` for several optimizers, then `update`; returns a flag for each."""
        flags = [self.take(flow) for flow in flows]
        self.update()
        self.updates += 1
        return flags

    def loadable(self, state_dict: Any) -> Callable[[], None]:
        """Check a saved state; returns a function that loads it and cannot fail, so that several load or none does."""
        if not self._enabled:
            return lambda: None
        new = saved_state.loadable(state_dict, self.loss_scale)
        return lambda: self._take_over(new)

    def note_step(self, optimizer: torch.optim.Optimizer, found_inf: Tensor, *, skipped: bool | None) -> None:
        """Count a step of an optimizer that is about to be made; `skipped` None where only the device knows."""
        notes = Notes(optimizer, {}, self._last_step_of(optimizer))     # outside the iteration of the backward
        self._note_step(notes, found_inf, skipped=self._count(notes, found_inf, skipped=skipped))


def either(*flags: Tensor | None) -> Tensor | None:
    """One flag for several, set if any is, on the device of the first; None where all are."""
    given = [flag for flag in flags if flag is not None]
    return ranks.combined(given, given[0].device) if given else None
