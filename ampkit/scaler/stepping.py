"""The ways to step: with a flag read by the host, with a flag on the device, with a closure."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients import amp_optimizers, closures, ranks
from ampkit.scaler.iteration import Iteration
from ampkit.scaler.live_scale import LiveScale
from ampkit.scaler.optimizer_record import OptimizerRecord
from ampkit.scaler.step_log import StepLog
from ampkit.scaler.unscaling import Unscaling


class Stepping:
    """Steps optimizers whose gradients have been checked, and logs the outcome."""

    def __init__(self, live: LiveScale, iteration: Iteration, unscaling: Unscaling, log: StepLog) -> None:
        self._live = live
        self._iteration = iteration
        self._unscaling = unscaling
        self._log = log

    def on_host(self, optimizer: Any, record: OptimizerRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step an ordinary optimizer unless its flag is set. One host read."""
        found_inf = record.found_inf(self._live.scale)
        skip = self._log.read_flag(record, found_inf)
        if skip:
            self._log.examine(optimizer, found_inf, skipped=True)
        result = None if skip else optimizer.step(*args, **kwargs)
        record.known_finite = not skip
        self._log.note_step(optimizer, found_inf, skipped=skip)
        return result

    def on_device(self, optimizer: Any, record: OptimizerRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Step an optimizer that skips on the device by itself. Never syncs."""
        found_inf = record.found_inf(self._live.scale)
        preset = getattr(optimizer, "grad_scale", None)
        grad_scale = preset
        scaled = record.stage is OptState.READY and self._live.strategy.scales_losses
        if scaled:
            scale = self._live.tensor
            grad_scale = scale if preset is None else scale * preset
        clip_factor = record.pending_clip_factor
        if scaled or clip_factor is not None:
            record.residual_inv_scale = self._residual_inv_scale(optimizer, found_inf)
        skipped = self._log.examine(optimizer, found_inf, skipped=None)
        result = amp_optimizers.run(
            optimizer, lambda: optimizer.step(*args, **kwargs), found_inf, grad_scale, clip_factor
        )
        record.pending_clip_factor = None
        record.stage = OptState.STEPPED
        record.versions = None  # torch's fused kernels write gradients
        self._log.note_step(optimizer, found_inf, skipped=skipped)
        return result

    def by_itself(
        self, optimizer: Any, record: OptimizerRecord, scaler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Step an optimizer that takes the scaler as an argument, and unscales and skips with it."""
        warnings.warn(
            "passing the scaler to step() as grad_scaler is deprecated by torch: read the tensors "
            "optimizer.grad_scale and optimizer.found_inf instead.",
            FutureWarning,
            stacklevel=3,
        )
        result = optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})
        record.stage = OptState.STEPPED
        return result

    def _residual_inv_scale(self, optimizer: Any, found_inf: Tensor) -> Tensor:
        """The factor that still unscales this optimizer's gradients after a step on the device.

        torch's fused kernels write the unscaled gradients back unless they skip; those that take a multiplier never
        write gradients.
        """
        inv_scale = self._iteration.inv_scale
        if inv_scale is None:
            inv_scale, _ = self._live.inverse()
        if amp_optimizers.takes_multiplier(optimizer):
            return inv_scale
        return torch.where(found_inf != 0, inv_scale, 1.0)

    def with_closure(
        self,
        optimizer: Any,
        record: OptimizerRecord,
        closure: closures.Closure,
        unscale: Callable[[Any], None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step an optimizer that evaluates the loss itself, with `unscale` for each evaluation; see `closures`."""
        live, log = self._live, self._log
        if self._iteration.scale_calls and record.stage is OptState.READY:
            # a first backward outside the closure, as with SAM
            unscale(optimizer)
        if record.found_inf_per_device and log.read_flag(record, record.found_inf(live.scale)):
            return self._abandoned(optimizer, record)
        self._unscaling.apply_pending_clip_factor_(record)

        def evaluate() -> Any:
            calls = self._iteration.scale_calls
            with torch.enable_grad():
                loss = closure()
            if live.scale is None:
                live.place(loss.device if isinstance(loss, Tensor) else torch.device("cpu"))
            if self._iteration.scale_calls > calls:
                record.stage = OptState.READY
                unscale(optimizer)
            else:  # the closure did not scale: nothing to unscale, still to be checked
                self._unscaling.check_unscaled(optimizer)
            self._reject_loss(record, loss)
            if log.read_flag(record, record.found_inf(live.scale)):
                raise closures.NonFiniteEvaluation
            return loss

        snapshot = closures.Snapshot(optimizer)
        args, kwargs = closures.put(evaluate, args, kwargs)
        try:
            result = optimizer.step(*args, **kwargs)
        except closures.NonFiniteEvaluation:
            snapshot.restore()
            return self._abandoned(optimizer, record)
        if not record.found_inf_per_device:
            return self.nothing_to_do(optimizer, record)
        record.stage = OptState.STEPPED
        log.note_step(optimizer, record.found_inf(live.scale), skipped=False)
        return result

    def nothing_to_do(self, optimizer: Any, record: OptimizerRecord) -> None:
        """The step of an optimizer without gradients."""
        record.stage = OptState.STEPPED
        self._log.note_no_gradients(optimizer)

    def _abandoned(self, optimizer: Any, record: OptimizerRecord) -> None:
        record.stage = OptState.STEPPED
        found_inf = record.found_inf(self._live.scale)
        self._log.examine(optimizer, found_inf, skipped=True)
        self._log.note_step(optimizer, found_inf, skipped=True)

    def _reject_loss(self, record: OptimizerRecord, loss: Any) -> None:
        """Raise the flags, on every rank that must agree, when this rank's loss is not finite."""
        scale = self._live.tensor
        verdict = {scale.device: torch.full_like(scale, 0.0 if closures.is_finite(loss) else 1.0)}
        ranks.agree(verdict, record.groups, scale)
        record.add_found_inf(verdict)
