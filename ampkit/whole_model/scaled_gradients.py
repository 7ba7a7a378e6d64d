"""Gradients from a scaled backward to the step: unscaled and checked when backward ends, not when the step begins.

Several backwards, each under a scale of its own, may so add up in one optimizer's gradients: what `amp.scale_loss` and
`FP16Optimizer` promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients import ranks
from ampkit.gradients.collect import collect, unscale_
from ampkit.scaler import saved_state
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.shared_gradients import Notes
from ampkit.whole_model.master_weights import MasterWeights


class ScaledGradients:
    """The gradients of one optimizer, with or without master weights, between backward and step.

    Each backward under a loss scale must meet empty `.grad`s, or scaled values would be added to unscaled ones: `begin`
    sets aside what is there, and `unscale_` adds it again.

    Attributes:
        found_inf: a flag, set where a gradient of the backwards since the last step was not finite; None: no gradients.
        unscaled: a backward since the last step has left unscaled gradients.
        scaler: of the last backward that was unscaled.
        delayed: the scaler of backwards whose gradients are still scaled, with its count of updates then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, masters: MasterWeights | None = None) -> None:
        self.optimizer = optimizer
        self.masters = masters
        self.found_inf: Tensor | None = None
        self.unscaled = False
        self.scaler: LossScaler | None = None
        self.delayed: tuple[LossScaler, int] | None = None
        self._set_aside: dict[Tensor, Tensor] = {}

    def params(self) -> list[Tensor]:
        """Every tensor in the optimizer's groups: masters where there are any."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def backward_params(self) -> list[Tensor]:
        """The parameters whose `.grad` backward fills: the model's own in the place of masters."""
        if self.masters is None:
            return self.params()
        return [*self._without_masters(self.masters), *self.masters.model_parameters()]

    def still_scaled(self) -> bool:
        """Whether gradients of delayed backwards are waiting; `zero_grad` gives them up."""
        return self.delayed is not None and self.has_gradients()

    def has_gradients(self) -> bool:
        """Whether any parameter that backward fills holds a gradient."""
        return any(param.grad is not None for param in self.backward_params())

    def begin(self) -> None:
        """Before a backward: set unscaled gradients aside, unless the backward adds to scaled ones."""
        if self.still_scaled():
            return
        self.delayed = None
        if not self.unscaled:
            self.found_inf = None
        for param in self.params() if self.masters is None else self._without_masters(self.masters):
            grad = param.grad
            if grad is not None:
                # A view is DDP's gradient_as_bucket_view: the next backward writes to that memory.
                self._set_aside[param] = grad.clone() if grad._is_view() else grad
                param.grad = None

    def give_up(self) -> None:
        """After a backward that raised: drop its gradients, unless earlier ones are delayed, and restore the rest."""
        if self.delayed is None:
            for param in self.backward_params():
                param.grad = self._set_aside.pop(param, None)

    def forget(self) -> None:
        """Know nothing of earlier backwards, as after `zero_grad`."""
        self._set_aside.clear()
        self.unscaled, self.delayed = False, None

    @torch.no_grad()
    def unscale_(self, inv_scale: Tensor, done: set[Tensor]) -> tuple[dict[torch.device, Tensor], list[Any]]:
        """Multiply what backward has left by `inv_scale`, check it, and add what was set aside.

        Leaves out the parameters in `done`, which another optimizer has unscaled, and adds its own to them.

        Returns:
            Flags by device, 1 where a gradient was not finite, and the process groups that must agree on them. Never
            syncs.
        """
        found: dict[torch.device, Tensor] = {}
        groups: list[Any] = []
        params = self.params()
        if self.masters is not None:
            self.masters.take_gradients_(inv_scale, found)
            groups += collect(self.masters.masters()).groups
            params = self._without_masters(self.masters)
        gradients = collect([param for param in params if param not in done])
        done.update(params)
        groups += gradients.groups
        for device in gradients.by_device:
            if device not in found:
                found[device] = torch.zeros((), dtype=torch.float32, device=device)
        unscale_(gradients, inv_scale, found)
        for param, held in self._set_aside.items():
            param.grad = held if param.grad is None else held + param.grad
        self._set_aside.clear()
        return found, list(dict.fromkeys(groups))

    def _without_masters(self, masters: MasterWeights) -> list[Tensor]:
        of_masters = {id(master) for master in masters.masters()}
        return [param for param in self.params() if id(param) not in of_masters]


class LossScaler(GradScaler):
    """The scale of one loss. `updates` counts how often it was updated."""

    updates = 0

    def unscale_all_(self, all_gradients: Sequence[ScaledGradients]) -> None:
        """Unscale and check what one backward has left at several optimizers, and update the scale. Never syncs.

        A gradient that is not finite skips the next step of all of them, as in Apex: networks that one loss trains step
        together or not at all. A gradient that several optimizers share is unscaled once.
        """
        done: set[Tensor] = set()
        flags = [self._unscale(gradients, done) for gradients in all_gradients]
        self.update()
        for gradients in all_gradients:
            self._note_backward(gradients, flags)

    def unscale_arrived_(self, gradients: ScaledGradients) -> None:
        """Unscale and check what backwards have left at one optimizer; the scale stays. Never syncs."""
        self._note_backward(gradients, [self._unscale(gradients, set())])

    def _note_backward(self, gradients: ScaledGradients, flags: Sequence[Tensor | None]) -> None:
        gradients.found_inf = _any((gradients.found_inf, *flags))
        gradients.unscaled, gradients.delayed, gradients.scaler = True, None, self

    def _unscale(self, gradients: ScaledGradients, done: set[Tensor]) -> Tensor | None:
        """A flag, 1 where a gradient was not finite; None where none had arrived."""
        self._check_scale_growth_tracker("unscale_")
        found, groups = gradients.unscale_(self._inverse_scale()[0], done)
        notes = self._notes_of(gradients.optimizer)
        self._agree(gradients.optimizer, found, groups)
        flags = ranks.merged(notes.state["found_inf_per_device"], found)
        notes.state.update(stage=OptState.UNSCALED, found_inf_per_device=flags)
        return self._found_inf(notes) if flags else None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As `GradScaler.update`, counted."""
        super().update(new_scale)
        self.updates += 1

    def checked_state(self, state_dict: Any) -> Any:
        """A saved state that can be loaded; raises as `load_state_dict`, and changes nothing."""
        return saved_state.loadable(state_dict, self.loss_scale)

    def load_checked_state(self, state: Any) -> None:
        """Load what `checked_state` returned, which cannot fail: several scalers load, or none does."""
        self._take_over(state)

    def note_step(self, optimizer: torch.optim.Optimizer, found_inf: Tensor, *, skipped: bool | None) -> None:
        """Count a step that an optimizer is about to make; `skipped` None where only the device knows."""
        notes = Notes(optimizer, {}, self._last_step_of(optimizer))     # outside the iteration of the backward
        self._note_step(notes, found_inf, skipped=self._count(notes, found_inf, skipped=skipped))


def _any(flags: Sequence[Tensor | None]) -> Tensor | None:
    """One flag for several, set if any is, on the device of the first; None where all are."""
    given = [flag for flag in flags if flag is not None]
    return ranks.combined(given, given[0].device) if given else None
