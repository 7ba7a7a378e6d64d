"""GradScaler: a training iteration in its order, from `scale` to `update`.

`scaler_base` has everything else: the constructor, the scale, the queries about past steps, saving.

An optimizer's stage is READY after `update()`, UNSCALED after `unscale_` or clipping, and STEPPED after `step`. Each
public method that takes an optimizer looks up its `OptimizerRecord` and passes it on.

A step is skipped if a gradient is inf or NaN, or the norm is above `skip_above`:

1. `_maybe_opt_step` reads the flag and does not call the optimizer. `_step_on_device` calls an optimizer that skips on
   the device, with the flag. Parameters and optimizer state are as before the step.
2. `_count` counts inf and NaN for `overflow_report`, while the gradients are there.
3. `_note_step` notes the end of the step for `found_inf`, `stepped`, `stats` and `history`. It notifies torch's
   learning rate schedulers that `step` was called, and calls `on_stuck` if the scale can hardly fall further.
4. `update` lets the scale back off, unless only the norm was too large.

Lightning, Accelerate, FSDP, Composer, fairscale and others check `isinstance(scaler, torch.amp.GradScaler)`, read and
write private attributes of torch's class, and override its private methods. These attributes and methods keep torch's
names, shapes and callers.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.compiler import is_compiling

import ampkit_kernels
from ampkit.containers import map_tensors
from ampkit.gradients import clipping, ranks, step_contract
from ampkit.gradients.collect import (
    Gradients,
    collect,
    combined,
    gradients_of,
    host_value_or_none,
    moved,
    parameters,
    take_master_gradients,
)
from ampkit.scaler import loss_scale as scales
from ampkit.scaler import saved_state
from ampkit.scaler import skip_above as norm_limit
from ampkit.scaler.loss_scale import ScaleState
from ampkit.scaler.optimizer_record import OptimizerRecord, renew_owner_ids, set_owner
from ampkit.scaler.overflow_report import count_nonfinite
from ampkit.scaler.scaler_base import ScalerBase
from ampkit.scaler.skip_above import TimesMedian
from ampkit.torch_private import is_flat, update_scale_
from ampkit.user_code import warn_user

Outputs = TypeVar("Outputs", bound=Iterable[Any])
Flags = dict[torch.device, Tensor]
"""A 0-d flag for each device that holds gradients: 0.0, or nonzero if one of them is not finite."""

_EMPTY_STEPS = 3
"""Warn after this many initial steps in which the optimizer found no gradients."""


class GradScaler(ScalerBase):
    """Scale losses so that small gradients survive float16; skip steps whose gradients are not finite.

    Takes the place of `torch.amp.GradScaler`: same methods, arguments, results and `state_dict`.

    Args:
        device: device type that the script trains on; None: the current accelerator, or "cpu" without one.
        init_scale: first scale.
        growth_factor: multiplies the scale after `growth_interval` updates without overflow; above 1.
        backoff_factor: multiplies the scale after an overflow; below 1.
        growth_interval: updates in a row without overflow before the scale grows.
        enabled: False turns every method into a pass-through.
        loss_scale: a strategy instead of the four numbers above: `DynamicLossScale` with bounds or hysteresis,
            `StaticLossScale`, or `NoOpLossScale`; None: the four numbers.
        process_group: ranks that must skip together although each has other gradients (pipeline stages, hand-made
            shards); None: the ranks of DTensor and FSDP1 gradients. DDP needs no group.
        allow_fp16: also unscale float16 gradients, for optimizers that keep float32 master weights.
        on_stuck: the reaction to gradients that overflow at `DynamicLossScale.stuck_scale` or below, or with another
            strategy in 20 steps in a row: "warn" once, "raise" `LossScaleStuckError`, or a function that is called with
            `ScalerStats`.
        skip_above: skip steps whose gradient norm, over all parameters of the optimizer and before clipping, is above
            a number or a multiple of the running median (`TimesMedian`); the scale does not change. The norm has the
            order of `clip_grad_norm_` if that is 0, 1, 2 or inf, otherwise order 2, and is taken over the
            `process_group`. Without clipping, `unscale_` and `step` read the gradients once more for it. None: no
            limit.

    Raises:
        AssertionError: growth_factor <= 1 or backoff_factor >= 1, as in torch.
        TypeError: `skip_above` is neither a number nor `TimesMedian`, or `loss_scale` is not a strategy.
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
        renew_owner_ids(self._by_owner_id)
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
        record = self._record_of(optimizer)
        state = record.state
        if state["stage"] is OptState.STEPPED:
            raise _too_late("unscale_")
        if state["stage"] is OptState.UNSCALED:
            if allow_repeat:
                return
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(). Dividing gradients "
                "twice gives wrong values: call update() at the end of each iteration, unscale_ once per update (not "
                "once per micro-batch), or pass allow_repeat=True."
            )
        if self._skip_above is not None:
            self._clip(record, math.inf, 2.0, self.process_group)
            return
        inv_scale, flag = self._inverse_scale()
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, inv_scale, flag, self.allow_fp16)
        state["stage"] = OptState.UNSCALED

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[Any, Tensor]:
        """Multiply the optimizer's gradients by `inv_scale`, in place, and return a flag for each of their devices."""
        record = self._records.get(optimizer) or self._lasting_record_of(optimizer)
        gradients = self._gradients(record, optimizer, allow_fp16)
        inv_scale, found_inf = inv_scale.reshape(()), found_inf.reshape(())
        flags: Flags = {}
        for device in gradients.by_device:
            flags[device] = found_inf if found_inf.device == device else moved(found_inf, device)
        with torch.set_grad_enabled(False):  # at half the cost of torch.no_grad()
            if self._rule.scales_losses:
                gradients.unscale_(inv_scale, flags)
            else:
                gradients.check(torch.ones_like(found_inf), flags)
        self._reduce_flags(record, gradients.meshes, flags)
        return flags

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        """Check gradients for inf and NaN and leave them scaled; set the flags that `unscale_` would set."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        record = self._record_of(optimizer)
        inv_scale, flag = self._inverse_scale()
        gradients = self._gradients(record, optimizer)
        record.state["found_inf_per_device"] = flags = {device: moved(flag, device) for device in gradients.by_device}
        with torch.set_grad_enabled(False):
            gradients.check(inv_scale, flags)
        self._reduce_flags(record, gradients.meshes, flags)
        return flags

    def _inverse_scale(self) -> tuple[Tensor, Tensor]:
        """Return 1 / scale (1 if losses are not scaled) and a clear flag, both 0-d float32 on the scale's device."""
        scale = self._scale
        if not self._rule.scales_losses:
            return torch.ones_like(scale), torch.zeros_like(scale)
        inv_scale, flag, self._used_scale = ampkit_kernels.inverse_scale(scale)
        return inv_scale, flag

    def _gradients(
        self, record: OptimizerRecord, optimizer: Any, allow_fp16: bool = True, **options: bool
    ) -> Gradients:
        """Collect the optimizer's gradients, and set the optimizer as their owner in this iteration."""
        take_master_gradients(optimizer)
        gradients = collect(parameters(optimizer), None if allow_fp16 else optimizer, **options)
        if record.optimizer is not None:
            set_owner(gradients.originals, record, self._by_owner_id)
        return gradients

    def _skip_groups_of(self, record: OptimizerRecord, meshes: Collection[tuple[Any, ...]]) -> ranks.SkipGroups:
        """Return the ranks that must skip together: of the meshes of gradients, and of `process_group`."""
        own_group = self.process_group
        if own_group is None and record.holds_shards and ranks.several():
            own_group = torch.distributed.group.WORLD  # shards of FSDP1 do not name the ranks with the other parts
        record.skip_groups = ranks.SkipGroups(meshes, own_group) if meshes or own_group is not None else ranks.NO_GROUPS
        return record.skip_groups

    def _reduce_flags(self, record: OptimizerRecord, meshes: Collection[tuple[Any, ...]], flags: Flags) -> None:
        """Make flags the same on all ranks that must skip together."""
        skip_groups = self._skip_groups_of(record, meshes)
        if skip_groups.groups:
            device = self._where() if self._scale is not None or not flags else next(iter(flags))
            skip_groups.reduce_flags(flags, device)

    def _record_of(self, optimizer: Any) -> OptimizerRecord:
        """Return an optimizer's record in this iteration, which it joins.

        Other code may have put another dict in the place of torch's record: the optimizer joins again.
        """
        record = self._lasting_record_of(optimizer)
        state = self._states[id(optimizer)]
        if record.state is not state:
            self._by_owner_id.pop(record.owner_id, None)
            record.begin_iteration(optimizer, state)
            self._by_owner_id[record.owner_id] = record
        return record

    def _lasting_record_of(self, optimizer: Any) -> OptimizerRecord:
        """Return an optimizer's record, which may be outside of an iteration; it is made if there is none."""
        if not hasattr(optimizer, "param_groups"):
            parameters(optimizer)  # raises
        record = self._records.get(optimizer)
        if record is None:
            holds_shards = any(map(is_flat, parameters(optimizer)))
            record = self._records[optimizer] = OptimizerRecord(holds_shards, norms=self._first_norms(optimizer))
        return record

    # 3. The norm: clip_grad_norm_, and the limit `skip_above`

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
        `ampkit.optim.AdamW` and `SGD` clip in their step, by `max_grad_norm`, and write no gradient.

        Args:
            optimizer: the optimizer whose gradients to clip.
            max_norm: the largest norm after clipping, a number or a 0-d tensor.
            norm_type: the order of the norm; inf: the largest magnitude.
            process_group: ranks that hold other gradients of the same model (pipeline stages, hand-made shards), over
                which the norm is taken; None: this rank, and the other shards of DTensors.

        Returns:
            The norm of all unscaled gradients before clipping, 0-d on the scale's device; float64 if one is, otherwise
            float32.

        Raises:
            AssertionError, ValueError, RuntimeError: as `unscale_`, and RuntimeError for FSDP1 without a group.
            TypeError: `max_norm` is not a number.
            AttributeError: `optimizer` is not an optimizer.
        """
        norm_type = float(norm_type)
        if not isinstance(max_norm, float | int | Tensor):
            max_norm = scales.number(max_norm, "max_norm")
        if not self._enabled:
            take_master_gradients(optimizer)
            return clipping.clip_unscaled(parameters(optimizer), max_norm, norm_type, process_group)
        if self._scale is None or self._history is None:
            self._check_scale_growth_tracker("clip_grad_norm_")
        record = self._record_of(optimizer)
        if record.state["stage"] is OptState.STEPPED:
            raise _too_late("clip_grad_norm_")
        if record.state["stage"] is OptState.READY and norm_type not in clipping.HOMOGENEOUS_ORDERS:
            self.unscale_(optimizer)
        norm = self._clip(record, max_norm, norm_type, process_group)
        record.note_clipping(norm)
        return norm

    def _clip(self, record: OptimizerRecord, max_norm: float | Tensor, norm_type: float, process_group: Any) -> Tensor:
        """Unscale unless that is done, check and clip. Return the unscaled norm."""
        with torch.set_grad_enabled(False):
            gradients, norm, factor = self._norm(record, max_norm, norm_type, process_group, self.allow_fp16)
            gradients.multiply_(factor, record.state["found_inf_per_device"])
        record.state["stage"] = OptState.UNSCALED
        return norm

    def _norm(
        self,
        record: OptimizerRecord,
        max_norm: float | Tensor,
        norm_type: float,
        process_group: Any,
        allow_fp16: bool = True,
    ) -> tuple[Gradients, Tensor, Tensor]:
        """Read the gradients, set their flags, and compare their norm with `skip_above` once in an iteration.

        Call it without autograd.

        Returns:
            The gradients, their norm without the scale, and the factor that unscales (unless that is done) and clips.
        """
        if process_group is None and record.holds_shards and ranks.several():
            raise clipping.refusal_of_flat_shards()
        flags: Flags = {}
        if record.state["stage"] is OptState.READY:
            inv_scale, flag = self._inverse_scale()
            record.outlier = None  # other code may have made the optimizer READY again
        else:
            flags = record.state["found_inf_per_device"]
            inv_scale = torch.ones_like(self._scale)
            flag = torch.zeros_like(inv_scale)
        gradients = self._gradients(record, record.optimizer, allow_fp16, coalesce=True)
        for device in gradients.by_device:
            if device not in flags:
                flags[device] = flag if device == flag.device else moved(flag, device)
        skip_groups = self._skip_groups_of(record, gradients.meshes)
        norm, factor = clipping.norm_and_factor(
            gradients, inv_scale, flags, norm_type, max_norm, skip_groups, process_group
        )
        record.state["found_inf_per_device"] = flags
        if self._skip_above is not None and record.outlier is None and flags:
            self._compare(record, norm)
        return gradients, norm, factor

    def _compare(self, record: OptimizerRecord, norm: Tensor) -> None:
        """Note whether the norm is above `skip_above` on any of the ranks that skip together."""
        limit: Any = self._skip_above
        if isinstance(limit, TimesMedian):
            norms: Any = record.norms
            if norms.device != norm.device:
                record.norms = norms = norms.to(norm.device)
            outlier = norm_limit.compare_(limit, norms, norm)
        else:
            outlier = norm_limit.is_outlier(norm, limit)
        if record.skip_groups is not None:
            record.skip_groups.reduce_flags({outlier.device: outlier}, outlier.device)
        record.note_comparison(norm, outlier)

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
        gradients_of(optimizer).clamp_(float(clip_value))

    # 4. The optimizer: step, or a skipped step

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale unless that is done, then call `optimizer.step` if all gradients are finite.

        An optimizer without gradients is not called, and warned about if its first steps find none. Amp-aware
        optimizers (`fused=True`, `ampkit.optim`) skip on the device and never synchronize; others cost one read from
        the device, two if the step is skipped or has a `skip_above`.

        Args:
            optimizer: the optimizer to step.
            args, kwargs: passed to `optimizer.step`, without a closure.

        Returns:
            The result of `optimizer.step`; None if the host skipped the step.

        Raises:
            AssertionError: nothing has been scaled yet.
            RuntimeError: the optimizer has been stepped in this iteration, or `step` got a closure.
            ValueError: `skip_above` with an optimizer whose `step` takes the scaler.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(map(callable, args[:1])):
            raise RuntimeError(
                f"GradScaler.step got a closure for {type(optimizer).__name__}, whose gradients would not be unscaled; "
                "expected gradients of a backward before it: call step(optimizer) without a closure, or use an "
                "optimizer that needs closures (LBFGS, SAM) without a GradScaler"
            )
        if self._scale is None or self._history is None:
            self._check_scale_growth_tracker("step")
        record = self._record_of(optimizer)
        state = record.state
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Call update() once per iteration, after all "
                "optimizers have stepped."
            )
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return self._step_on_device(record, args, kwargs)
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            return self._note_no_gradients(record)
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        """Step an ordinary optimizer unless a flag in torch's record is set. Reads the device once, again if the step
        is skipped, and once more under `skip_above`."""
        flags = list(optimizer_state["found_inf_per_device"].values())
        if not flags:  # `step` does not get here; as in torch, no flags mean no inf
            return optimizer.step(*args, **kwargs)
        record = self._records.get(optimizer) or self._lasting_record_of(optimizer)
        outlier = record.outlier if record.state is optimizer_state else None
        found_inf = combined(flags, flags[0].device if self._scale is None else self._scale.device)
        skip = found_inf.item() != 0
        if skip:
            self._count(record, optimizer, found_inf, skipped=True)
        is_outlier = outlier is not None and outlier.item() != 0
        result = None if skip or is_outlier else optimizer.step(*args, **kwargs)
        self._note_step(record, optimizer, found_inf, outlier, skipped=skip)
        return result

    def _step_on_device(self, record: OptimizerRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step an optimizer that itself skips on the device. Never synchronizes."""
        optimizer, state = record.optimizer, record.state
        if record.takes_scaler is None:  # Apex's FusedLAMB and Transformer Engine's FusedAdam do
            record.takes_scaler = "grad_scaler" in inspect.signature(optimizer.step).parameters
        if record.takes_scaler:
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
        is_scaled = state["stage"] is OptState.READY
        grad_scale = getattr(optimizer, "grad_scale", None)
        max_norm = step_contract.max_grad_norm(optimizer) if grad_scale is None else None
        clipped = {}
        if max_norm is not None or (is_scaled and self._skip_above is not None):
            with torch.set_grad_enabled(False):
                _, norm, factor = self._norm(record, max_norm or math.inf, 2.0, self.process_group)
            if max_norm is not None:
                clipped = {"grad_norm": norm, "grad_multiplier": factor.float()}
                record.note_clipping(norm)
        elif is_scaled:
            self._check_inf_per_device(optimizer)
        if not state["found_inf_per_device"]:
            return self._note_no_gradients(record)
        found_inf = combined([*state["found_inf_per_device"].values()], self._scale.device)
        if is_scaled and self._rule.scales_losses and not clipped:
            grad_scale = self._scale if grad_scale is None else self._scale * grad_scale
        skipped = self._count(record, optimizer, found_inf, skipped=None)
        run = step_contract.run_uncompiled if is_compiling() else step_contract.run
        flag = found_inf if record.outlier is None else torch.maximum(found_inf, record.outlier)
        result = run(optimizer, args, kwargs, found_inf=flag, grad_scale=grad_scale, **clipped)
        state["stage"] = OptState.STEPPED
        self._note_step(record, optimizer, found_inf, record.outlier, skipped=skipped)
        return result

    def _note_step(
        self,
        record: OptimizerRecord,
        optimizer: Any,
        found_inf: Tensor,
        outlier: Tensor | None,
        *,
        skipped: bool | None,
    ) -> None:
        """Note how a step ended, `skipped` None if only the device has the flag, and call `on_stuck` if that is due."""
        if outlier is not None:
            only_outlier = (outlier != 0) & (found_inf == 0)
            self._outlier = only_outlier if self._outlier is None else self._outlier | only_outlier
        else:
            only_outlier = None
        if self._history is not None:  # None: another scaler scales these gradients, and counts their steps
            self._history.note_step(found_inf, only_outlier)
        record.found_inf, record.skipped, record.was_outlier, record.empty_steps = found_inf, skipped, outlier, -1
        self._stuck_check_due = skipped is None
        record.skips_in_a_row = record.skips_in_a_row + 1 if skipped else 0
        if skipped or outlier is not None:
            step_contract.mark_step_called(optimizer)
        if skipped:
            self._check_stuck(float(self._scale_on(found_inf.device)), record.skips_in_a_row)

    def _note_no_gradients(self, record: OptimizerRecord) -> None:
        """Note the step of an optimizer without gradients; warn if its first steps have found none."""
        optimizer = record.optimizer
        record.state["stage"] = OptState.STEPPED
        if self._history is not None:
            self._history.no_gradients += 1
        record.found_inf = torch.zeros_like(self._scale_on(torch.device("cpu")))
        record.skipped, record.counts = True, None
        step_contract.mark_step_called(optimizer)
        if record.empty_steps >= 0:
            record.empty_steps += 1
        if record.empty_steps == _EMPTY_STEPS:
            self._warn_once(
                "idle",
                f"{type(optimizer).__name__} has found no gradients in its first {_EMPTY_STEPS} steps; its parameters "
                "did not change. Expected gradients from backward() of a scaled loss. Possible "
                "causes: the optimizer holds parameters of another model, or parameters that are frozen or were "
                "replaced, the loss is detached from them, or zero_grad() is called between backward() and step().",
            )

    def _count(
        self, record: OptimizerRecord, optimizer: Any, found_inf: Tensor, *, skipped: bool | None
    ) -> bool | None:
        """Count inf and NaN for the report if the host can see that a step is skipped.

        This comes before the step, which drops the gradients of master weights. Returns `skipped`, or for None the
        flag if the host has it.
        """
        if skipped is None:
            flag = host_value_or_none(found_inf)
            skipped = None if flag is None else flag != 0
        if skipped is not False:
            record.counts = count_nonfinite(optimizer) if skipped else None
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
            ValueError: `new_scale` is a number that cannot be a scale.
        """
        if not self._enabled:
            return
        if self._scale is None or self._history is None:
            self._check_scale_growth_tracker("update")
        norm = None  # the largest of the iteration
        for record in self._by_owner_id.values():
            if record.norm is not None:
                norm = record.norm if norm is None else torch.maximum(norm, record.norm)
        if new_scale is not None:
            self._set_scale(new_scale, norm)
            self._begin_iteration()
            return
        flags: list[Tensor] = []
        idle = True
        for state in self._states.values():
            flags += state["found_inf_per_device"].values()
            idle = idle and state.get("stage", OptState.READY) is OptState.READY
        if flags:
            scale: Any = self._scale
            self._advance(combined(flags, scale.device), norm)
        elif idle:
            raise AssertionError(
                "No inf checks were recorded prior to update. Call scaler.step(optimizer), or scaler.unscale_, in "
                "every iteration before update()."
            )
        self._begin_iteration()

    def _advance(self, found_inf: Tensor, norm: Tensor | None) -> None:
        """Apply the strategy's rule in place, and note the update in the history. Never synchronizes."""
        rule, scale, history = self._rule, self._scale, self._history
        used = scale.clone() if self._used_scale is None else self._used_scale
        is_due = history.note_update(used, found_inf, norm, self._outlier)
        if rule.hysteresis == 1:
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

    def _set_scale(self, new_scale: Any, norm: Tensor | None) -> None:
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
            value = saved_state.usable_scale(new_scale, "new_scale")
            wanted = torch.full_like(scale, min(max(value, rule.min_scale), rule.max_scale))
        else:
            described = type(new_scale).__name__ if hasattr(new_scale, "param_groups") else repr(new_scale)
            raise AssertionError(
                "new_scale should be a number or a 1-element tensor on the scaler's device with requires_grad=False; "
                f"got {described}"
            )
        # Folding first: the history must not count this change as growth or backoff.
        history.note_update(scale.clone(), torch.zeros_like(scale), norm, self._outlier)
        history.fold(scale)
        scale.copy_(wanted)

    # 6. All in one call

    def backward_and_step(
        self,
        loss: Tensor,
        optimizer: torch.optim.Optimizer,
        max_norm: float | Tensor | None = None,
        *,
        accumulate: bool = False,
    ) -> Tensor | None:
        """Call `scale`, `backward`, `clip_grad_norm_`, `step` and `update` in their order. Synchronizes as `step` does.

        It does not clear gradients: call `optimizer.zero_grad()`. With several losses or optimizers in an iteration,
        call those methods yourself.

        Args:
            loss: the loss of the batch, a 0-d tensor; of a micro-batch, divided by their number.
            optimizer: the optimizer to step.
            max_norm: the largest 2-norm of the gradients after clipping; None: no clipping.
            accumulate: call only `scale` and `backward`, for each micro-batch but the last.

        Returns:
            The norm that `clip_grad_norm_` returns; None without clipping.

        Raises:
            TypeError: `loss` is not a tensor.
            RuntimeError, ValueError: as the methods that it calls.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"loss is {type(loss).__name__}; expected one tensor: with several losses, call scale() and backward() "
                "for each, then step() and update()"
            )
        self.scale(loss).backward()
        if accumulate:
            return None
        norm = None if max_norm is None else self.clip_grad_norm_(optimizer, max_norm)
        self.step(optimizer)
        self.update()
        return norm


def _too_late(name: str) -> RuntimeError:
    """Return the error for a method that was called after `step`."""
    return RuntimeError(
        f"{name}() is being called after step(). Call it between backward() and step(), and update() once all "
        "optimizers have stepped."
    )
