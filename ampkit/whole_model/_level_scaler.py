"""A GradScaler for whole-model precision, where gradients are unscaled when backward ends, not when step begins.

Several backwards, each under a scale of its own, may then add up in one optimizer's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients import amp_optimizers, ranks
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.whole_model._gradient_flow import GradientFlow


class LevelScaler(GradScaler):
    """The scale of one loss. `updates` counts how often a level has moved it."""

    updates = 0

    def take(self, flow: GradientFlow) -> Tensor | None:
        """Unscale and check what a backward has left at an optimizer. Never syncs.

        Returns a flag, 1 where a gradient was not finite; None where none had arrived.
        """
        found, groups = flow.settle(self._inverse_scale())
        self._agree(flow.optimizer, found, groups)
        state = self._state_of(flow.optimizer)
        before = state["found_inf_per_device"]
        state["found_inf_per_device"] = {**before, **found}
        for device in before.keys() & found.keys():
            state["found_inf_per_device"][device] = torch.maximum(before[device], found[device])
        state["stage"] = OptState.UNSCALED
        return self._flag(state) if state["found_inf_per_device"] else None

    def settle(self, flows: Sequence[GradientFlow]) -> list[Tensor | None]:
        """`take` for several optimizers, after which the scale answers; a flag for each."""
        flags = [self.take(flow) for flow in flows]
        self.update()
        self.updates += 1
        return flags

    def step_settled(self, optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> Any:
        """Step an optimizer whose gradients `take` has unscaled, or not; as `GradScaler.step`."""
        state = self._state_of(optimizer)
        if found_inf is None:
            return self._nothing_to_do(optimizer, state)
        state["stage"] = OptState.UNSCALED
        if amp_optimizers.is_amp_aware(optimizer):
            return self._step_on_device(optimizer, state, (), {})
        result = self._maybe_opt_step(optimizer, state)
        state["stage"] = OptState.STEPPED
        return result

    def loadable(self, state_dict: Any) -> Callable[[], None]:
        """Check a saved state; returns what loads it, which cannot fail, so that several are loaded or none."""
        if not self._enabled:
            return lambda: None
        new = self._loadable(state_dict)
        return lambda: self._take_over(new)

    def note_step(self, optimizer: torch.optim.Optimizer, found_inf: Tensor, *, skipped: bool | None) -> None:
        """Count a step of an optimizer that is about to be made; `skipped` None where only the device knows."""
        self._note_step(optimizer, found_inf, skipped=self._examine(optimizer, found_inf, skipped=skipped))


def either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """One flag for two, on the first's device; None where there is neither."""
    flags = [flag for flag in (first, second) if flag is not None]
    return ranks.combined(flags, flags[0].device) if flags else None
