"""What a scaler knows about one optimizer between two updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients import ranks

_TORCH_KEYS = ("stage", "found_inf_per_device")


@dataclass(eq=False)
class OptimizerRecord:
    """What is known of an optimizer's gradients in this iteration. torch's two entries are also there by key.

    Attributes:
        stage: READY at first, UNSCALED after unscaling or clipping, STEPPED after the step.
        found_inf_per_device: a flag per device that held gradients, nonzero where one was not finite.
        optimizer: the optimizer, None until the scaler has seen it.
        groups: process groups whose ranks must skip together.
        scale_range: lowest and highest scale among these ranks, None if they have not been compared.
        pending_clip_factor: what `step` has still to multiply gradients by, to unscale and clip them.
        residual_inv_scale: the factor that still unscales a stepped optimizer's gradients; None if they are unscaled.
        known_finite: the host has seen the flags clear.
        mark: set on this optimizer's gradients, in case another one shares them; see `SharedGradients`.
        versions: version counters of the marked gradients when the last backward pass began.
    """

    stage: OptState = OptState.READY
    found_inf_per_device: dict[torch.device, Tensor] = field(default_factory=dict)
    # Not arguments: a record is made in every iteration, mostly without these.
    optimizer: Any = field(default=None, init=False)
    groups: Sequence[Any] = field(default=(), init=False)
    scale_range: Tensor | None = field(default=None, init=False)
    pending_clip_factor: Tensor | None = field(default=None, init=False)
    residual_inv_scale: Tensor | None = field(default=None, init=False)
    known_finite: bool = field(default=False, init=False)
    mark: object | None = field(default=None, init=False)
    versions: dict[int, int] | None = field(default=None, init=False)

    @classmethod
    def of(cls, state: OptimizerRecord | Mapping[str, Any]) -> OptimizerRecord:
        """The record itself, or one made of torch's two entries, as code that knows torch's scaler makes them."""
        if isinstance(state, OptimizerRecord):
            return state
        return cls(state.get("stage", OptState.READY), state["found_inf_per_device"])

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

    def __getitem__(self, key: str) -> Any:
        if key not in _TORCH_KEYS:
            raise KeyError(key)
        return getattr(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in _TORCH_KEYS:
            raise KeyError(f"{key!r} is no entry of torch's; expected one of {_TORCH_KEYS}")
        setattr(self, key, value)

    def get(self, key: str, default: Any = None) -> Any:
        """torch's entry of this name, or `default` for any other name."""
        return getattr(self, key) if key in _TORCH_KEYS else default
