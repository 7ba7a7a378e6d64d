"""What one `initialize` has set up, and what happens at each backward and step under it.

Steps are intercepted by the public hooks of `torch.optim.Optimizer`. If a gradient is not finite, all are set to None
for the step, which makes torch's optimizers a no-op; amp-aware ones get the flag instead and skip on the device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ampkit.gradients import amp_optimizers, closures
from ampkit.whole_model._gradient_flow import GradientFlow
from ampkit.whole_model._level_options import LevelOptions
from ampkit.whole_model._level_scaler import LevelScaler, either
from ampkit.whole_model.master_weights import MasterWeights

_OUTSIDE = "call backward inside `with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()`"


class Session:
    """One call of `initialize`: its options, its loss scales, and the state of each optimizer."""

    def __init__(self, options: LevelOptions | None, device_type: str, verbosity: int) -> None:
        self.options = options
        self.verbosity = verbosity
        self.scalers: list[LevelScaler] = []
        # Weak: the optimizer's hooks own its state, and a reference from here would keep the optimizer alive.
        self._states: weakref.WeakValueDictionary[int, OptimizerState] = weakref.WeakValueDictionary()
        if options is not None and options.loss_scale is not None:
            self.scalers = [
                LevelScaler(device_type, loss_scale=options.loss_scale) for _ in range(options.num_losses)
            ]
            for scaler in self.scalers:
                scaler.allow_fp16 = True

    @property
    def scales(self) -> bool:
        """Whether losses are scaled and gradients checked."""
        return bool(self.scalers)

    def follow(self, optimizer: Optimizer, *, master_values: Mapping[Tensor, Tensor] | None) -> MasterWeights | None:
        """Hook into this optimizer's steps, with master weights if there are values for them."""
        state = self._states[id(optimizer)] = OptimizerState(optimizer, self)
        # Before the masters' hooks: a step that is refused has not moved any gradient.
        optimizer.register_step_pre_hook(state.before_step)
        optimizer.register_step_post_hook(state.after_step)
        if master_values is not None:
            state.flow.masters = MasterWeights(optimizer, values=master_values)
        return state.flow.masters

    def state(self, optimizer: Optimizer) -> OptimizerState:
        """The state of an optimizer."""
        return self._states[id(optimizer)]

    def scaler(self, loss_id: Any) -> LevelScaler:
        """The scaler of a loss. Raises `IndexError` for an unknown `loss_id`."""
        if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < len(self.scalers):
            raise IndexError(
                f"loss_id is {loss_id!r}, and there are scales for {len(self.scalers)} losses; expected 0 to "
                f"{len(self.scalers) - 1}: pass num_losses to initialize"
            )
        return self.scalers[loss_id]

    def unscale_and_update(self, optimizers: Sequence[Optimizer], scaler: LevelScaler) -> None:
        """After a backward: unscale the gradients of these optimizers, and update the scale.

        A gradient that is not finite skips the next step of all of them, as in Apex: networks that are trained by one
        loss step together or not at all.
        """
        states = [self.state(optimizer) for optimizer in optimizers]
        flag = either(*scaler.take_all([state.flow for state in states]))
        for state in states:
            state.flag = either(state.flag, flag)
            state.scaler = scaler
            state.unscaled = True
            state.delayed = None


class OptimizerState:
    """The state of one optimizer between backward and step."""

    def __init__(self, optimizer: Optimizer, session: Session) -> None:
        self.flow = GradientFlow(optimizer)
        self.scales = session.scales
        self.verbosity = session.verbosity
        self.flag: Tensor | None = None
        self.scaler: LevelScaler | None = None
        self.unscaled = False
        self.delayed: tuple[LevelScaler, int] | None = None     # the scaler, and its number of updates then
        self._set_to_none: list[tuple[Tensor, Tensor]] = []
        self._handed_over = contextlib.ExitStack()

    def begin_backward(self, scaler: LevelScaler, *, delay_unscale: bool) -> None:
        """Before a backward under `scaler`.

        Raises:
            RuntimeError: gradients under another scale, or none, are waiting. Nothing has changed then.
        """
        if self.delayed is not None and self.flow.has_pending():
            if self.delayed != (scaler, scaler.updates):
                raise RuntimeError(
                    "gradients of a backward with delay_unscale=True are waiting under another loss scale; end the "
                    "accumulation with the same loss_id before any other loss, and step, or leave delay_unscale out: "
                    "gradients are then unscaled and added after each backward"
                )
            return
        self.delayed = None
        if delay_unscale and self.flow.has_pending():
            raise RuntimeError(
                "delay_unscale=True after a backward whose gradients are unscaled already; delay every backward of "
                "an accumulation but the last, or none, and call zero_grad() after each step"
            )
        self.flow.stash_unscaled()

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook: raise for a step that cannot be right, and set gradients to None if one is not finite."""
        self._handed_over.close()       # left over if the last step raised
        if not self.scales:
            return
        if closures.extract(args[1:], kwargs) is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step got a closure, whose backward the level cannot see; use "
                f"ampkit.autocast with GradScaler.step(optimizer, closure), or FP16Optimizer.step(closure)"
            )
        self._check_ready(optimizer)
        flag, scaler = self.flag, self.scaler
        self.flag, self.unscaled = None, False
        if flag is None or scaler is None:
            return
        if amp_optimizers.is_amp_aware(optimizer):
            self._handed_over.enter_context(amp_optimizers.attributes(optimizer, grad_scale=None, found_inf=flag))
            self._handed_over.enter_context(amp_optimizers.sound_first_momentum(optimizer, flag))
            scaler.note_step(optimizer, flag, skipped=None)
            return
        skip = bool(flag != 0)
        scaler.note_step(optimizer, flag, skipped=skip)
        if skip:
            self._set_gradients_to_none(scaler)

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook: restore gradients that were set to None."""
        self._handed_over.close()
        masters = set() if self.flow.masters is None else {id(m) for m in self.flow.masters.masters()}
        for param, grad in self._set_to_none:
            if id(param) not in masters:
                param.grad = grad
        self._set_to_none.clear()

    def _check_ready(self, optimizer: Any) -> None:
        name = type(optimizer).__name__
        if self.delayed is not None and self.flow.has_pending():
            raise RuntimeError(
                f"{name}.step() while gradients of a backward with delay_unscale=True are still scaled; leave "
                f"delay_unscale out for the last backward before a step"
            )
        # torch.distributed.checkpoint makes an optimizer's state by a step on zeros at a learning rate of 0.
        if self.unscaled or all(group.get("lr") == 0 for group in optimizer.param_groups):
            return
        if not self.flow.has_pending():
            raise RuntimeError(f"{name}.step() without a backward since the last step; {_OUTSIDE}")
        raise RuntimeError(f"{name}.step() on gradients that did not come through scale_loss; {_OUTSIDE}")

    def _set_gradients_to_none(self, scaler: LevelScaler) -> None:
        self._set_to_none = [(param, param.grad) for param in self.flow.params() if param.grad is not None]
        for param, _ in self._set_to_none:
            param.grad = None
        if self.verbosity > 0:
            print(f"ampkit: gradients overflowed, step skipped; the loss scale is {scaler.get_scale():g} now")
