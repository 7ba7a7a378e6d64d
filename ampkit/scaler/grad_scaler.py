"""GradScaler: the order of events in an iteration, and the state that survives it.

An optimizer is READY after `update()`, UNSCALED after `unscale_` or clipping, STEPPED after `step`. How the scale
answers an overflow is decided in `loss_scale`, what a gradient consists of in `gradients`, the arithmetic in the
kernels; this class calls them in the right order.

The class derives from `torch.amp.GradScaler`, because Lightning, Accelerate, FSDP and others ask `isinstance(scaler,
torch.amp.GradScaler)` and reach for its private attributes. Those keep torch's names and shapes: `_scale`,
`_growth_tracker`, `_per_optimizer_states`, `_unscale_grads_`, `_check_inf_per_device`, `_found_inf_per_device`,
`_get_scale_async`, `_maybe_opt_step`, `_lazy_init_scale_growth_tracker`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients import amp_optimizers, clipping, closures, ranks
from ampkit.gradients.collect import collect, parameters
from ampkit.gradients.transfer import moved
from ampkit.scaler._outputs import map_tensors
from ampkit.scaler._scaler_checks import add_flags
from ampkit.scaler._scaler_steps import ScalerSteps
from ampkit.scaler.history import ScalerStats
from ampkit.scaler.loss_scale import LossScale


class GradScaler(ScalerSteps):
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
        process_group: ranks that must skip together although each sees other gradients (sharded by hand, pipelined).
            DDP and DTensor gradients (FSDP2, tensor parallel) need nothing.
        allow_fp16: unscale float16 gradients too, for optimizers that keep float32 master weights.
        on_stuck: what happens when gradients overflow at a scale that can hardly fall further
            (`DynamicLossScale.stuck_scale`): "warn" once, "raise" `LossScaleStuckError`, or call a function with
            `ScalerStats`.
        count_every_step: count inf and NaN for `overflow_report` in every step of optimizers that skip on an
            accelerator; others are counted only when skipped. Reads those gradients once more.
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
        on_stuck: Literal["warn", "raise"] | Callable[[ScalerStats], None] = "warn",
        count_every_step: bool = False,
        history_size: int = 1000,
    ) -> None:
        self._device = _device_type(device)
        self._enabled = enabled
        if enabled and self._device == "cuda" and not (torch.cuda.is_available() or find_spec("torch_xla")):
            warnings.warn("GradScaler is enabled for 'cuda', but CUDA is not available.  Disabling.", stacklevel=2)
            self._enabled = False
        if on_stuck not in ("warn", "raise") and not callable(on_stuck):
            raise ValueError(f"on_stuck is {on_stuck!r}; expected 'warn', 'raise' or a function of ScalerStats")
        self.process_group = process_group
        self.allow_fp16 = allow_fp16
        self.on_stuck = on_stuck
        self.count_every_step = count_every_step
        self._start_watching()
        plain = (init_scale, growth_factor, backoff_factor, growth_interval)
        self._remember(loss_scale, plain, history_size, validate=self._enabled)
        self._begin_iteration()

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or every tensor in a nested list, tuple, mapping or iterator, by the scale.

        A 0-d float16 or bfloat16 loss comes back as float32. Never syncs. Warns once when what it gets is detached from
        autograd, because `backward` could not reach any parameter.

        Raises:
            ValueError: something that holds no tensors.
        """
        if not self._enabled:
            return outputs
        self._scale_calls += 1
        if self._per_optimizer_states:
            self._keep_versions()
        if isinstance(outputs, Tensor):
            if not outputs.requires_grad:
                self._warn_detached()
            return self._scale_one(outputs, {})
        copies: dict[torch.device, Tensor] = {}
        seen: list[bool] = []

        def scale_one(output: Tensor) -> Tensor:
            seen.append(output.requires_grad)
            return self._scale_one(output, copies)

        scaled = map_tensors(outputs, scale_one)
        if seen and not any(seen):
            self._warn_detached()
        return scaled

    def _scale_one(self, output: Tensor, copies: dict[torch.device, Tensor]) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        if not self._loss_scale.scales_losses:
            return output
        scale: Any = self._scale
        if scale.device != output.device:
            if output.device not in copies:
                copies[output.device] = moved(scale, output.device)
            scale = copies[output.device]
        scaled = output * scale
        if scaled.requires_grad:
            self._losses.append(weakref.ref(scaled))
        return scaled

    def _warn_detached(self) -> None:
        if torch.is_grad_enabled():
            self._warn_once(
                "detached",
                "scale() got a loss that does not require grad: backward() cannot reach any parameter from it. It "
                "may have been rebuilt with torch.tensor(), detached, converted by .item(), or computed under "
                "torch.no_grad().",
                stacklevel=4,
            )

    def unscale_(self, optimizer: torch.optim.Optimizer, *, allow_repeat: bool = False) -> None:
        """Divide the optimizer's gradients by the scale, in place, and look for inf and NaN. Never syncs.

        Optional before `step`, for code that reads or changes gradients in between. Call it once per iteration, after
        the last backward. Sparse, complex, expanded, non-contiguous and DTensor gradients are served; a gradient shared
        with an optimizer that has been unscaled this iteration is not divided again.

        Args:
            optimizer: whose gradients.
            allow_repeat: a second call in the same iteration does nothing instead of raising.

        Raises:
            AssertionError: nothing has been scaled yet.
            RuntimeError: called before in this iteration, or after `step`.
            ValueError: float16 gradients, unless the scaler was made with `allow_fp16`. Nothing has changed then.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer)
        if allow_repeat and state["stage"] is OptState.UNSCALED:
            self._settle_multiplier(state)
            return
        self._require_ready(state)
        inv_scale = self._inverse_scale()
        state["found_inf_per_device"] = self._unscale_grads_(
            optimizer, inv_scale, torch.zeros_like(inv_scale), self.allow_fp16
        )
        state["stage"] = OptState.UNSCALED

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

        Stands for `unscale_` followed by `torch.nn.utils.clip_grad_norm_`, at two passes over the gradients instead of
        three reads and two writes. After `unscale_` it only clips. Where a gradient is not finite nothing is
        multiplied: the step will be skipped. Gradients of optimizers that take a multiplier (`ampkit.optim`) stay
        scaled until `step` reads them.

        Args:
            optimizer: whose gradients.
            max_norm: the largest norm to let pass.
            norm_type: the order of the norm; `inf` for the largest magnitude.
            groups: None: one norm over all parameter groups. "each": every group is clipped by its own norm.
                Numbers: those groups together; the others are unscaled only.
            process_group: ranks that each hold other gradients of the same model (pipeline stages, hand-made
                shards): the norm is taken over all of them. DTensor shards are added up without it.

        Returns:
            The norm, 0-d on the scale's device; with `groups="each"` one per group. float64 for float64 gradients, else
            float32.

        Raises:
            AssertionError: nothing has been scaled yet.
            RuntimeError: called after `step`.
            ValueError: float16 gradients, as `unscale_`.
        """
        norm_type = float(norm_type)
        parts = clipping.parts(optimizer, groups)
        if not self._enabled:
            return clipping.clip_plain(parts, max_norm, norm_type, each=groups == "each")
        self._check_scale_growth_tracker("clip_grad_norm_")
        state = self._state_of(optimizer)
        self._require_not_stepped(state, "clip_grad_norm_")
        if state["stage"] is OptState.READY and (
            norm_type not in clipping.HOMOGENEOUS_ORDERS or self._has_shared(optimizer)
        ):
            self.unscale_(optimizer)
        self._settle_multiplier(state)
        ready = state["stage"] is OptState.READY
        inv_scale = self._inverse_scale() if ready else torch.ones_like(self._live_scale())

        gradients = [self._collect(optimizer, params, coalesce=True) for params, _ in parts]
        found = {} if ready else state["found_inf_per_device"]
        for part in gradients:
            add_flags(found, part, torch.zeros_like(inv_scale))
        across = () if process_group is None else (process_group,)
        norms = [clipping.total_norm(part, inv_scale, found, norm_type, across) for part in gradients]
        self._agree(optimizer, found, [group for part in gradients for group in part.groups])
        state["found_inf_per_device"] = found
        state["stage"] = OptState.UNSCALED

        clipped = [norm for norm, (_, clips) in zip(norms, parts, strict=True) if clips]
        for part, norm, (_, clips) in zip(gradients, norms, parts, strict=True):
            factor = inv_scale * clipping.coefficient(norm, max_norm) if clips else inv_scale
            if len(parts) == 1 and amp_optimizers.takes_multiplier(optimizer):
                state["multiplier"] = factor.float()
            else:
                clipping.multiply_(part, factor, found)
        self._mark(optimizer, [grad for part in gradients for grad in part.originals])
        self._note_norm(torch.stack(clipped).max() if len(clipped) > 1 else clipped[0])
        return torch.stack(clipped) if groups == "each" else clipped[0]

    def clip_grad_value_(self, optimizer: torch.optim.Optimizer, clip_value: float) -> None:
        """Unscale and check the optimizer's gradients, and limit every element to `[-clip_value, clip_value]`.

        After `unscale_` or `clip_grad_norm_` it only limits. Complex gradients are limited by part. Never syncs.
        """
        if self._enabled:
            self._check_scale_growth_tracker("clip_grad_value_")
            state = self._state_of(optimizer)
            self._require_not_stepped(state, "clip_grad_value_")
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            self._settle_multiplier(state)
        clipping.clamp_(collect(parameters(optimizer)), float(clip_value))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale unless that is done, then call `optimizer.step(*args, **kwargs)` if all gradients are finite.

        An optimizer without gradients is left alone, and `stats().no_gradients` counts it. Amp-aware optimizers
        (`fused=True`, `ampkit.optim`) are always called and skip on the device, without a host sync; any other costs
        one host read.

        With a closure (keyword or first positional argument), as LBFGS and SAM take it, every evaluation is unscaled
        and checked; the closure calls `scaler.scale(loss).backward()` and returns the unscaled loss. A non-finite
        evaluation ends the step and restores parameters and optimizer state. One host read per evaluation.

        Returns:
            What `optimizer.step` returned; None when the step was skipped by the host.

        Raises:
            AssertionError: nothing has been scaled yet.
            RuntimeError: called before in this iteration.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        closure = closures.take(args, kwargs)
        if closure is None:
            self._check_scale_growth_tracker("step")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Call update() once per iteration, after all "
                "optimizers have stepped."
            )
        if closure is not None:
            return self._step_with_closure(optimizer, state, closure, args, kwargs)
        if amp_optimizers.is_amp_aware(optimizer):
            return self._step_on_device(optimizer, state, args, kwargs)
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            return self._nothing_to_do(optimizer, state)
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the scale answer what the iteration's checks found, and make every optimizer READY. Never syncs.

        Args:
            new_scale: a scale to use from now on, a positive number or a 1-element tensor, instead of the strategy's
                answer. It is kept within the strategy's bounds. A tensor is copied; if it holds 0, inf, NaN or a
                negative number, the scale stays.

        Raises:
            AssertionError: nothing was scaled or no gradients were checked in this iteration, or a `new_scale` of a
                wrong kind.
            ValueError: a number that is no scale.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("update")
        if new_scale is not None:
            self._set_scale(new_scale)
        else:
            flags: list[Tensor] = []
            clean = idle = True
            for state in self._per_optimizer_states.values():
                flags += state["found_inf_per_device"].values()
                clean = clean and state.get("clean", False)
                idle = idle and state["stage"] is OptState.READY
            if flags:
                found_inf = ranks.combined(flags, self._live_scale().device)
                self._advance(found_inf, self._norm, self._scale_used, clean=clean)
            elif idle:
                raise AssertionError(
                    "No inf checks were recorded prior to update. Call scaler.step(optimizer), or scaler.unscale_, in "
                    "every iteration before update()."
                )
        self._begin_iteration()


def _device_type(device: str | torch.device | None) -> str:
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type
    if isinstance(device, float):
        raise TypeError(
            f"device is {device}; expected a device type like 'cuda'. The first scale is init_scale={device}: it comes "
            "second here, as in torch.amp, where torch.cuda.amp took it first"
        )
    return torch.device(device).type
