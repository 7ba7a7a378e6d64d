"""What a scaler knows about one optimizer between two updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients import ranks


def fresh_state() -> dict[str, Any]:
    """An optimizer's state at the beginning of an iteration, as torch's scaler makes it."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}


@dataclass(eq=False)
class OptimizerRecord:
    """What is known of an optimizer's gradients in this iteration, beside torch's two entries, which are in `state`.

    Attributes:
        state: torch's dict with "stage" (READY at first, UNSCALED after unscaling or clipping, STEPPED after the step)
            and "found_inf_per_device" (a flag per device that held gradients, nonzero where one was not finite). Other
            code may hold it, and may have made it.
        optimizer: the optimizer, None until the scaler has seen it.
        groups: process groups whose ranks must skip together.
        scale_range: lowest and highest scale among these ranks, None if they have not been compared.
        pending_clip_factor: what `step` has still to multiply gradients by, to unscale and clip them.
        residual_inv_scale: the factor that still unscales a stepped optimizer's gradients; None if they are unscaled.
        known_finite: the host has seen the flags clear.
        mark: set on this optimizer's gradients, in case another one shares them; see `SharedGradients`.
        versions: version counters of the marked gradients when the last backward pass began.
    """

    state: Any = field(default_factory=fresh_state)
    # Not arguments: a record is made in every iteration, mostly without these.
    optimizer: Any = field(default=None, init=False)
    groups: Sequence[Any] = field(default=(), init=False)
    scale_range: Tensor | None = field(default=None, init=False)
    pending_clip_factor: Tensor | None = field(default=None, init=False)
    residual_inv_scale: Tensor | None = field(default=None, init=False)
    known_finite: bool = field(default=False, init=False)
    mark: object | None = field(default=None, init=False)
    versions: dict[int, int] | None = field(default=None, init=False)

    @property
    def stage(self) -> OptState:
        """torch's entry of this name."""
        return self.state["stage"]

    @stage.setter
    def stage(self, stage: OptState) -> None:
        self.state["stage"] = stage

    @property
    def found_inf_per_device(self) -> dict[torch.device, Tensor]:
        """torch's entry of this name."""
        return self.state["found_inf_per_device"]

    @found_inf_per_device.setter
    def found_inf_per_device(self, found: dict[torch.device, Tensor]) -> None:
        self.state["found_inf_per_device"] = found

    def refusal_to_unscale(self) -> RuntimeError:
        """Why an optimizer that is not READY cannot be unscaled."""
        if self.stage is OptState.UNSCALED:
            return RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(). Dividing gradients "
                "twice would ruin them: call update() at the end of each iteration, unscale_ once per update (not "
                "once per micro-batch), or pass allow_repeat=True."
            )
        return RuntimeError(
            "unscale_() is being called after step(). Call it between backward() and step(), and update() once "
            "all optimizers have stepped."
        )

    def require_not_stepped(self, name: str) -> None:
        """Raise `RuntimeError` where the method of this name comes too late."""
        if self.stage is not OptState.STEPPED:
            return
        if name == "step":
            raise RuntimeError(
                "step() has already been called since the last update(). Call update() once per iteration, after all "
                "optimizers have stepped."
            )
        raise RuntimeError(f"{name}() is being called after step(). Call it between backward() and step().")

    def found_inf(self, scale: Tensor | None) -> Tensor:
        """The flags as one, 0.0 or 1.0, on the scale's device; without a scale on the first flag's."""
        flags = list(self.found_inf_per_device.values())
        return ranks.combined(flags, flags[0].device if scale is None else scale.device)

    def add_found_inf(self, found: Mapping[torch.device, Tensor]) -> None:
        """Set the flags that a further check has set."""
        before = self.found_inf_per_device
        self.found_inf_per_device = {
            **before,
            **{device: torch.maximum(before[device], flag) if device in before else flag
               for device, flag in found.items()},
        }
