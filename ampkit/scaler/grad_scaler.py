"""GradScaler: the order of events in an iteration.

An optimizer is READY after `update()`, UNSCALED after `unscale_` or clipping, STEPPED after `step`. The work is done by
parts: a `LiveScale` that lasts, an `Iteration` that each `update` begins anew, `Scaling`, `Unscaling` and `Stepping`
over these two, and a `StepLog` of how steps ended.

Lightning, Accelerate, FSDP and others ask for `isinstance(scaler, torch.amp.GradScaler)`, reach for its private
attributes and override its private methods: those keep torch's names, shapes and callers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients import amp_optimizers, clipping, closures
from ampkit.gradients.collect import collect, parameters
from ampkit.gradients.masters import take_master_gradients
from ampkit.scaler import pickling
from ampkit.scaler.device import can_scale_on, device_type_of
from ampkit.scaler.history import ScalerStats
from ampkit.scaler.iteration import Iteration
from ampkit.scaler.live_scale import LiveScale, strategy_of
from ampkit.scaler.loss_scale import LossScale
from ampkit.scaler.optimizer_record import OptimizerRecord
from ampkit.scaler.overflow_report import OverflowReport
from ampkit.scaler.parts import attribute_of
from ampkit.scaler.scaling import Scaling
from ampkit.scaler.step_log import OnStuck, StepLog
from ampkit.scaler.stepping import Stepping
from ampkit.scaler.unscaling import Unscaling

Outputs = TypeVar("Outputs", bound=Iterable[Any])
_PARTS = ("_live", "_iteration", "_unscaling", "_log", "_scaling", "_stepping")


class GradScaler(torch.amp.GradScaler):
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
        count_every_step: count inf and NaN for `overflow_report` in every step of optimizers that skip on an
            accelerator, at the price of reading their gradients once more; others are counted when skipped.
        history_size: updates kept for `history`.

    Raises:
        AssertionError: growth_factor <= 1 or backoff_factor >= 1, as torch.
        ValueError: another number out of range, or both a strategy and its numbers.

    Host synchronisation: `step` of an ordinary optimizer reads one number; amp-aware ones (`fused=True`,
    `ampkit.optim`) and all other methods read none, apart from those whose answer is a Python value.

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

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        loss_scale: LossScale | None = None,
        process_group: Any = None,
        allow_fp16: bool = False,
        on_stuck: OnStuck = "warn",
        count_every_step: bool = False,
        history_size: int = 1000,
    ) -> None:
        self._device = device_type_of(device)
        self._enabled = enabled and can_scale_on(self._device)
        numbers = (init_scale, growth_factor, backoff_factor, growth_interval)
        live = LiveScale(strategy_of(loss_scale, numbers, validate=self._enabled), history_size)
        self._compose(live, process_group, allow_fp16, on_stuck, count_every_step)

    def _compose(self, live: LiveScale, group: Any, fp16: bool, on_stuck: OnStuck, count_every_step: bool) -> None:
        self._live = live
        self._iteration = iteration = Iteration()
        self._unscaling = Unscaling(live, iteration, process_group=group, allow_fp16=fp16)
        self._log = StepLog(live, on_stuck=on_stuck, count_every_step=count_every_step)
        self._scaling = Scaling(live, iteration, self._log)
        self._stepping = Stepping(live, iteration, self._unscaling, self._log)

    # torch's private attributes, and settings that may be changed
    _scale = attribute_of("_live", "scale")
    _growth_tracker = attribute_of("_live", "growth_tracker")
    _growth_factor = attribute_of("_live", "growth_factor")
    _backoff_factor = attribute_of("_live", "backoff_factor")
    _growth_interval = attribute_of("_live", "growth_interval")
    _init_scale = attribute_of("_live", "init_scale")
    _init_growth_tracker = attribute_of("_live", "init_growth_tracker")
    _per_optimizer_states = attribute_of("_iteration", "states")
    process_group = attribute_of("_unscaling", "process_group")
    allow_fp16 = attribute_of("_unscaling", "allow_fp16")
    on_stuck = attribute_of("_log", "on_stuck")
    count_every_step = attribute_of("_log", "count_every_step")

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...
    @overload
    def scale(self, outputs: Outputs) -> Outputs: ...
    def scale(self, outputs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  torch's are cases of it
        """Multiply a loss, or every tensor in a nested list, tuple, mapping or iterator, by the scale.

        A 0-d float16 or bfloat16 loss comes back as float32. Never syncs. Warns once when what it gets is detached from
        autograd, because `backward` could not reach any parameter. Raises ValueError for what holds no tensors.
        """
        return self._scaling.scale(outputs, self._lazy_init_scale_growth_tracker) if self._enabled else outputs

    def unscale_(self, optimizer: torch.optim.Optimizer, *, allow_repeat: bool = False) -> None:
        """Multiply the optimizer's gradients by 1 / scale, in place, and check them for inf and NaN. Never syncs.

        Optional before `step`, for code that reads or changes gradients in between. Call it once per iteration, after
        the last backward; with `allow_repeat` a second call does nothing instead of raising. Gradients may be sparse,
        complex, expanded, non-contiguous or DTensors; one shared with an optimizer that was unscaled in this iteration
        is not unscaled again.

        Raises:
            AssertionError: nothing has been scaled yet.
            RuntimeError: called before in this iteration, or after `step`.
            ValueError: float16 gradients, unless the scaler was made with `allow_fp16`. Nothing has changed then.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        record = self._iteration.record_of(optimizer)
        if allow_repeat and record.stage is OptState.UNSCALED:
            self._unscaling.apply_pending_clip_factor_(record)
            return
        if record.stage in (OptState.UNSCALED, OptState.STEPPED):   # other code sets stages of its own: torch goes on
            raise record.refusal_to_unscale()
        record.pending_clip_factor = record.residual_inv_scale = None   # of before other code made it READY again
        inv_scale, found_inf = self._unscaling.inverse_and_flag()
        record.found_inf_per_device = self._unscale_grads_(optimizer, inv_scale, found_inf, self._unscaling.allow_fp16)
        record.stage = OptState.UNSCALED

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        return self._unscaling.unscale_(optimizer, inv_scale, found_inf, allow_fp16=allow_fp16)

    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float | Tensor,
        norm_type: float = 2.0,
        *,
        groups: Sequence[int] | Literal["each"] | None = None,
        process_group: Any = None,
    ) -> Tensor:
        """Unscale, check and clip the optimizer's gradients together; returns their unscaled norm. Never syncs.

        Replaces `unscale_` and `torch.nn.utils.clip_grad_norm_`, with two reads and one write of the gradients instead
        of three and two. After `unscale_` it only clips. If a gradient is not finite nothing is multiplied: the step
        will be skipped. Gradients of optimizers that take a multiplier (`ampkit.optim`) stay scaled until the step.

        Args:
            max_norm: the largest norm to let pass.
            norm_type: the order of the norm; `inf` for the largest magnitude.
            groups: None: one norm over all parameter groups. "each": every group is clipped by its own norm.
                Numbers: those groups together; the others are unscaled only.
            process_group: ranks that each hold other gradients of the same model (pipeline stages, hand-made
                shards): the norm is taken over all of them. DTensor shards are added up without it.

        Returns:
            The norm, 0-d on the scale's device; with `groups="each"` one per group. float64 for float64 gradients, else
            float32.

        Raises as `unscale_`, but may be called after it; RuntimeError for FSDP1 without a `process_group`.
        """
        norm_type = float(norm_type)
        take_master_gradients(optimizer)
        parts = clipping.parts(optimizer, groups)
        if not self._enabled:
            return clipping.clip_plain(parts, max_norm, norm_type, process_group, each=groups == "each")
        self._check_scale_growth_tracker("clip_grad_norm_")
        record = self._iteration.record_of(optimizer)
        record.require_not_stepped("clip_grad_norm_")
        if record.stage is OptState.READY and (
            norm_type not in clipping.HOMOGENEOUS_ORDERS or self._unscaling.has_shared(optimizer)
        ):
            self.unscale_(optimizer)
        norms = self._unscaling.clip_norm_(optimizer, record, parts, max_norm, norm_type, process_group)
        self._iteration.note_norm(torch.stack(norms).max() if len(norms) > 1 else norms[0])
        return torch.stack(norms) if groups == "each" else norms[0]

    def clip_grad_value_(self, optimizer: torch.optim.Optimizer, clip_value: float) -> None:
        """Unscale and check the optimizer's gradients, and limit every element to `[-clip_value, clip_value]`.

        After `unscale_` or `clip_grad_norm_` it only limits. Complex gradients are limited by part. Never syncs.
        """
        if self._enabled:
            self._check_scale_growth_tracker("clip_grad_value_")
            record = self._iteration.record_of(optimizer)
            record.require_not_stepped("clip_grad_value_")
            if record.stage is OptState.READY:
                self.unscale_(optimizer)
            self._unscaling.apply_pending_clip_factor_(record)
        take_master_gradients(optimizer)
        clipping.clamp_(collect(parameters(optimizer)), float(clip_value))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale unless that is done, then call `optimizer.step(*args, **kwargs)` if all gradients are finite.

        An optimizer without gradients is left alone, and `stats().no_gradients` counts it. Amp-aware optimizers
        (`fused=True`, `ampkit.optim`) are always called and skip on the device, without a host sync; any other costs
        one host read.

        With a closure (keyword or first positional argument), as LBFGS and SAM take it, every evaluation is unscaled
        and checked; the closure calls `scaler.scale(loss).backward()` and returns the unscaled loss. A non-finite
        evaluation ends the step and restores parameters and optimizer state. One host read per evaluation.
        Returns what `optimizer.step` returned; None when the step was skipped by the host.

        Raises AssertionError before anything has been scaled, RuntimeError when called before in this iteration.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        closure = closures.take(args, kwargs)
        if closure is None:
            self._check_scale_growth_tracker("step")
        record = self._iteration.record_of(optimizer)
        record.require_not_stepped("step")
        if closure is not None:
            return self._stepping.with_closure(optimizer, record, closure, self.unscale_, args, kwargs)
        on_device = amp_optimizers.is_amp_aware(optimizer)
        if on_device and amp_optimizers.takes_grad_scaler_argument(optimizer):
            return self._stepping.by_itself(optimizer, record, self, args, kwargs)
        if record.stage is OptState.READY:
            if on_device and not self._unscaling.has_shared(optimizer):
                self._check_inf_per_device(optimizer)
            else:
                self.unscale_(optimizer)
        if not record.found_inf_per_device:
            return self._stepping.nothing_to_do(optimizer, record)
        if on_device:
            return self._stepping.on_device(optimizer, record, args, kwargs)
        result = self._maybe_opt_step(optimizer, record.state, *args, **kwargs)
        record.stage = OptState.STEPPED
        return result

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        """Check gradients that stay scaled for inf and NaN; the flags are those that `unscale_` would set."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        record = self._iteration.record_of(optimizer)
        record.found_inf_per_device = self._unscaling.look(optimizer, *self._unscaling.inverse_and_flag())
        return record.found_inf_per_device

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        if not optimizer_state["found_inf_per_device"]:  # not reached from `step`; as in torch, no flags mean no inf
            return optimizer.step(*args, **kwargs)
        known = self._iteration.records.get(id(optimizer))
        record = known if known is not None and known.state is optimizer_state else OptimizerRecord(optimizer_state)
        return self._stepping.on_host(optimizer, record, args, kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale to the found_inf flags of the iteration, and make every optimizer READY. Never syncs.

        Args:
            new_scale: a scale to use from now on, kept within the strategy's bounds: a positive number, or a 1-element
                tensor, which is copied; if it holds 0, inf, NaN or a negative number, the scale stays.

        Raises AssertionError when nothing was scaled or checked in this iteration, or for a `new_scale` of a wrong
        kind, and ValueError for a number that is no scale.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("update")
        if new_scale is not None:
            self._live.set(new_scale, self._device)
        else:
            self._iteration.advance(self._live)
        self._iteration.begin()
        self._log.order.begin()

    def skipped(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Whether the last `step(optimizer)` left the parameters alone, as a 0-d bool tensor on the device.

        True after inf or NaN, and after a step that found no gradients; valid for every optimizer, fused ones included.
        Never syncs, unlike `if scaler.skipped(optimizer):`. False when the scaler is disabled. Raises RuntimeError if
        `step` has not been called with this optimizer.
        """
        if not self._enabled:
            return torch.zeros((), dtype=torch.bool, device="cpu")
        return self._log.outcome_of(optimizer).found_inf != 0

    def stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last `step(optimizer)` was taken, as a Python value: the opposite of `skipped`.

        Waits for the device only when the optimizer skips there by itself. True when the scaler is disabled. Raises as
        `skipped`.
        """
        return not self._enabled or self._log.stepped(optimizer)

    def stats(self) -> ScalerStats:
        """Counts of steps, skips, growths and more, with the scale; calls `on_stuck` if that is due. One host read."""
        return self._log.stats() if self._enabled else ScalerStats(scale=1.0)

    @property
    def history(self) -> list[dict[str, Any]]:
        """The last updates as plain dicts, oldest first: `update`, `scale`, `overflow`, `grad_norm`. One host read."""
        return self._log.history() if self._enabled else []

    def overflow_report(
        self, model: torch.nn.Module | None = None, *, optimizer: torch.optim.Optimizer | None = None
    ) -> OverflowReport:
        """Which parameters held inf or NaN in the last skipped step, in backward's order. Reads the device.

        Optimizers that skip on an accelerator are examined when this is called, so call it before their gradients are
        cleared, or make the scaler with `count_every_step=True`.

        `model` names parameters; without it the optimizer's own names are used, where it was made with
        `named_parameters()`, else group and position. `optimizer` says whose step; by default of every optimizer.
        """
        return self._log.report(model, optimizer)

    @property
    def loss_scale(self) -> LossScale:
        """The strategy in force."""
        return self._live.strategy

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, which torch.amp.GradScaler loads, and "ampkit" with the whole strategy and the counts.

        Plain Python values; `{}` when disabled. Reads the device: call it after `update()`.
        """
        return self._live.state_dict() if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch.amp.GradScaler returned; nothing happens when disabled.

        The saved factors override the constructor's, as in torch. Entries of another kind of strategy than this
        scaler's, and unknown entries, are ignored with a warning.

        Raises (nothing has been loaded then):
            RuntimeError: an empty dict, as a disabled scaler saves it.
            KeyError: missing entries, all of them named.
            TypeError: an entry of another type.
            ValueError: a scale, a strategy or a count that cannot be used.
        """
        if self._enabled:
            self._live.take_over(self._live.loadable(state_dict))

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        live = self._live
        if live.scale is not None and live.growth_tracker is not None:
            return live.scale, live.growth_tracker
        return super()._check_scale_growth_tracker(funcname)  # which raises

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._live.place(dev)

    def __getstate__(self) -> dict[str, Any]:
        if self._enabled:
            pickling.require_picklable(self._iteration, self._unscaling)
        state = {name: value for name, value in self.__dict__.items() if name not in _PARTS}
        return {**state, **pickling.flatten(self._live, self._unscaling, self._log)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        live, settings, rest = pickling.split(state)
        self._compose(live, *settings)
        self._log.warned, self._log.alarm_due = rest.pop("_warned"), rest.pop("_alarm_due")
        self.__dict__.update(rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradScaler:  # process groups cannot be copied
        group, self.process_group = self.process_group, None
        try:
            state = copy.deepcopy(self.__getstate__(), memo)
        finally:
            self.process_group = group
        twin = self.__class__.__new__(self.__class__)
        twin.__setstate__({**state, "process_group": group})
        return twin
