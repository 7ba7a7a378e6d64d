"""Gradients from a scaled backward to the step: unscaled and checked when backward ends, not when the step begins.

Several backwards, each under a scale of its own, may so add up in one optimizer's gradients: what `amp.scale_loss` and
`FP16Optimizer` promise. Steps are intercepted by the optimizer's own hooks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients import amp_optimizers, closures, ranks
from ampkit.gradients.collect import collect, parameters, unscale_
from ampkit.half_precision.master_weights import MasterWeights
from ampkit.scaler import saved_state
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.optimizer_records import Notes


class ScaledGradients:
    """The gradients of one optimizer, with or without master weights, between backward and step.

    Each backward under a loss scale must meet empty `.grad`s, or scaled values would be added to unscaled ones: `begin`
    sets aside what is there, and `unscale_` adds it again. If a gradient was not finite, all are set to None before the
    step, which makes torch's optimizers a no-op; amp-aware optimizers get the flag instead and skip on the device.

    Attributes:
        found_inf: a flag, set where a gradient of the backwards since the last step was not finite; None: no gradients.
        unscaled: a backward since the last step has left unscaled gradients.
        scaler: of the last backward that was unscaled.
        delayed: the scaler of backwards whose gradients are still scaled, with its count of updates then.

    Args:
        backward: how the user calls backward, for errors.
        verbose: print a line for each skipped step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, backward: str, *, verbose: bool) -> None:
        self._optimizer = weakref.ref(optimizer)    # whose hooks keep this alive
        self.masters: MasterWeights | None = None
        self.found_inf: Tensor | None = None
        self.unscaled = False
        self.scaler: LossScaler | None = None
        self.delayed: tuple[LossScaler, int] | None = None
        self._backward, self._verbose = backward, verbose
        self._set_aside: dict[Tensor, Tensor] = {}
        self._flag_on_optimizer = contextlib.ExitStack()
        # Register them before the masters' hooks: a step that is refused has not moved any gradient.
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self._optimizer()

    def backward_params(self) -> list[Tensor]:
        """The parameters whose `.grad` backward fills: the model's own in the place of masters."""
        if self.masters is None:
            return parameters(self.optimizer)
        return [*self._without_masters(self.masters), *self.masters.model_parameters()]

    def still_scaled(self) -> bool:
        """Whether gradients of delayed backwards are waiting; `zero_grad` gives them up."""
        return self.delayed is not None and self.has_gradients()

    def has_gradients(self) -> bool:
        """Whether any parameter that backward fills holds a gradient."""
        return any(param.grad is not None for param in self.backward_params())

    def check_accumulation(self, scaler: LossScaler, delay_unscale: bool) -> None:
        """Raise `RuntimeError` for a backward whose gradients would be added to gradients under another scale.

        A delayed one that sets gradients aside is refused too: `zero_grad` would not drop them.
        """
        if self.still_scaled():
            if self.delayed != (scaler, scaler.updates):
                raise RuntimeError(
                    "gradients of a backward with delay_unscale=True are waiting under another loss scale; end the "
                    "accumulation with the same loss_id before any other loss, and step, or leave delay_unscale out: "
                    "gradients are then unscaled and added after each backward"
                )
        elif delay_unscale and self.has_gradients():
            raise RuntimeError(
                "delay_unscale=True after a backward whose gradients are unscaled already; delay every backward of "
                "an accumulation but the last, or none, and call zero_grad() after each step"
            )

    def begin(self) -> None:
        """Before a backward: set unscaled gradients aside, unless the backward adds to scaled ones."""
        if self.still_scaled():
            return
        self.delayed = None
        held = [*self.backward_params(), *parameters(self.optimizer)]
        if not self.unscaled or all(param.grad is None for param in held):
            self.found_inf = None       # of gradients that a step has used, or that were dropped
        for param in parameters(self.optimizer) if self.masters is None else self._without_masters(self.masters):
            grad = param.grad
            if grad is not None:
                # A view is DDP's gradient_as_bucket_view: the next backward writes to that memory.
                self._set_aside[param] = grad.clone() if grad._is_view() else grad
                param.grad = None

    def forget(self) -> None:
        """After `zero_grad`: what backward has left is gone, and so is the overflow in it."""
        self.unscaled = False

    def give_up(self) -> None:
        """After a backward that raised: drop its gradients, unless earlier ones are delayed, and restore the rest."""
        if self.delayed is None:
            for param in self.backward_params():
                param.grad = self._set_aside.pop(param, None)

    @torch.no_grad()
    def unscale_(self, inv_scale: Tensor) -> tuple[dict[torch.device, Tensor], list[Any]]:
        """Multiply what backward has left by `inv_scale`, check it, and add what was set aside.

        Returns:
            Flags by device, 1 where a gradient was not finite, and the process groups that must agree on them. Never
            syncs.
        """
        found: dict[torch.device, Tensor] = {}
        groups: list[Any] = []
        params = parameters(self.optimizer)
        if self.masters is not None:
            self.masters.take_gradients_(inv_scale, found)
            groups += collect(self.masters.masters()).groups
            params = self._without_masters(self.masters)
        gradients = collect(params)
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
        return [param for param in parameters(self.optimizer) if id(param) not in of_masters]

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Raise for a step that cannot be right, and set gradients to None if one is not finite."""
        self._flag_on_optimizer.close()     # left over if the last step raised
        self._check_ready(optimizer, closures.extract(args[1:], kwargs))
        scaler, found_inf = self.scaler, self.found_inf if self.unscaled else None
        self.unscaled = False
        if found_inf is None or scaler is None:
            return
        if amp_optimizers.is_amp_aware(optimizer):
            enter = self._flag_on_optimizer.enter_context
            enter(amp_optimizers.attributes(optimizer, grad_scale=None, found_inf=found_inf))
            enter(amp_optimizers.sound_first_momentum(optimizer, found_inf))
            scaler.note_step(optimizer, found_inf, skipped=None)
            return
        skip = bool(found_inf != 0)
        scaler.note_step(optimizer, found_inf, skipped=skip)
        if skip:
            for param in parameters(self.optimizer):
                param.grad = None
            if self._verbose:
                print(f"ampkit: gradients overflowed, step skipped; the loss scale is {scaler.get_scale():g} now")

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take the flag off an amp-aware optimizer."""
        self._flag_on_optimizer.close()

    def _check_ready(self, optimizer: Any, closure: Any) -> None:
        name = type(optimizer).__name__
        if closure is not None:
            raise RuntimeError(
                f"{name}.step got a closure, whose backward is not seen here; use ampkit.autocast, or MasterWeights, "
                f"with GradScaler.step(optimizer, closure)"
            )
        if self.still_scaled():
            raise RuntimeError(
                f"{name}.step() while gradients of a delayed backward are still scaled; delay none that is the last "
                f"before a step"
            )
        # torch.distributed.checkpoint makes an optimizer's state by a step on zeros at a learning rate of 0.
        if self.unscaled or all(group.get("lr") == 0 for group in optimizer.param_groups):
            return
        why = "on gradients of another backward" if self.has_gradients() else "without a backward since the last step"
        raise RuntimeError(f"{name}.step() {why}; call {self._backward}")


