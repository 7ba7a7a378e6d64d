"""A GradScaler for whole-model precision, where gradients are unscaled when backward ends, not when step begins.

Several backwards, each under a scale of its own, may then add up in one optimizer's gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit import _agreement
from ampkit._gradient_flow import GradientFlow
from ampkit.grad_scaler import GradScaler


class LevelScaler(GradScaler):
    """The scale of one loss. `updates` counts how often it may have moved."""

    updates = 0

    def settle(self, flows: Sequence[GradientFlow]) -> list[Tensor | None]:
        """Unscale and check what a backward has left at these optimizers, and let the scale answer.

        Returns a flag per optimizer, 1 where a gradient was not finite; None where none had arrived.
        """
        inv_scale = self._inverse_scale()
        flags: list[Tensor | None] = []
        for flow in flows:
            found, groups = flow.settle(inv_scale)
            self._agree(flow.optimizer, found, groups)
            state = self._state_of(flow.optimizer)
            state["found_inf_per_device"] = found
            state["stage"] = OptState.UNSCALED
            flags.append(self._flag(state) if found else None)
        self.update()
        self.updates += 1
        return flags

    def note_step(self, optimizer: torch.optim.Optimizer, found_inf: Tensor, *, skipped: bool | None) -> None:
        """Count a step of an optimizer; `skipped` None where only the device knows."""
        self._note_step(optimizer, found_inf, skipped=skipped)

    def current_scale(self) -> str:
        """The scale for a message; reads the device."""
        return f"{self.get_scale():g}"


def either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """One flag for two, on the first's device; None where there is neither."""
    flags = [flag for flag in (first, second) if flag is not None]
    return _agreement.combined(flags, flags[0].device) if flags else None
