"""Gradients from a scaled backward to the step, for `amp.scale_loss` and `FP16Optimizer`; the scaler of one loss.

Gradients are unscaled and checked when backward ends, not when the step begins, so that several backwards, each under
its own scale, add up in one optimizer's gradients. The optimizer's own hooks intercept its steps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients import step_contract
from ampkit.gradients.collect import collect, combined, merged, parameters
from ampkit.half_precision.master_weights import MasterWeights, refuse_closure
from ampkit.scaler import saved_state
from ampkit.scaler.grad_scaler import GradScaler


class ScaledGradients:
    """The gradients of one optimizer, with or without master weights, between backward and step.

    A backward under a loss scale must start from empty `.grad`s, or scaled values would be added to unscaled ones:
    `begin` sets existing gradients aside, and `unscale_` adds them again. If a gradient is not finite, all are set to
    None before the step, which makes torch's optimizers a no-op; amp-aware optimizers get the flag instead and skip on
    the device.

    Attributes:
        found_inf: a flag, set if a gradient of the backwards since the last step is not finite; None: no gradients.
        unscaled: whether a backward since the last step has left unscaled gradients.
        scaler: the scaler of the last backward that was unscaled.
        delayed: the scaler of backwards whose gradients are still scaled, with its count of updates at that time.

    Args:
        optimizer: the optimizer, whose step is intercepted from now on.
        backward: how the user calls backward, for errors.
        verbose: print a line for each skipped step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, backward: str, *, verbose: bool) -> None:
        self._optimizer = weakref.ref(optimizer)  # a weak reference: the optimizer's hooks hold this object
        self.masters: MasterWeights | None = None
        self.found_inf: Tensor | None = None
        self.unscaled = False
        self.scaler: LossScaler | None = None
        self.delayed: tuple[LossScaler, int] | None = None
        self._backward, self._verbose = backward, verbose
        self._set_aside: dict[Tensor, Tensor] = {}
        self._flag_on_optimizer = contextlib.ExitStack()
        # Registered before the hooks of MasterWeights, so that a refused step has not moved any gradient.
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self._optimizer()

    def backward_params(self) -> list[Tensor]:
        """Return the parameters whose `.grad` backward fills: for masters, the 16-bit parameters of the model."""
        if self.masters is None:
            return parameters(self.optimizer)
        return [*self._without_masters(self.masters), *self.masters.model_parameters()]

    def still_scaled(self) -> bool:
        """Return whether there are gradients of delayed backwards; `zero_grad` drops them."""
        return self.delayed is not None and self.has_gradients()

    def has_gradients(self) -> bool:
        """Return whether any parameter that backward fills holds a gradient."""
        return any(param.grad is not None for param in self.backward_params())

    def check_accumulation(self, scaler: LossScaler, delay_unscale: bool) -> None:
        """Raise `RuntimeError` for a backward whose gradients would be added to gradients under another scale.

        A delayed backward that would set gradients aside is also refused: `zero_grad` would not drop them.
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
        """Set unscaled gradients aside before a backward, unless the backward adds to scaled gradients."""
        if self.still_scaled():
            return
        self.delayed = None
        params = [*self.backward_params(), *parameters(self.optimizer)]
        if not self.unscaled or all(param.grad is None for param in params):
            self.found_inf = None  # belongs to gradients that a step has used, or that were dropped
        for param in parameters(self.optimizer) if self.masters is None else self._without_masters(self.masters):
            grad = param.grad
            if grad is not None:
                # With DDP's gradient_as_bucket_view it is a view of memory that the next backward overwrites.
                self._set_aside[param] = grad.clone() if grad._is_view() else grad
                param.grad = None

    def forget(self) -> None:
        """Note that `zero_grad` has dropped the gradients."""
        self.unscaled = False

    def undo(self) -> None:
        """Drop the gradients of a backward that raised, and restore the ones set aside. Delayed gradients remain."""
        if self.delayed is None:
            for param in self.backward_params():
                param.grad = self._set_aside.pop(param, None)

    @torch.no_grad()
    def unscale_(self, inv_scale: Tensor) -> tuple[dict[torch.device, Tensor], dict[Any, None]]:
        """Multiply the gradients by `inv_scale`, check them, and add those set aside. Never synchronizes.

        Returns:
            Flags by device, 1 if a gradient is not finite, and the meshes whose ranks must have the same flags.
        """
        flags: dict[torch.device, Tensor] = {}
        meshes: dict[Any, None] = {}
        params = parameters(self.optimizer)
        if self.masters is not None:
            self.masters.take_gradients_(inv_scale, flags)
            meshes |= collect(self.masters.masters()).meshes
            params = self._without_masters(self.masters)
        gradients = collect(params)
        meshes |= gradients.meshes
        for device in gradients.by_device:
            if device not in flags:
                flags[device] = torch.zeros((), dtype=torch.float32, device=device)
        gradients.unscale_(inv_scale, flags)
        for param, earlier in self._set_aside.items():
            param.grad = earlier if param.grad is None else earlier + param.grad
        self._set_aside.clear()
        return flags, meshes

    def _without_masters(self, masters: MasterWeights) -> list[Tensor]:
        """Return the optimizer's parameters that are not masters."""
        of_masters = {id(master) for master in masters.masters()}
        return [param for param in parameters(self.optimizer) if id(param) not in of_masters]

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Refuse a step without unscaled gradients, and set gradients to None if one is not finite."""
        self._flag_on_optimizer.close()  # still open if the last step raised
        refuse_closure(optimizer, args, kwargs)
        self._check_ready(optimizer)
        scaler, found_inf = self.scaler, self.found_inf if self.unscaled else None
        self.unscaled = False
        if found_inf is None or scaler is None:
            return
        if step_contract.is_amp_aware(optimizer):
            enter = self._flag_on_optimizer.enter_context
            enter(step_contract.attributes(optimizer, grad_scale=None, found_inf=found_inf))
            enter(step_contract.sound_first_momentum(optimizer, found_inf))
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
        """Remove the flag from an amp-aware optimizer."""
        self._flag_on_optimizer.close()

    def _check_ready(self, optimizer: Any) -> None:
        name = type(optimizer).__name__
        if self.still_scaled():
            raise RuntimeError(
                f"{name}.step() while gradients of a delayed backward are still scaled; do not delay the last "
                f"backward before a step"
            )
        # torch.distributed.checkpoint creates an optimizer's state by a step on zeros with a learning rate of 0.
        if self.unscaled or all(group.get("lr") == 0 for group in optimizer.param_groups):
            return
        when = "on gradients of another backward" if self.has_gradients() else "without a backward since the last step"
        raise RuntimeError(f"{name}.step() {when}; call {self._backward}")


@contextlib.contextmanager
def scaled_backward(
    loss: Tensor, scaler: LossScaler, all_gradients: Sequence[ScaledGradients], *, delay_unscale: bool
) -> Iterator[Tensor]:
    """Yield the loss times its scale for one backward; then unscale its gradients, unless `delay_unscale`."""
    for gradients in all_gradients:
        gradients.check_accumulation(scaler, delay_unscale)
    for gradients in all_gradients:
        gradients.begin()
    try:
        yield scaler.scale(loss.float())
    except BaseException:
        for gradients in all_gradients:
            gradients.undo()
        raise
    if not delay_unscale:
        scaler.unscale_all_(all_gradients)
        return
    for gradients in all_gradients:
        gradients.delayed = (scaler, scaler.updates)


class LossScaler(GradScaler):
    """The scaler of one loss. `updates` counts the updates of its scale."""

    updates = 0

    def unscale_all_(self, all_gradients: Sequence[ScaledGradients]) -> None:
        """Unscale and check the gradients of several optimizers after one backward, and update the scale.

        A gradient that is not finite skips the next step of all of them, as in Apex: networks that one loss trains step
        together or not at all. Never synchronizes.
        """
        flags = [self._unscale(gradients) for gradients in all_gradients]
        self.update()
        for gradients in all_gradients:
            gradients.found_inf = _any((gradients.found_inf, *flags))
            gradients.unscaled, gradients.delayed, gradients.scaler = True, None, self

    def _unscale(self, gradients: ScaledGradients) -> Tensor | None:
        """Unscale one optimizer's gradients. Returns a flag, 1 if one is not finite; None if there are none."""
        found_inf, meshes = gradients.unscale_(self._inverse_scale()[0])
        record = self._record_of(gradients.optimizer)
        self._reduce_flags(record, meshes, found_inf)
        flags = merged(record.state["found_inf_per_device"], found_inf)
        record.state.update(stage=OptState.UNSCALED, found_inf_per_device=flags)
        return combined([*flags.values()], self._where()) if flags else None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale as `GradScaler.update` does, and count the update."""
        super().update(new_scale)
        self.updates += 1

    def checked_state(self, state_dict: Any) -> Any:
        """Return a saved state in the form that can be loaded; raises as `load_state_dict`, and changes nothing."""
        return saved_state.loadable(state_dict, self.loss_scale)

    def load_checked_state(self, state: Any) -> None:
        """Load the result of `checked_state`. It cannot fail, so that all of several scalers load, or none."""
        self._take_over(state)

    def note_step(self, optimizer: torch.optim.Optimizer, found_inf: Tensor, *, skipped: bool | None) -> None:
        """Count a step that an optimizer is about to make; `skipped` is None if only the device has the flag."""
        record = self._lasting_record_of(optimizer)
        skipped = self._count(record, optimizer, found_inf, skipped=skipped)
        self._note_step(record, optimizer, found_inf, None, skipped=skipped)


def _any(flags: Sequence[Tensor | None]) -> Tensor | None:
    """Return one flag, set if any of `flags` is set, on the device of the first; None if all are None."""
    present = [flag for flag in flags if flag is not None]
    return combined(present, present[0].device) if present else None
