"""The per-iteration half of a GradScaler: what is known about each optimizer's gradients, and how it is found out."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients import clipping, kernels, ranks
from ampkit.gradients.collect import Gradients, collect, parameters, summed_duplicates
from ampkit.gradients.transfer import moved
from ampkit.scaler import overflow
from ampkit.scaler._scaler_memory import ScalerMemory

_MARK = "_ampkit_unscaled_for"


def fresh_optimizer_state() -> dict[str, Any]:
    """What is known about an optimizer at the beginning of an iteration: torch's two entries.

    Others appear on the way: `optimizer`; `groups` and `spread`, ranks that must agree and their extreme scales;
    `multiplier`, a factor that clipping has left for `step` to apply; `left_to_do`, what a stepped optimizer's
    gradients would still have to be multiplied by to be unscaled, absent when nothing; `clean`, whether the host has
    seen the flags clear; `mark` and `versions`, see `_mark`.
    """
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class ScalerChecks(ScalerMemory):
    """Unscaling, checking and the stages of an iteration; not meant to be used alone."""

    allow_fp16: bool

    def _begin_iteration(self) -> None:
        # a new dict, as in torch: code that holds the old one keeps what it saw
        self._per_optimizer_states = defaultdict(fresh_optimizer_state)
        self._norm: Tensor | None = None
        self._scale_calls = 0
        self._losses: list[weakref.ref[Tensor]] = []
        self._scale_used: Tensor | None = None

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        """Multiply gradients by `inv_scale`, and return a flag per device; `found_inf` is the one of its device.

        Takes the scale that it is given: nothing need have been scaled before.
        """
        found: dict[torch.device, Tensor] = {}
        groups: list[Any] = []
        with torch.no_grad():
            for params, factor in self._factors(optimizer, inv_scale):
                gradients = self._collect(optimizer, params, allow_fp16=allow_fp16)
                groups.extend(gradients.groups)
                for device, tensors in gradients.by_device.items():
                    if device not in found:
                        found[device] = moved(found_inf, device)
                    if factor is None:  # unscaled before: only look
                        one = torch.ones_like(found[device])
                        kernels.norm_and_check(tensors, one, found[device])
                    else:
                        kernels.unscale_(tensors, moved(factor, device), found[device])
                for values in summed_duplicates(gradients.duplicated) if gradients.duplicated else ():
                    flag = found[values.device]
                    kernels.norm_and_check([values], torch.ones_like(flag), flag)
                self._mark(optimizer, gradients.originals)
        self._agree(optimizer, found, groups)
        return found

    def _collect(
        self,
        optimizer: Any,
        params: Sequence[Tensor],
        *,
        allow_fp16: bool | None = None,
        coalesce: bool = False,
    ) -> Gradients:
        if allow_fp16 is None:
            allow_fp16 = self.allow_fp16
        return collect(params, None if allow_fp16 else lambda: overflow.fp16_refusal(optimizer), coalesce=coalesce)

    def _factors(self, optimizer: torch.optim.Optimizer, inv_scale: Tensor) -> list[tuple[list[Tensor], Tensor | None]]:
        """The optimizer's parameters, with what their gradients have to be multiplied by; None: by nothing.

        Gradients that have been unscaled this iteration for another optimizer come apart from the rest; see `_mark`.
        """
        rest = parameters(optimizer)
        whole = inv_scale if self._loss_scale.scales_losses else None
        if len(self._per_optimizer_states) < 2:
            return [(rest, whole)]
        others = {
            state["mark"]: state
            for state in self._per_optimizer_states.values()
            if "mark" in state and state["stage"] is not OptState.READY and state.get("optimizer") is not optimizer
        }
        parts: dict[object, list[Tensor]] = {}
        for param in rest:
            grad: Any = param.grad
            mark = getattr(grad, _MARK, None)
            if mark in others and others[mark].get("versions", {}).get(id(grad), grad._version) != grad._version:
                mark = None  # made anew
            parts.setdefault(mark, []).append(param)
        known = [(others[mark], shared) for mark, shared in parts.items() if mark in others]
        for state, _ in known:
            if state["stage"] is OptState.UNSCALED:
                self._settle_multiplier(state)
        fresh = [param for mark, params in parts.items() if mark not in others for param in params]
        return [(fresh, whole), *((shared, state.get("left_to_do")) for state, shared in known)]

    def _mark(self, optimizer: Any, grads: Sequence[Tensor]) -> None:
        """Leave on each gradient whose it is now, in case another optimizer shares it.

        A shared gradient has been made anew when a backward pass may have run since and its version says that something
        was written; either alone is no proof: users clip gradients, and losses reach some of them. So versions are kept
        when a pass is about to run: at the next `scale`, or when the backward of a loss that was scaled earlier begins.
        """
        if id(optimizer) not in self._per_optimizer_states:
            return  # nothing that is to be told from another optimizer's: `_unscale_grads_` was called by itself
        state = self._state_of(optimizer)
        mark = state.setdefault("mark", object())  # holds nothing: a gradient must not keep an optimizer alive
        state.pop("versions", None)
        if len(self._losses) > 1:
            for reference in self._losses:
                if (loss := reference()) is not None:
                    loss.register_hook(self._keep_versions)
            self._losses = []
        for grad in grads:
            setattr(grad, _MARK, mark)

    def _keep_versions(self, _: Tensor | None = None) -> None:
        """Keep the versions of all marked gradients, unless they have been kept: a backward pass may follow."""
        for state in self._per_optimizer_states.values():
            if "mark" in state and "versions" not in state:
                grads = (param.grad for group in state["optimizer"].param_groups for param in group["params"])
                state["versions"] = {
                    id(grad): grad._version for grad in grads if getattr(grad, _MARK, None) is state["mark"]
                }

    def _has_shared(self, optimizer: Any) -> bool:
        """Whether gradients of this optimizer have been unscaled this iteration for another one."""
        if len(self._per_optimizer_states) < 2:
            return False
        return len(self._factors(optimizer, self._inverse_scale())) > 1

    def _agree(
        self, optimizer: torch.optim.Optimizer, found: dict[torch.device, Tensor], groups: Sequence[Any]
    ) -> None:
        """Let all ranks that must skip together see the same flags."""
        if not groups and self.process_group is None:
            return
        everyone = [*dict.fromkeys(groups)]
        if self.process_group is not None and self.process_group not in everyone:
            everyone.append(self.process_group)
        state = self._state_of(optimizer)
        state["groups"] = everyone
        spread = ranks.agree(found, everyone, self._scale_on(next(iter(found), torch.device("cpu"))))
        if spread is not None:
            state["spread"] = spread
            if self._scale is not None:
                self._live_state()[1].note_scales(spread)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
        """Look for inf and NaN in gradients that stay scaled; the flags are what `unscale_` would find."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._state_of(optimizer)
        state["found_inf_per_device"] = self._look(optimizer, self._inverse_scale())
        return state["found_inf_per_device"]

    def _look(self, optimizer: Any, inv_scale: Tensor) -> dict[torch.device, Tensor]:
        """Flags by device for gradients that would be multiplied by `inv_scale`; nothing is written."""
        gradients = collect(parameters(optimizer))
        found: dict[torch.device, Tensor] = {}
        add_flags(found, gradients, torch.zeros_like(inv_scale))
        with torch.no_grad():
            for device, tensors in gradients.by_device.items():
                kernels.norm_and_check(tensors, moved(inv_scale, device), found[device])
            for values in summed_duplicates(gradients.duplicated) if gradients.duplicated else ():
                flag = found[values.device]
                kernels.norm_and_check([values], moved(inv_scale, flag.device), flag)
        self._mark(optimizer, gradients.originals)
        self._agree(optimizer, found, gradients.groups)
        return found

    def _inverse_scale(self) -> Tensor:
        """1 / scale, rounded once from double where the device has it."""
        scale = self._live_scale()
        if not self._loss_scale.scales_losses:
            return torch.ones_like(scale)
        if scale.is_mps:
            return scale.reciprocal()
        self._scale_used = scale.double()
        return self._scale_used.reciprocal().float()

    def _state_of(self, optimizer: Any) -> dict[str, Any]:
        state = self._per_optimizer_states[id(optimizer)]
        state["optimizer"] = optimizer
        return state

    def _require_ready(self, state: dict[str, Any]) -> None:
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(). Dividing gradients "
                "twice would ruin them: call update() at the end of each iteration, unscale_ once per update (not "
                "once per micro-batch), or pass allow_repeat=True."
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "unscale_() is being called after step(). Call it between backward() and step(), and update() once "
                "all optimizers have stepped."
            )

    def _require_not_stepped(self, state: dict[str, Any], name: str) -> None:
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(f"{name}() is being called after step(). Call it between backward() and step().")

    def _check_unscaled(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Look for inf and NaN in gradients that were never scaled."""
        found = self._look(optimizer, torch.ones_like(self._live_scale()))
        state["found_inf_per_device"] = found
        state["stage"] = OptState.UNSCALED

    def _flag(self, state: dict[str, Any]) -> Tensor:
        """The optimizer's flags as one, 0.0 or 1.0, on the scale's device."""
        flags = list(state["found_inf_per_device"].values())
        return ranks.combined(flags, flags[0].device if self._scale is None else self._scale.device)

    def _note_norm(self, norm: Tensor) -> None:
        """Keep the largest norm of an iteration for the history."""
        self._norm = norm if self._norm is None else torch.maximum(self._norm, norm.to(self._norm))

    def _settle_multiplier(self, state: dict[str, Any]) -> None:
        """Multiply now what clipping had left for the optimizer's `step`."""
        multiplier = state.pop("multiplier", None)
        if multiplier is None:
            return
        gradients = collect(parameters(state["optimizer"]))
        clipping.multiply_(gradients, multiplier, state["found_inf_per_device"])
        self._mark(state["optimizer"], gradients.originals)


def add_flags(found: dict[torch.device, Tensor], gradients: Gradients, found_inf: Tensor) -> None:
    """Give every device that holds gradients a flag; `found_inf` serves its own device."""
    for device in gradients.by_device:
        if device not in found:
            found[device] = moved(found_inf, device)
