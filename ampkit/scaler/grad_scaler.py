"""GradScaler: losses are scaled, gradients unscaled and checked, steps with inf or NaN skipped, the scale adjusted.

An optimizer is READY after `update()`, UNSCALED after `unscale_` or clipping, STEPPED after `step`. Lightning,
Accelerate, FSDP, Composer and others ask for `isinstance(scaler, torch.amp.GradScaler)`, read and write its private
attributes and override its private methods: those keep torch's names, shapes and callers. Torch's record of an
optimizer is a plain dict that other code may hold, change or replace; what this class knows beside it is in `Notes`.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.compiler import is_compiling

from ampkit.containers import map_tensors
from ampkit.gradients import clipping, closures, ranks, step_contract
from ampkit.gradients.collect import (
    Gradients,
    check_finite,
    collect,
    combined,
    host_value_or_none,
    merged,
    moved,
    parameters,
    take_master_gradients,
    unscale_,
)
from ampkit.scaler import loss_scale as scales
from ampkit.scaler import skip_above as norm_limit
from ampkit.scaler import state_dict_checks
from ampkit.scaler.loss_scale import DynamicLossScale, ScaleState
from ampkit.scaler.optimizer_notes import MARK, LastStep, Notes, note_backward, refuse_claimed
from ampkit.scaler.overflow_report import count_nonfinite
from ampkit.scaler.scaler_answers import ScalerAnswers
from ampkit.scaler.skip_above import TimesMedian
from ampkit.torch_internals.modules import is_flat
from ampkit.torch_internals.optimizers import update_scale_
from ampkit.user_code import warn_user

Outputs = TypeVar("Outputs", bound=Iterable[Any])
Flags = dict[torch.device, Tensor]
"""For each device that holds gradients 0.0, or nonzero where one is not finite."""

_IDLE_STEPS = 3
"""Steps without gradients, from an optimizer's first step on, that are followed by a warning."""


