"""What Lightning's two kinds of precision plugin share."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ampkit.policy.policy import Policy
from ampkit.region.autocast import autocast
from ampkit.region.weight_cache import WeightCache
from ampkit.scaler.grad_scaler import GradScaler


def dtype_of(precision: str) -> torch.dtype:
    """What "16-mixed" or "bf16-mixed" computes in."""
    return torch.bfloat16 if precision == "bf16-mixed" else torch.float16


def scaler_for(precision: str, device: str, scaler: GradScaler | None) -> GradScaler | None:
    """The scaler that was given, else one for the device where the precision needs one."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler is a {type(scaler).__module__}.{type(scaler).__name__}; expected an ampkit.GradScaler")
    return GradScaler(device) if scaler is None and precision == "16-mixed" else scaler


class OwnRegions:
    """What makes a plugin for mixed precision one with ampkit's regions and scaler: to be inherited from before it."""

    device: Any
    precision: Any

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str,
        scaler: GradScaler | None = None,
        *,
        policy: Policy | str | None = None,
        cache: WeightCache | None = None,
    ) -> None:
        super().__init__(precision, device, scaler_for(precision, device, scaler))  # type: ignore[call-arg]
        self.policy = policy
        self.cache = cache

    def region(self) -> autocast:
        """A region as the plugin was told."""
        return autocast(self.device, dtype_of(self.precision), policy=self.policy, cache=self.cache)
