"""The three ways to step: with a flag read by the host, with a flag on the device, with a closure."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients import amp_optimizers, closures, ranks
from ampkit.scaler._scaler_insight import ScalerInsight


class ScalerSteps(ScalerInsight):
    """Stepping optimizers; not meant to be used alone."""

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Step an ordinary optimizer, or not: the one place where the host reads a flag."""
        if not optimizer_state["found_inf_per_device"]:  # never from `step`: as torch's, nothing found is no inf
            return optimizer.step(*args, **kwargs)
        found_inf = self._flag(optimizer_state)
        skip = self._read_flag(found_inf, optimizer_state)
        if skip:
            self._examine(optimizer, found_inf, skipped=True)
        result = None if skip else optimizer.step(*args, **kwargs)
        optimizer_state["clean"] = not skip
        self._note_step(optimizer, found_inf, skipped=skip)
        return result

    def _nothing_to_do(self, optimizer: Any, state: dict[str, Any]) -> None:
        state["stage"] = OptState.STEPPED
        self._note_no_gradients(optimizer)

    def _step_on_device(
        self, optimizer: Any, state: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Step an optimizer that skips on the device by itself."""
        if amp_optimizers.takes_grad_scaler_argument(optimizer):
            warnings.warn(
                "passing the scaler to step() as grad_scaler is deprecated by torch: read the tensors "
                "optimizer.grad_scale and optimizer.found_inf instead.",
                FutureWarning,
                stacklevel=3,
            )
            result = optimizer.step(*args, **{**kwargs, "grad_scaler": self})
            state["stage"] = OptState.STEPPED
            return result
        if state["stage"] is OptState.READY:
            if self._has_shared(optimizer):
                self.unscale_(optimizer)
            else:
                self._check_inf_per_device(optimizer)
        if not state["found_inf_per_device"]:
            return self._nothing_to_do(optimizer, state)
        found_inf = self._flag(state)
        preset = getattr(optimizer, "grad_scale", None)
        grad_scale = preset
        if state["stage"] is OptState.READY and self._loss_scale.scales_losses:
            scale = self._live_scale()
            grad_scale = scale if preset is None else scale * preset
            state["left_to_do"] = self._left_to_do(optimizer, found_inf)
        multiplier = state.get("multiplier")
        if multiplier is not None:
            state["left_to_do"] = self._left_to_do(optimizer, found_inf)
        skipped = self._examine(optimizer, found_inf, skipped=None)
        result = amp_optimizers.run(
            optimizer, lambda: optimizer.step(*args, **kwargs), found_inf, grad_scale, multiplier
        )
        state.pop("multiplier", None)
        state["stage"] = OptState.STEPPED
        state.pop("versions", None)  # torch's fused kernels write gradients
        self._note_step(optimizer, found_inf, skipped=skipped)
        return result

    def _left_to_do(self, optimizer: Any, found_inf: Tensor) -> Tensor:
        """What this optimizer's gradients would still have to be multiplied by after a step on the device.

        torch's fused kernels write the unscaled gradients back unless they skip; those that take a multiplier never
        write gradients.
        """
        inv_scale = self._inverse_scale()
        if amp_optimizers.takes_multiplier(optimizer):
            return inv_scale
        return torch.where(found_inf != 0, inv_scale, 1.0)

    def _step_with_closure(
        self,
        optimizer: Any,
        state: dict[str, Any],
        closure: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step an optimizer that evaluates the loss itself; see `closures`."""
        if self._scale_calls and state["stage"] is OptState.READY:
            # a first backward outside the closure, as SAM has it
            self.unscale_(optimizer)
        if state["found_inf_per_device"] and self._read_flag(self._flag(state), state):
            return self._abandoned(optimizer, state)
        self._settle_multiplier(state)

        def evaluate() -> Any:
            calls = self._scale_calls
            with torch.enable_grad():
                loss = closure()
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(_device_of(loss))
            if self._scale_calls > calls:
                state["stage"] = OptState.READY
                self.unscale_(optimizer)
            else:  # the closure did without the scaler: nothing to divide, still to be checked
                self._check_unscaled(optimizer, state)
            self._reject_loss(state, loss)
            if self._read_flag(self._flag(state), state):
                raise closures.NonFiniteEvaluation
            return loss

        snapshot = closures.Snapshot(optimizer)
        args, kwargs = closures.put(evaluate, args, kwargs)
        try:
            result = optimizer.step(*args, **kwargs)
        except closures.NonFiniteEvaluation:
            snapshot.restore()
            return self._abandoned(optimizer, state)
        if not state["found_inf_per_device"]:
            return self._nothing_to_do(optimizer, state)
        state["stage"] = OptState.STEPPED
        self._note_step(optimizer, self._flag(state), skipped=False)
        return result

    def _abandoned(self, optimizer: Any, state: dict[str, Any]) -> None:
        state["stage"] = OptState.STEPPED
        found_inf = self._flag(state)
        self._examine(optimizer, found_inf, skipped=True)
        self._note_step(optimizer, found_inf, skipped=True)

    def _reject_loss(self, state: dict[str, Any], loss: Any) -> None:
        """Raise the flags, on every rank that must agree, when this rank's loss is not finite."""
        found = state["found_inf_per_device"]
        scale = self._live_scale()
        verdict = torch.full_like(scale, 0.0 if closures.is_finite(loss) else 1.0)
        flags = {scale.device: verdict}
        ranks.agree(flags, state.get("groups", ()), scale)
        found[scale.device] = torch.maximum(found.get(scale.device, verdict), flags[scale.device])


def _device_of(loss: Any) -> torch.device:
    return loss.device if isinstance(loss, Tensor) else torch.device("cpu")