@contextlib.contextmanager
def scaled_backward(
    loss: Tensor, scaler: LossScaler, all_gradients: Sequence[ScaledGradients], *, delay_unscale: bool
) -> Iterator[Tensor]:
    """The loss times its scale, for one backward inside; on leaving, gradients are unscaled, unless that is delayed."""
    for each in all_gradients:
        each.check_accumulation(scaler, delay_unscale)
    for each in all_gradients:
        each.begin()
    try:
        yield scaler.scale(loss.float())
    except BaseException:
        for each in all_gradients:
            each.give_up()
        raise
    if not delay_unscale:
        scaler.unscale_all_(all_gradients)
        return
    for each in all_gradients:
        each.delayed = (scaler, scaler.updates)


class LossScaler(GradScaler):
    """The scale of one loss. `updates` counts how often it was updated."""

    updates = 0

    def unscale_all_(self, all_gradients: Sequence[ScaledGradients]) -> None:
        """Unscale and check what one backward has left at several optimizers, and update the scale. Never syncs.

        A gradient that is not finite skips the next step of all of them, as in Apex: networks that one loss trains step
        together or not at all.
        """
        flags = [self._unscale(gradients) for gradients in all_gradients]
        self.update()
        for gradients in all_gradients:
            gradients.found_inf = _any((gradients.found_inf, *flags))
            gradients.unscaled, gradients.delayed, gradients.scaler = True, None, self

    def _unscale(self, gradients: ScaledGradients) -> Tensor | None:
        """A flag, 1 where a gradient was not finite; None where none had arrived."""
        found, groups = gradients.unscale_(self._inverse_scale()[0])
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
