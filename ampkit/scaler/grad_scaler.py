"""GradScaler, a training iteration in its order: scale, unscale_, clip_grad_norm_, step, update.

An optimizer's stage is READY after `update()`, UNSCALED after `unscale_` or clipping, and STEPPED after `step`.

A step is skipped if a gradient is inf or NaN, or the norm is above `skip_above`:

1. `_maybe_opt_step` reads the flag and does not call the optimizer. `_step_on_device` calls an optimizer that skips on
   the device, with the flag. `_step_with_closure` ends a step whose loss or gradients were not finite, and undoes it.
   Parameters and optimizer state are as before the step.
2. `_count` counts inf and NaN for `overflow_report`, while the gradients are there.
3. `_note_step` notes the end of the step for `found_inf`, `stepped`, `stats` and `history`. It tells torch's learning
   rate schedulers that `step` was called, and calls `on_stuck` if the scale can hardly fall further.
4. `update` lets the scale back off, unless only the norm was too large.

Lightning, Accelerate, FSDP, Composer, fairscale and others ask for `isinstance(scaler, torch.amp.GradScaler)`, read and
write private attributes of torch's class, and override its private methods. Those keep torch's names, shapes and
callers. `ScalerState` says what each attribute holds.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.compiler import is_compiling

import ampkit_kernels
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
from ampkit.scaler.loss_scale import ScaleState
from ampkit.scaler.optimizer_notes import MARK, LastStep, Notes, note_backward, refuse_claimed
from ampkit.scaler.overflow_report import count_nonfinite
from ampkit.scaler.scaler_answers import ScalerAnswers
from ampkit.scaler.skip_above import TimesMedian
from ampkit.torch_internals.modules import is_flat
from ampkit.torch_internals.optimizers import update_scale_
from ampkit.user_code import warn_user

Outputs = TypeVar("Outputs", bound=Iterable[Any])
Flags = dict[torch.device, Tensor]
"""A 0-d flag for each device that holds gradients: 0.0, or nonzero if one of them is not finite."""

_IDLE_STEPS = 3
"""Warn after this many initial steps in which the optimizer found no gradients."""


class GradScaler(ScalerAnswers):
    """Scale losses so that small gradients survive float16; skip steps whose gradients are not finite.

    Takes the place of `torch.amp.GradScaler`: same methods, arguments, results and `state_dict`.

    Args:
        device: device type that the script trains on; None: the current accelerator, else "cpu".
        init_scale: first scale.
        growth_factor: multiplies the scale after `growth_interval` updates without overflow; above 1.
        backoff_factor: multiplies the scale after an overflow; below 1.
        growth_interval: updates in a row without overflow before the scale grows.
        enabled: False turns every method into a pass-through.
        loss_scale: a strategy in place of the four numbers above: `DynamicLossScale` with bounds, hysteresis or
            tolerance, `StaticLossScale`, or `NoOpLossScale`; None: the four numbers.
        process_group: ranks that must skip together although each has other gradients (pipeline stages, hand-made
            shards); None: those that DTensor and FSDP1 gradients name. DDP needs no group.
        allow_fp16: unscale float16 gradients too, for optimizers that keep float32 master weights.
        on_stuck: the reaction to gradients that overflow at `DynamicLossScale.stuck_scale` or below: "warn" once,
            "raise" `LossScaleStuckError`, or a function that is called with `ScalerStats`.
        skip_above: skip steps whose gradient norm, over all parameters of the optimizer and before clipping, is above
            a number or a multiple of the running median (`TimesMedian`); the scale does not change. The norm has the
            order of `clip_grad_norm_` if that is 0, 1, 2 or inf, else order 2, and is taken over the `process_group`.
            Without clipping, `unscale_` and `step` read the gradients once more for it. None: no limit.

    Raises:
        AssertionError: growth_factor <= 1 or backoff_factor >= 1, as in torch.
        TypeError: `skip_above` is neither a number nor `TimesMedian`, or `loss_scale` is no strategy.
        ValueError: another number is out of range, or both a strategy and its numbers are given.

    Synchronization: `step` of an ordinary optimizer reads one number from the device, and a second if it is skipped or
    has a `skip_above`. Amp-aware optimizers (`fused=True`, `ampkit.optim`) and all other methods read none, except for
    the methods that return Python values.

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
        """Multiply a loss by the scale. Never synchronizes.

        Args:
            outputs: a loss, or tensors in nested lists, tuples, mappings or iterators.

        Returns:
            The products, in containers of the same types; float32 for a 0-d float16 or bfloat16 loss.

        Raises:
            ValueError: `outputs` holds something other than tensors.
        """
        if not self._enabled:
            return outputs
        self._scale_calls += 1
        if self._notes:
            note_backward(self._by_mark)
        copies: dict[torch.device, Tensor] = {}
        if isinstance(outputs, Tensor):
            return self._scale_one(outputs, copies)
        return map_tensors(outputs, lambda output: self._scale_one(output, copies), self._scale_lazily)

    def _scale_lazily(self, outputs: Any) -> Iterator[Any]:
        """Return an iterator over scaled outputs for an iterable, as torch does; `ValueError` for anything else."""
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
        """Multiply the optimizer's gradients by 1 / scale, in place, and check them for inf and NaN.

        `step` does this itself; call it to read or change gradients before the step, once per iteration, after the
        last backward. Gradients may be sparse, complex, expanded, non-contiguous or DTensors. Never synchronizes.

        Args:
            optimizer: the optimizer whose gradients to unscale.
            allow_repeat: a second call in an iteration does nothing instead of raising.

        Raises:
            AssertionError: nothing has been scaled yet.
            RuntimeError: the optimizer has been unscaled or stepped in this iteration, or one of its gradients was
                unscaled for another optimizer. No gradient's value has changed then.
            ValueError: a gradient is float16, without `allow_fp16`. Nothing has changed then.
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
        notes.clip_factor = None  # may be there if other code has made the optimizer READY again
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
        """Multiply gradients by `inv_scale`, in place, and return a flag per device: `found_inf` on its own device.

        The optimizer needs no record, as in torch.
        """
        gradients = self._gradients(optimizer, allow_fp16)
        flags: Flags = {}
        for device in gradients.by_device:  # a comprehension would be a call
            flags[device] = found_inf if device == found_inf.device else moved(found_inf, device)
        with torch.set_grad_enabled(False):  # at half the cost of torch.no_grad()
            if self._rule.scales_losses:
                unscale_(gradients, inv_scale, flags)
            else:
                check_finite(gradients, torch.ones_like(found_inf), flags)
        self._agree(optimizer, flags, gradients.meshes)
        return flags

    def _inverse_scale(self) -> tuple[Tensor, Tensor]:
        """1 / scale, or 1 for a strategy that scales no losses; and a clear flag: 0-d float32 on the scale's device."""
        scale = self._scale
        if not self._rule.scales_losses:
            return torch.ones_like(scale), torch.zeros_like(scale)
        inv_scale, flag, self._used_scale = ampkit_kernels.inverse_scale(scale)
        return inv_scale, flag

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        """Check gradients that stay scaled for inf and NaN; set the flags that `unscale_` would set."""
        if self._scale is None or self._history is None:
            self._check_scale_growth_tracker("_check_inf_per_device")
        notes = self._notes_of(optimizer)
        inv_scale, flag = self._inverse_scale()
        gradients = self._gradients(optimizer)
        notes.state["found_inf_per_device"] = flags = {device: moved(flag, device) for device in gradients.by_device}
        with torch.set_grad_enabled(False):
            check_finite(gradients, inv_scale, flags)
        self._agree(optimizer, flags, gradients.meshes)
        return flags

    def _gradients(self, optimizer: Any, allow_fp16: bool = True, *, coalesce: bool = False) -> Gradients:
        """Collect the optimizer's gradients and mark them as its own.

        Gradients of 16-bit parameters move to their masters first. Raises `RuntimeError` for a gradient that was
        unscaled for another optimizer in this iteration.
        """
        take_master_gradients(optimizer)
        gradients = collect(parameters(optimizer), None if allow_fp16 else optimizer, coalesce=coalesce)
        notes = self._notes.get(id(optimizer))
        if notes is not None:
            if len(self._notes) > 1:
                refuse_claimed(gradients.originals, notes, self._by_mark)
            mark = notes.mark, -1
            for grad in gradients.originals:
                setattr(grad, MARK, mark)
        return gradients

    def _agreement_of(self, optimizer: Any, meshes: Mapping[tuple[Any, ...], int]) -> ranks.Agreement | None:
        """The ranks that must skip together, those of `meshes` and of `process_group`; None if there are none."""
        notes = self._notes.get(id(optimizer))
        last = self._last_step_of(optimizer) if notes is None else notes.last_step
        own_group = self.process_group
        if own_group is None and last.holds_shards and ranks.several():
            own_group = torch.distributed.group.WORLD  # shards of FSDP1 do not say which ranks have the other parts
        if not meshes and own_group is None:
            return None
        agreement = ranks.Agreement(meshes, own_group)
        if notes is not None:
            notes.agreement = agreement
        return agreement

    def _agree(self, optimizer: Any, flags: Flags, meshes: Mapping[tuple[Any, ...], int]) -> None:
        """Make flags the same on all ranks that must skip together."""
        agreement = self._agreement_of(optimizer, meshes)
        if agreement is not None:
            agreement.agree(flags, self._where() if self._scale is not None or not flags else next(iter(flags)))

    def _notes_of(self, optimizer: Any) -> Notes:
        """The notes about an optimizer in this iteration, with its record; both are made if there are none.

        Other code may have put another record in the place of the one that the notes belong to.
        """
        notes = self._notes.get(id(optimizer))
        if notes is None and not hasattr(optimizer, "param_groups"):
            parameters(optimizer)  # raises, before a record is made
        state = self._states[id(optimizer)]
        if notes is None or notes.state is not state:
            if notes is not None:
                del self._by_mark[notes.mark]
            notes = self._notes[id(optimizer)] = Notes(optimizer, state, self._last_step_of(optimizer))
            self._by_mark[notes.mark] = notes
        return notes

    def _last_step_of(self, optimizer: Any) -> LastStep:
        last = self._last_steps.get(optimizer)
        if last is None:
            holds_shards = any(map(is_flat, parameters(optimizer)))
            last = self._last_steps[optimizer] = LastStep(holds_shards, norms=self._first_norms(optimizer))
        return last

    # 3. The norm: clip_grad_norm_, and the verdict of `skip_above`

    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | Tensor,
        norm_type: float = 2.0,
        *,
        process_group: Any = None,
    ) -> Tensor:
        """Unscale, check and clip the optimizer's gradients together. Never synchronizes.

        Replaces `unscale_` and `torch.nn.utils.clip_grad_norm_`: gradients are read twice and written once instead of
        three times and twice. After `unscale_` it only clips. If a gradient is not finite, nothing is multiplied.
        Gradients of optimizers that take a multiplier (`ampkit.optim`) stay scaled until the step.

        Args:
            optimizer: the optimizer whose gradients to clip.
            max_norm: the largest norm after clipping, a number or a 0-d tensor.
            norm_type: the order of the norm; inf: the largest magnitude.
            process_group: ranks that hold other gradients of the same model (pipeline stages, hand-made shards), over
                which the norm is taken; None: this rank, and the other shards of DTensors.

        Returns:
            The norm of all unscaled gradients before clipping, 0-d on the scale's device; float64 if one is, else
            float32.

        Raises:
            AssertionError, ValueError, RuntimeError: as `unscale_`; RuntimeError also for FSDP1 without a group.
            TypeError: `max_norm` is no number.
            AttributeError: `optimizer` is no optimizer.
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
            notes.outlier = None  # may be there if other code has made the optimizer READY again
            if norm_type not in clipping.HOMOGENEOUS_ORDERS:
                self.unscale_(optimizer)
        norm, judged, is_same = self._clip_norm_(notes, max_norm, norm_type, process_group)
        if self._skip_above is not None and notes.outlier is None and notes.state["found_inf_per_device"]:
            self._judge(notes, judged, is_same)
        before = self._clipped_norms.get(id(optimizer))
        self._clipped_norms[id(optimizer)] = norm if before is None else torch.maximum(before, norm)
        return norm

    def _unscale_and_judge_(self, notes: Notes) -> None:
        """Unscale, check, and judge the 2-norm by `skip_above`, for code that does not call `clip_grad_norm_`.

        For optimizers that take a multiplier the factor stays in the notes, as after clipping.
        """
        if self.process_group is None and notes.last_step.holds_shards and ranks.several():
            raise clipping.refusal_of_flat_shards()
        notes.outlier = None  # may be there if other code has made the optimizer READY again
        norm, judged, is_same = self._clip_norm_(notes, math.inf, 2.0, self.process_group)
        if notes.state["found_inf_per_device"]:
            self._judge(notes, judged, is_same)
        before = self._judged_norms.get(id(notes.optimizer))
        self._judged_norms[id(notes.optimizer)] = norm if before is None else torch.maximum(before, norm)

    def _clip_norm_(
        self, notes: Notes, max_norm: float | Tensor, norm_type: float, process_group: Any
    ) -> tuple[Tensor, Tensor, bool]:
        """Unscale unless that is done, check and clip.

        Returns:
            The unscaled norm; the norm by which `skip_above` judges the step; and whether all ranks that skip together
            have the same one.
        """
        optimizer, state = notes.optimizer, notes.state
        if notes.clip_factor is not None:
            self._apply_clip_factor_(notes)
        flags: Flags = {}
        if state["stage"] is OptState.READY:
            inv_scale, flag = self._inverse_scale()
        else:
            flags = state["found_inf_per_device"]
            inv_scale = torch.ones_like(self._scale)
            flag = torch.zeros_like(inv_scale)
        gradients = self._gradients(optimizer, self.allow_fp16, coalesce=True)
        for device in gradients.by_device:
            if device not in flags:
                flags[device] = flag if device == flag.device else moved(flag, device)
        with torch.set_grad_enabled(False):
            agreement = self._agreement_of(optimizer, gradients.meshes)
            judges = self._skip_above is not None and notes.outlier is None
            if gradients.meshes or process_group is not None or (judges and agreement is not None):
                norm, judged, is_same = clipping.ranked_norms(
                    gradients, inv_scale, flags, norm_type, agreement or ranks.Agreement({}), process_group, judges
                )
                factor = clipping.factor_of(norm, inv_scale, max_norm)
            else:
                norm, factor = clipping.norm_and_factor(gradients, inv_scale, flags, norm_type, max_norm)
                judged, is_same = norm, True
                if agreement is not None:
                    agreement.agree(flags, inv_scale.device)
            state["found_inf_per_device"], state["stage"] = flags, OptState.UNSCALED
            if getattr(optimizer, "_step_supports_grad_multiplier", False):
                notes.clip_factor = factor.float()
            else:
                clipping.multiply_(gradients, factor, flags)
        return norm, judged, is_same

    def _judge(self, notes: Notes, norm: Tensor, is_same: bool) -> None:
        """Note whether the norm is above `skip_above` on any of the ranks that skip together.

        They need no agreement where all have the same norm.
        """
        limit: Any = self._skip_above
        last = notes.last_step
        if isinstance(limit, TimesMedian):
            norms: Any = last.norms
            if norms.device != norm.device:
                last.norms = norms = norms.to(norm.device)
            outlier = norm_limit.judge_(limit, norms, norm)
        else:
            outlier = norm_limit.is_outlier(norm, limit)
        if not is_same and notes.agreement is not None:
            notes.agreement.agree({outlier.device: outlier}, outlier.device)
        notes.outlier = outlier

    def _apply_clip_factor_(self, notes: Notes) -> None:
        """Multiply gradients now by the factor that clipping has left for the optimizer's `step`, if there is one."""
        factor, notes.clip_factor = notes.clip_factor, None
        if factor is None:
            return
        gradients = self._gradients(notes.optimizer)
        with torch.set_grad_enabled(False):
            clipping.multiply_(gradients, factor, notes.state["found_inf_per_device"])

    def clip_grad_value_(self, optimizer: torch.optim.Optimizer, clip_value: float) -> None:
        """Unscale and check the optimizer's gradients, and clamp every element to `[-clip_value, clip_value]`.

        After `unscale_` or `clip_grad_norm_` it only clamps. Real and imaginary parts are clamped each for itself.
        Never synchronizes.

        Args:
            optimizer: the optimizer whose gradients to clamp.
            clip_value: the largest magnitude of an element.

        Raises:
            AssertionError, RuntimeError, ValueError: as `unscale_`.
        """
        self.unscale_(optimizer, allow_repeat=True)
        clipping.clamp_(self._gradients(optimizer), float(clip_value))

    # 4. The optimizer: step, or a skipped step

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale unless that is done, then call `optimizer.step` if all gradients are finite.

        An optimizer without gradients is not called, and warned about if its first steps find none. Amp-aware
        optimizers (`fused=True`, `ampkit.optim`) skip on the device and never synchronize; others cost one read from
        the device, two if the step is skipped or has a `skip_above`.

        With a closure, as LBFGS and SAM take it, each evaluation is unscaled, checked and read once. The closure calls
        `scaler.scale(loss).backward()` and returns the unscaled loss. A non-finite evaluation ends the step, restores
        parameters and optimizer state, and sets the optimizer's gradients to None.

        Args:
            optimizer: the optimizer to step.
            args, kwargs: passed to `optimizer.step`; a closure goes first or by keyword.

        Returns:
            The result of `optimizer.step`; None if the host skipped the step.

        Raises:
            AssertionError: nothing has been scaled yet.
            RuntimeError: the optimizer has been stepped in this iteration.
            ValueError: `skip_above` with a closure, or with an optimizer whose `step` takes the scaler.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        closure = closures.extract(args, kwargs) if args or kwargs else None
        if closure is not None and self._skip_above is not None:
            raise ValueError(
                "skip_above does not support closures; use a GradScaler without skip_above for this optimizer"
            )
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
        """Step an ordinary optimizer unless a flag in its record is set. Reads the device once, again if the step is
        skipped, and once more under `skip_above`."""
        flags = list(optimizer_state["found_inf_per_device"].values())
        if not flags:  # `step` does not get here; as in torch, no flags mean no inf
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
        """Step an optimizer that itself skips on the device. Never synchronizes."""
        optimizer, state = notes.optimizer, notes.state
        if notes.last_step.takes_scaler is None:
            notes.last_step.takes_scaler = "grad_scaler" in inspect.signature(optimizer.step).parameters
        if notes.last_step.takes_scaler:
            if self._skip_above is not None:
                raise ValueError(
                    f"skip_above does not support {type(optimizer).__name__}, whose step takes grad_scaler; use an "
                    "optimizer that reads found_inf, or a GradScaler without skip_above"
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
        run = step_contract.run_uncompiled if is_compiling() else step_contract.run
        flag = found_inf if notes.outlier is None else torch.maximum(found_inf, notes.outlier)
        result = run(optimizer, args, kwargs, flag, grad_scale, notes.clip_factor)
        notes.clip_factor = None
        state["stage"] = OptState.STEPPED
        self._note_step(notes, found_inf, skipped=skipped)
        return result

    def _step_with_closure(
        self, notes: Notes, closure: closures.Closure, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Step an optimizer that evaluates the loss itself, and unscale each evaluation; see `closures`."""
        optimizer, state = notes.optimizer, notes.state
        if self._scale_calls and state["stage"] is OptState.READY:
            self.unscale_(optimizer)  # a first backward outside the closure, as with SAM
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
            else:  # the closure did not scale its loss: nothing to unscale, but gradients to check
                flags = self._unscale_grads_(optimizer, torch.ones_like(scale), torch.zeros_like(scale))
                state.update(stage=OptState.UNSCALED, found_inf_per_device=flags)
            # The loss of this rank counts on all ranks that skip together.
            loss_flag = {scale.device: torch.full_like(scale, 0.0 if closures.is_finite(loss) else 1.0)}
            if notes.agreement is not None:
                notes.agreement.agree(loss_flag, scale.device)
            state["found_inf_per_device"] = merged(state["found_inf_per_device"], loss_flag)
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
        """Skip a step with a closure after an evaluation that was not finite, and set its gradients to None.

        Otherwise the next step would take them for gradients of a backward outside its closure, and end at once.
        """
        notes.state["stage"] = OptState.STEPPED
        found_inf = self._found_inf(notes)
        self._count(notes, found_inf, skipped=True)
        for param in parameters(notes.optimizer):
            param.grad = None
        self._note_step(notes, found_inf, skipped=True)

    def _found_inf(self, notes: Notes) -> Tensor:
        """The flags of a record as one, 0.0 or 1.0, on the scale's device; without a scale, on the first flag's."""
        flags = list(notes.state["found_inf_per_device"].values())
        return combined(flags, flags[0].device if self._scale is None else self._scale.device)

    def _note_step(self, notes: Notes, found_inf: Tensor, *, skipped: bool | None) -> None:
        """Note how a step ended, `skipped` None if only the device knows, and call `on_stuck` if that is due."""
        outlier = None if notes.outlier is None else (notes.outlier != 0) & (found_inf == 0)  # skipped for it alone
        if outlier is not None:
            self._outlier = outlier if self._outlier is None else self._outlier | outlier
        if self._history is not None:  # None: another scaler scales these gradients, and counts their steps
            self._history.note_step(found_inf, outlier)
        last = notes.last_step
        last.found_inf, last.skipped, last.idle_steps, last.outlier = found_inf, skipped, -1, notes.outlier
        self._stuck_check_due = skipped is None
        if skipped or notes.outlier is not None:
            step_contract.mark_step_called(notes.optimizer)
        if skipped:
            self._check_stuck(float(self._scale_on(found_inf.device)))

    def _note_no_gradients(self, notes: Notes) -> None:
        """Note the step of an optimizer without gradients; warn if its first steps have found none."""
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
                "did not change. Expected gradients from backward() of a scaled loss. The optimizer may hold "
                "parameters of another model, or parameters that are frozen or were replaced; the loss may be detached "
                "from them; or zero_grad() is called between backward() and step().",
            )

    def _count(self, notes: Notes, found_inf: Tensor, *, skipped: bool | None) -> bool | None:
        """Count inf and NaN for the report if the host can see that a step is skipped.

        This comes before the step, which drops the gradients of master weights. Returns `skipped`, or for None what
        the host can see.
        """
        if skipped is None:
            flag = host_value_or_none(found_inf)
            skipped = None if flag is None else flag != 0
        if skipped is not False:
            notes.last_step.counts = count_nonfinite(notes.optimizer) if skipped else None
        return skipped

    # 5. The next scale: update

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Set the scale of the next iteration, and make every optimizer READY. Never synchronizes.

        Args:
            new_scale: a scale to use from now on, clamped to the strategy's bounds: a positive number, or a 1-element
                tensor, which is copied (one that holds 0, inf, NaN or a negative number leaves the scale as it is);
                None: the strategy decides, from the flags of this iteration.

        Raises:
            AssertionError: nothing was scaled or checked in this iteration, or `new_scale` is of another type.
            ValueError: `new_scale` is a number that is no scale.
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
        """Apply the strategy's rule in place, and note the update in the history. Never synchronizes."""
        rule, scale, history = self._rule, self._scale, self._history
        used = scale.clone() if self._used_scale is None else self._used_scale
        norms = self._judged_norms | self._clipped_norms
        is_due = history.note_update(used, found_inf, norms.values(), self._outlier)
        if rule.is_plain:
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
        """Set the scale, clamped to the strategy's bounds; a tensor that holds no usable scale changes nothing."""
        rule, scale, history = self._rule, self._scale, self._history
        if isinstance(new_scale, Tensor) and (
            new_scale.device.type in (self._device, scale.device.type)
            and new_scale.numel() == 1
            and not new_scale.requires_grad
        ):
            wanted = new_scale.reshape(()).to(scale)
            usable = torch.isfinite(wanted) & (wanted > 0)
            wanted = torch.where(usable, wanted.clamp(rule.min_scale, rule.max_scale), scale)
        elif isinstance(new_scale, numbers.Real) and not isinstance(new_scale, bool):
            value = state_dict_checks.usable_scale(new_scale, "new_scale")
            wanted = torch.full_like(scale, min(max(value, rule.min_scale), rule.max_scale))
        else:
            described = type(new_scale).__name__ if hasattr(new_scale, "param_groups") else repr(new_scale)
            raise AssertionError(
                "new_scale should be a number or a 1-element tensor on the scaler's device with requires_grad=False; "
                f"got {described}"
            )
        # Folding first: the history must not count this change as growth or backoff.
        norms = self._judged_norms | self._clipped_norms
        history.note_update(scale.clone(), torch.zeros_like(scale), norms.values(), self._outlier)
        history.fold(scale)
        scale.copy_(wanted)


def _too_late(name: str) -> RuntimeError:
    """The error for a method that was called after `step`."""
    return RuntimeError(
        f"{name}() is being called after step(). Call it between backward() and step(), and update() once all "
        "optimizers have stepped."
    )