class GradScaler(ScalerAnswers):
    """Scale losses so that small gradients survive float16; skip steps whose gradients are not finite.

    Takes the place of `torch.amp.GradScaler`: same methods, arguments, results and `state_dict`.

    Args:
        device: device type that the script trains on. None: the current accelerator, else "cpu".
        init_scale: first scale.
        growth_factor: multiplies the scale after `growth_interval` updates without overflow; above 1.
        backoff_factor: multiplies the scale after an overflow; below 1.
        growth_interval: updates in a row without overflow before growth.
        enabled: False turns every method into a pass-through.
        loss_scale: a strategy in place of the four numbers above: `DynamicLossScale` with bounds, hysteresis or
            tolerance, `StaticLossScale`, `NoOpLossScale`.
        process_group: ranks that must skip together although each has other gradients (sharded by hand, pipelined).
            DDP and DTensor gradients (FSDP2, tensor parallel) need nothing.
        allow_fp16: unscale float16 gradients too, for optimizers that keep float32 master weights.
        on_stuck: when gradients overflow at a scale that can hardly fall further (`DynamicLossScale.stuck_scale`):
            "warn" once, "raise" `LossScaleStuckError`, or call a function with `ScalerStats`.
        skip_above: skip steps whose gradient norm, over all parameters of the optimizer and before clipping, is above
            a number or a multiple of the running median (`TimesMedian`), without an effect on the scale. The norm is
            of the order that `clip_grad_norm_` has, if 0, 1, 2 or inf, else the 2-norm, and that of the whole
            `process_group`; without clipping, `unscale_` and `step` read the gradients once more for it.

    Raises:
        AssertionError: growth_factor <= 1 or backoff_factor >= 1, as torch.
        TypeError: a `skip_above` that is neither, or a `loss_scale` that is no strategy.
        ValueError: another number out of range, or both a strategy and its numbers.

    Host synchronisation: `step` of an ordinary optimizer reads one number, a second where it is skipped or judged by
    `skip_above`; amp-aware ones (`fused=True`, `ampkit.optim`) and all other methods read none, apart from those whose
    answer is a Python value.

    >>> import torch
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> scaler = GradScaler("cpu")
    >>> scaler.scale(model(torch.ones(2, 4)).mean()).backward()
    >>> norm = scaler.clip_grad_norm_(optimizer, max_norm=1.0)
    >>> scaler.step(optimizer)
    >>> scaler.update()
    >>> scaler.stats().steps
    1
    """

    # 1. The loss: scale

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...

    @overload
    def scale(self, outputs: Outputs) -> Outputs: ...

    def scale(self, outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  torch's are cases of it
        """Multiply a loss, or every tensor in a nested list, tuple, mapping or iterator, by the scale.

        A 0-d float16 or bfloat16 loss comes back as float32. Never syncs.

        Raises:
            ValueError: something that holds no tensors.
        """
        if not self._enabled:
            return outputs
        self._scale_calls += 1
        if self._notes:
            note_backward(self._notes.values())
        copies: dict[torch.device, Tensor] = {}
        if isinstance(outputs, Tensor):
            return self._scale_one(outputs, copies)
        return map_tensors(outputs, lambda output: self._scale_one(output, copies), self._scale_lazily)

    def _scale_lazily(self, outputs: Any) -> Iterator[Any]:
        """An iterator over scaled outputs for any iterable, as in torch; raises `ValueError` for what is none."""
        if isinstance(outputs, str | bytes) or not isinstance(outputs, Iterable):
            raise ValueError(f"outputs must be a Tensor or an iterable of Tensors; got {type(outputs).__name__}")
        return (self.scale(output) for output in outputs)

    def _scale_one(self, output: Tensor, copies: dict[torch.device, Tensor]) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        if not self._rule.scales_losses:
            return output
        scale: Any = self._scale
        if scale.device != output.device:
            if output.device not in copies:
                copies[output.device] = moved(scale, output.device)
            scale = copies[output.device]
        return output * scale

    # 2. The gradients: unscale_, if `step` or clipping is not to do it

    def unscale_(self, optimizer: torch.optim.Optimizer, *, allow_repeat: bool = False) -> None:
        """Multiply the optimizer's gradients by 1 / scale, in place, and check them for inf and NaN. Never syncs.

        Optional before `step`, for code that reads or changes gradients in between. Call it once per iteration, after
        the last backward; with `allow_repeat` a second call does nothing instead of raising. Gradients may be sparse,
        complex, expanded, non-contiguous or DTensors.

        Raises:
            AssertionError: nothing has been scaled yet.
            RuntimeError: called before in this iteration, or after `step`; or a gradient has been unscaled in this
                iteration for another optimizer. No gradient's value has changed then.
            ValueError: float16 gradients, unless the scaler was made with `allow_fp16`. Nothing has changed then.
        """
        if not self._enabled:
            return
        if self._scale is None or self._history is None:
            self._check_scale_growth_tracker("unscale_")
        notes = self._notes_of(optimizer)
        state = notes.state
        if state["stage"] is OptState.STEPPED:
            raise _too_late("unscale_")
        if state["stage"] is OptState.UNSCALED:
            if allow_repeat:
                self._apply_clip_factor_(notes)
                return
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(). Dividing gradients "
                "twice would ruin them: call update() at the end of each iteration, unscale_ once per update (not "
                "once per micro-batch), or pass allow_repeat=True."
            )
        notes.clip_factor = None        # left where other code made the optimizer READY again
        if self._skip_above is not None:
            self._unscale_and_judge_(notes)
            self._apply_clip_factor_(notes)
            return
        inv_scale, flag = self._inverse_scale()
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, inv_scale, flag, self.allow_fp16)
        state["stage"] = OptState.UNSCALED

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> Flags:
        """Multiply gradients by `inv_scale`, in place; returns a flag per device, `found_inf` for its own device.

        Works without a record, as in torch.
        """
        gradients = self._gradients(optimizer, allow_fp16)
        found: Flags = {}
        for device in gradients.by_device:      # a comprehension would be a call
            found[device] = found_inf if device == found_inf.device else moved(found_inf, device)
        with torch.set_grad_enabled(False):  # torch.no_grad() at half its cost
            if self._rule.scales_losses:
                unscale_(gradients, inv_scale, found)
            else:
                check_finite(gradients, torch.ones_like(found_inf), found)
        self._agree(optimizer, found, gradients.groups)
        return found

    def _inverse_scale(self) -> tuple[Tensor, Tensor]:
        """1 / scale, rounded once from double where the device has it, and a clear flag, both 0-d on its device.

        1 for a strategy that does not scale losses, whatever the scale.
        """
        scale = self._scale
        if self._rule.scales_losses and self._history.triton is not None:
            inv_scale, flag, self._used_scale = self._history.triton.inverse_scale(scale)
            return inv_scale, flag
        if not self._rule.scales_losses:
            inv_scale = torch.ones_like(scale)
        elif scale.is_mps:
            inv_scale = scale.reciprocal()
        else:
            self._used_scale = used = scale.double()
            inv_scale = used.reciprocal().float()
        return inv_scale, torch.zeros_like(inv_scale)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        """Check gradients that stay scaled for inf and NaN; the flags are those that `unscale_` would set."""
        if self._scale is None or self._history is None:
            self._check_scale_growth_tracker("_check_inf_per_device")
        notes = self._notes_of(optimizer)
        inv_scale, flag = self._inverse_scale()
        gradients = self._gradients(optimizer)
        notes.state["found_inf_per_device"] = found = {device: moved(flag, device) for device in gradients.by_device}
        with torch.set_grad_enabled(False):
            check_finite(gradients, inv_scale, found)
        self._agree(optimizer, found, gradients.groups)
        return found

    def _gradients(self, optimizer: Any, allow_fp16: bool = True, *, coalesce: bool = False) -> Gradients:
        """The optimizer's gradients, marked as its own; those that arrived at 16-bit parameters go to its masters.

        Raises for one that was unscaled for another optimizer in this iteration.
        """
        take_master_gradients(optimizer)
        gradients = collect(parameters(optimizer), None if allow_fp16 else optimizer, coalesce=coalesce)
        notes = self._notes.get(id(optimizer))
        if notes is not None:
            if len(self._notes) > 1:
                refuse_claimed(gradients.originals, notes, self._notes.values())
            mark = notes.mark, -1
            for grad in gradients.originals:
                setattr(grad, MARK, mark)
        return gradients

    def _agree(self, optimizer: Any, found: Flags, groups: Sequence[Any]) -> None:
        """Make flags the same on all ranks that must skip together."""
        notes = self._notes.get(id(optimizer))
        last = self._last_step_of(optimizer) if notes is None else notes.last_step
        also = self.process_group
        if also is None and last.holds_shards and ranks.several():
            also = torch.distributed.group.WORLD    # shards of FSDP1 do not say which ranks have the other parts
        everyone = [*dict.fromkeys(groups if also is None else (*groups, also))]
        if not everyone:
            return
        ranks.agree(found, everyone, self._where() if self._scale is not None or not found else next(iter(found)))
        if notes is not None:
            notes.groups = everyone

    def _notes_of(self, optimizer: Any) -> Notes:
        """What is known about an optimizer in this iteration, beside its record in `_per_optimizer_states`."""
        notes = self._notes.get(id(optimizer))
        if notes is None and not hasattr(optimizer, "param_groups"):
            parameters(optimizer)       # raises, before there is a record
        state = self._states[id(optimizer)]
        if notes is None or notes.state is not state:
            notes = self._notes[id(optimizer)] = Notes(optimizer, state, self._last_step_of(optimizer))
        return notes

    def _last_step_of(self, optimizer: Any) -> LastStep:
        found = self._last_steps.get(optimizer)
        if found is None:
            holds_shards = any(map(is_flat, parameters(optimizer)))
            found = self._last_steps[optimizer] = LastStep(holds_shards, norms=self._first_norms(optimizer))
        return found

    # 3. The norm: clip_grad_norm_, and the verdict of `skip_above`

    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | Tensor,
        norm_type: float = 2.0,
        *,
        process_group: Any = None,
    ) -> Tensor:
        """Unscale, check and clip the optimizer's gradients together; returns their unscaled norm. Never syncs.

        Replaces `unscale_` and `torch.nn.utils.clip_grad_norm_`, with two reads and one write of the gradients instead
        of three and two. After `unscale_` it only clips. If a gradient is not finite nothing is multiplied: the step
        will be skipped. Gradients of optimizers that take a multiplier (`ampkit.optim`) stay scaled until the step.

        Args:
            max_norm: the largest norm to let pass.
            norm_type: the order of the norm; `inf` for the largest magnitude.
            process_group: ranks that each hold other gradients of the same model (pipeline stages, hand-made
                shards): the norm is taken over all of them. DTensor shards are added up without it.

        Returns:
            The norm over all parameter groups, 0-d on the scale's device; float64 for float64 gradients, else float32.

        May be called after `unscale_`.

        Raises:
            AssertionError, ValueError, RuntimeError: as `unscale_`. RuntimeError also for FSDP1 without a
                `process_group`.
            TypeError: a `max_norm` that is no number. AttributeError: parameters in place of their optimizer.
        """
        norm_type = float(norm_type)
        if not isinstance(max_norm, float | int | Tensor):
            max_norm = scales.number(max_norm, "max_norm")
        if not self._enabled:
            take_master_gradients(optimizer)
            return clipping.clip_plain(parameters(optimizer), max_norm, norm_type, process_group)
        if self._scale is None or self._history is None:
            self._check_scale_growth_tracker("clip_grad_norm_")
        notes = self._notes_of(optimizer)
        if notes.state["stage"] is OptState.STEPPED:
            raise _too_late("clip_grad_norm_")
        if process_group is None and notes.last_step.holds_shards and ranks.several():
            raise clipping.refusal_of_flat_shards()
        if notes.state["stage"] is OptState.READY:
            notes.outlier = None        # left where other code made the optimizer READY again
            if norm_type not in clipping.HOMOGENEOUS_ORDERS:
                self.unscale_(optimizer)
        norm = self._clip_norm_(notes, max_norm, norm_type, process_group)
        if self._skip_above is not None and notes.outlier is None and notes.state["found_inf_per_device"]:
            also = self.process_group if process_group is None else None    # the norm is of `process_group` already
            self._judge(notes, norm if also is None else ranks.total(norm.clone(), norm_type, (also,)))
        before = self._clipped_norms.get(id(optimizer))
        self._clipped_norms[id(optimizer)] = norm if before is None else torch.maximum(before, norm)
        return norm

    def _unscale_and_judge_(self, notes: Notes) -> None:
        """Unscale, check, and judge by `skip_above` the 2-norm of gradients that this class is not asked to clip.

        The factor of optimizers that take one stays with the notes, as clipping leaves it.
        """
        if self.process_group is None and notes.last_step.holds_shards and ranks.several():
            raise clipping.refusal_of_flat_shards()
        notes.outlier = None        # left where other code made the optimizer READY again
        norm = self._clip_norm_(notes, math.inf, 2.0, self.process_group)
        if notes.state["found_inf_per_device"]:
            self._judge(notes, norm)
        before = self._judged_norms.get(id(notes.optimizer))
        self._judged_norms[id(notes.optimizer)] = norm if before is None else torch.maximum(before, norm)

    def _clip_norm_(self, notes: Notes, max_norm: float | Tensor, norm_type: float, process_group: Any) -> Tensor:
        """Unscale unless that is done, check, and clip; returns the unscaled norm."""
        optimizer, state = notes.optimizer, notes.state
        if notes.clip_factor is not None:
            self._apply_clip_factor_(notes)
        found: Flags = {}
        if state["stage"] is OptState.READY:
            inv_scale, flag = self._inverse_scale()
        else:
            found = state["found_inf_per_device"]
            inv_scale = torch.ones_like(self._scale)
            flag = torch.zeros_like(inv_scale)
        gradients = self._gradients(optimizer, self.allow_fp16, coalesce=True)
        for device in gradients.by_device:
            if device not in found:
                found[device] = flag if device == flag.device else moved(flag, device)
        with torch.set_grad_enabled(False):
            across = () if process_group is None else (process_group,)
            norm, factor = clipping.norm_and_factor(gradients, inv_scale, found, norm_type, max_norm, across)
            self._agree(optimizer, found, gradients.groups)
            state["found_inf_per_device"], state["stage"] = found, OptState.UNSCALED
            if getattr(optimizer, "_step_supports_grad_multiplier", False):
                notes.clip_factor = factor.float()
            else:
                clipping.multiply_(gradients, factor, found)
        return norm

    def _judge(self, notes: Notes, norm: Tensor) -> None:
        """Note whether the norm of an iteration is above `skip_above`, on any of the ranks that skip together."""
        limit: Any = self._skip_above
        last = notes.last_step
        if isinstance(limit, TimesMedian):
            norms: Any = last.norms
            if norms.device != norm.device:
                last.norms = norms = norms.to(norm.device)
            outlier = limit.judge_(norms, norm)
        else:
            outlier = norm_limit.is_outlier(norm, limit)
        ranks.agree({outlier.device: outlier}, notes.groups, outlier.device)
        notes.outlier = outlier

    def _apply_clip_factor_(self, notes: Notes) -> None:
        """Apply now the factor that clipping had left for the optimizer's `step`."""
        factor, notes.clip_factor = notes.clip_factor, None
        if factor is None:
            return
        gradients = self._gradients(notes.optimizer)
        with torch.set_grad_enabled(False):
            clipping.multiply_(gradients, factor, notes.state["found_inf_per_device"])

    def clip_grad_value_(self, optimizer: torch.optim.Optimizer, clip_value: float) -> None:
        """Unscale and check the optimizer's gradients, and limit every element to `[-clip_value, clip_value]`.

        After `unscale_` or `clip_grad_norm_` it only limits. Complex gradients are limited by part. Never syncs.
        """
        self.unscale_(optimizer, allow_repeat=True)
        clipping.clamp_(self._gradients(optimizer), float(clip_value))

    # 4. The optimizer: step, or a skipped step

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale unless that is done, then call `optimizer.step(*args, **kwargs)` if all gradients are finite.

        An optimizer without gradients is left alone, and `stats().no_gradients` counts it; one that has found none in
        its first steps is named in a warning. Amp-aware optimizers (`fused=True`, `ampkit.optim`) are always called and
        skip on the device, without a host sync; any other costs one host read, two where it is skipped.

        With a closure (keyword or first positional argument), as LBFGS and SAM take it, every evaluation is unscaled
        and checked; the closure calls `scaler.scale(loss).backward()` and returns the unscaled loss. A non-finite
        evaluation ends the step, restores parameters and optimizer state, and sets the optimizer's gradients to None.
        One host read per evaluation.
        Returns what `optimizer.step` returned; None when the step was skipped by the host.

        Raises:
            AssertionError: nothing has been scaled yet.
            RuntimeError: called before in this iteration.
            ValueError: a closure, or an optimizer that takes the scaler itself, where this one has `skip_above`.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        closure = closures.extract(args, kwargs) if args or kwargs else None
        if closure is not None and self._skip_above is not None:
            raise ValueError("step got a closure, which skip_above does not judge; expected a scaler without it")
        if closure is None and (self._scale is None or self._history is None):
            self._check_scale_growth_tracker("step")
        notes = self._notes_of(optimizer)
        state = notes.state
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Call update() once per iteration, after all "
                "optimizers have stepped."
            )
        if closure is not None:
            return self._step_with_closure(notes, closure, args, kwargs)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return self._step_on_device(notes, args, kwargs)
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            return self._note_no_gradients(notes)
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        """Step an ordinary optimizer unless a flag in the record is set. One host read."""
        flags = list(optimizer_state["found_inf_per_device"].values())
        if not flags:   # not reached from `step`; as in torch, no flags mean no inf
            return optimizer.step(*args, **kwargs)
        notes = self._notes.get(id(optimizer))
        if notes is None or notes.state is not optimizer_state:
            notes = Notes(optimizer, optimizer_state, self._last_step_of(optimizer))
        found_inf = combined(flags, flags[0].device if self._scale is None else self._scale.device)
        skip = found_inf.item() != 0
        if skip:
            self._count(notes, found_inf, skipped=True)
        is_outlier = notes.outlier is not None and notes.outlier.item() != 0
        result = None if skip or is_outlier else optimizer.step(*args, **kwargs)
        self._note_step(notes, found_inf, skipped=skip)
        return result

    def _step_on_device(self, notes: Notes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step an optimizer that skips on the device by itself. Never syncs."""
        optimizer, state = notes.optimizer, notes.state
        if notes.last_step.takes_scaler is None:
            notes.last_step.takes_scaler = "grad_scaler" in inspect.signature(optimizer.step).parameters
        if notes.last_step.takes_scaler:
            if self._skip_above is not None:
                raise ValueError(
                    f"step of {type(optimizer).__name__} takes grad_scaler, which skip_above does not judge; expected "
                    "an optimizer that reads found_inf, or a scaler without skip_above"
                )
            warn_user(
                "passing the scaler to step() as grad_scaler is deprecated by torch: read the tensors "
                "optimizer.grad_scale and optimizer.found_inf instead.",
                category=FutureWarning,
            )
            result = optimizer.step(*args, **{**kwargs, "grad_scaler": self})
            state["stage"] = OptState.STEPPED
            return result
        if state["stage"] is OptState.READY and self._skip_above is not None:
            self._unscale_and_judge_(notes)
        elif state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        if not state["found_inf_per_device"]:
            return self._note_no_gradients(notes)
        found_inf = self._found_inf(notes)
        grad_scale = getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.READY and self._rule.scales_losses:
            grad_scale = self._scale if grad_scale is None else self._scale * grad_scale
        skipped = self._count(notes, found_inf, skipped=None)
        run = step_contract.run if not is_compiling() else step_contract.run_uncompiled
        flag = found_inf if notes.outlier is None else torch.maximum(found_inf, notes.outlier)
        result = run(optimizer, args, kwargs, flag, grad_scale, notes.clip_factor)
        notes.clip_factor = None
        state["stage"] = OptState.STEPPED
        self._note_step(notes, found_inf, skipped=skipped)
        return result

    def _step_with_closure(
        self, notes: Notes, closure: closures.Closure, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Step an optimizer that evaluates the loss itself, and unscale for each evaluation; see `closures`."""
        optimizer, state = notes.optimizer, notes.state
        if self._scale_calls and state["stage"] is OptState.READY:
            self.unscale_(optimizer)    # a first backward outside the closure, as with SAM
        if state["found_inf_per_device"] and self._found_inf(notes).item() != 0:
            return self._abandon(notes)
        self._apply_clip_factor_(notes)

        def evaluate() -> Any:
            calls = self._scale_calls
            with torch.enable_grad():
                loss = closure()
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(loss.device if isinstance(loss, Tensor) else self._where())
            scale: Any = self._scale
            if self._scale_calls > calls:
                state["stage"] = OptState.READY
                self.unscale_(optimizer)
            else:  # the closure did not scale: nothing to unscale, still to be checked
                found = self._unscale_grads_(optimizer, torch.ones_like(scale), torch.zeros_like(scale))
                state.update(stage=OptState.UNSCALED, found_inf_per_device=found)
            # the loss of this rank counts on every rank that must agree
            verdict = {scale.device: torch.full_like(scale, 0.0 if closures.is_finite(loss) else 1.0)}
            ranks.agree(verdict, notes.groups, scale.device)
            state["found_inf_per_device"] = merged(state["found_inf_per_device"], verdict)
            if self._found_inf(notes).item() != 0:
                raise closures.NonFiniteEvaluation
            return loss

        snapshot = closures.Snapshot(optimizer)
        args, kwargs = closures.replace(evaluate, args, kwargs)
        try:
            result = optimizer.step(*args, **kwargs)
        except closures.NonFiniteEvaluation:
            snapshot.restore()
            return self._abandon(notes)
        if not state["found_inf_per_device"]:
            return self._note_no_gradients(notes)
        state["stage"] = OptState.STEPPED
        self._note_step(notes, self._found_inf(notes), skipped=False)
        return result

    def _abandon(self, notes: Notes) -> None:
        """End a step with a closure of which an evaluation was not finite; its gradients become None.

        The next step would take them for those of a backward outside its closure, and end before it calls the closure.
        """
        notes.state["stage"] = OptState.STEPPED
        found_inf = self._found_inf(notes)
        self._count(notes, found_inf, skipped=True)
        for param in parameters(notes.optimizer):
            param.grad = None
        self._note_step(notes, found_inf, skipped=True)

    def _found_inf(self, notes: Notes) -> Tensor:
        """The flags of a record as one, 0.0 or 1.0, on the scale's device; without a scale on the first flag's."""
        flags = list(notes.state["found_inf_per_device"].values())
        return combined(flags, flags[0].device if self._scale is None else self._scale.device)

    def _note_step(self, notes: Notes, found_inf: Tensor, *, skipped: bool | None) -> None:
        """Remember how a step ended; `skipped` None when only the device knows. Calls `on_stuck` if that is due."""
        outlier = None if notes.outlier is None else (notes.outlier != 0) & (found_inf == 0)    # and nothing else
        if outlier is not None:
            self._outlier = outlier if self._outlier is None else self._outlier | outlier
        if self._history is not None:  # else another scaler scales these gradients; its steps are not counted here
            self._history.note_step(found_inf, outlier)
        last = notes.last_step
        last.found_inf, last.skipped, last.idle_steps, last.outlier = found_inf, skipped, -1, notes.outlier
        self._stuck_check_due = skipped is None
        if skipped or notes.outlier is not None:
            step_contract.mark_step_called(notes.optimizer)
        if skipped:
            self._check_stuck(float(self._scale_on(found_inf.device)))

    def _note_no_gradients(self, notes: Notes) -> None:
        """End the step of an optimizer without gradients; warn about one that has never found any."""
        notes.state["stage"] = OptState.STEPPED
        optimizer = notes.optimizer
        if self._history is not None:
            self._history.no_gradients += 1
        last = notes.last_step
        last.found_inf, last.skipped, last.counts = torch.zeros_like(self._scale_on(torch.device("cpu"))), True, None
        step_contract.mark_step_called(optimizer)
        if last.idle_steps >= 0:
            last.idle_steps += 1
        if last.idle_steps == _IDLE_STEPS:
            self._warn_once(
                "idle",
                f"{type(optimizer).__name__} has found no gradients in its first {_IDLE_STEPS} steps; its parameters "
                "stay as they are. Expected gradients from backward() of a scaled loss: the optimizer may hold "
                "parameters of another model, or parameters that are frozen or were replaced; the loss may be detached "
                "from them; zero_grad() may be called between backward() and step().",
            )

    def _count(self, notes: Notes, found_inf: Tensor, *, skipped: bool | None) -> bool | None:
        """Count inf and NaN for the report where the host can see that a step is skipped, before the step: master
        weights' gradients are gone after it. Returns `skipped`, or where that was None what the host can see.
        """
        if skipped is None:
            flag = host_value_or_none(found_inf)
            skipped = None if flag is None else flag != 0
        if skipped is not False:
            notes.last_step.counts = count_nonfinite(notes.optimizer) if skipped else None
        return skipped

    # 5. The next scale: update

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale to the found_inf flags of the iteration, and make every optimizer READY. Never syncs.

        Args:
            new_scale: a scale to use from now on, kept within the strategy's bounds: a positive number, or a 1-element
                tensor, which is copied; if it holds 0, inf, NaN or a negative number, the scale stays.

        Raises:
            AssertionError: nothing was scaled or checked in this iteration, or a `new_scale` of a wrong kind.
            ValueError: a number that is no scale.
        """
        if not self._enabled:
            return
        if self._scale is None or self._history is None:
            self._check_scale_growth_tracker("update")
        if new_scale is not None:
            self._set_scale(new_scale)
            self._begin_iteration()
            return
        flags: list[Tensor] = []
        idle = True
        for state in self._states.values():
            flags += state["found_inf_per_device"].values()
            idle = idle and state.get("stage", OptState.READY) is OptState.READY
        if flags:
            scale: Any = self._scale
            self._advance(combined(flags, scale.device))
        elif idle:
            raise AssertionError(
                "No inf checks were recorded prior to update. Call scaler.step(optimizer), or scaler.unscale_, in "
                "every iteration before update()."
            )
        self._begin_iteration()

    def _advance(self, found_inf: Tensor) -> None:
        """Apply the strategy's rule for one update, in place and without a sync, and note it in the history."""
        rule, scale, history = self._rule, self._scale, self._history
        used = scale.clone() if self._used_scale is None else self._used_scale
        norms = self._judged_norms | self._clipped_norms
        is_due = history.note_update(used, found_inf, norms.values(), self._outlier)
        if history.triton is not None and isinstance(rule, DynamicLossScale):
            history.triton.update_scale_(
                (scale, self._growth_tracker, *self._counters), found_inf,
                growth_factor=rule.growth_factor, backoff_factor=rule.backoff_factor,
                growth_interval=rule.growth_interval, min_scale=rule.min_scale, max_scale=rule.max_scale,
                hysteresis=rule.hysteresis, refills_when_clean=rule.hysteresis_refill == "clean",
                tolerance=rule.tolerance,
            )
        elif rule.is_plain:
            update_scale_(
                scale, self._growth_tracker, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval
            )
            scale.clamp_(rule.min_scale, rule.max_scale)
        else:
            state = ScaleState(scale, self._growth_tracker, *self._counters)
            for old, new in zip(state, rule.next_state(state, found_inf), strict=True):
                old.copy_(new)
        if is_due:
            history.fold(scale)

    def _set_scale(self, new_scale: Any) -> None:
        """Set the scale, kept within the strategy's bounds; a tensor that holds no usable scale changes nothing."""
        rule, scale, history = self._rule, self._scale, self._history
        if isinstance(new_scale, Tensor) and (
            new_scale.device.type in (self._device, scale.device.type)
            and new_scale.numel() == 1 and not new_scale.requires_grad
        ):
            wanted = new_scale.reshape(()).to(scale)
            usable = torch.isfinite(wanted) & (wanted > 0)
            wanted = torch.where(usable, wanted.clamp(rule.min_scale, rule.max_scale), scale)
        elif isinstance(new_scale, numbers.Real) and not isinstance(new_scale, bool):
            value = state_dict_checks.usable_scale(new_scale, "new_scale")
            wanted = torch.full_like(scale, min(max(value, rule.min_scale), rule.max_scale))
        else:
            given = type(new_scale).__name__ if hasattr(new_scale, "param_groups") else repr(new_scale)
            raise AssertionError(
                "new_scale should be a number or a 1-element tensor on the scaler's device with requires_grad=False; "
                f"got {given}"
            )
        # The history must not count this change as growth or backoff.
        norms = self._judged_norms | self._clipped_norms
        history.note_update(scale.clone(), torch.zeros_like(scale), norms.values(), self._outlier)
        history.fold(scale)
        scale.copy_(wanted)


def _too_late(name: str) -> RuntimeError:
    """The error for a method that is called after `step`."""
    return RuntimeError(
        f"{name}() is being called after step(). Call it between backward() and step(), and update() once all "
        "optimizers have stepped."
    )
