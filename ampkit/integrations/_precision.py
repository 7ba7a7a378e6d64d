"""What the integrations share, and the precision plugins of Lightning and of Fabric."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ampkit.engine.weight_cache import WeightCache
from ampkit.policy.policy import Policy
from ampkit.region.arguments import named_policy
from ampkit.region.autocast import autocast
from ampkit.scaler.grad_scaler import GradScaler


def checked(scaler: GradScaler | None) -> GradScaler | None:
    """The scaler that was given; raises `TypeError` for one of torch's."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler is a {type(scaler).__module__}.{type(scaler).__name__}; expected an ampkit.GradScaler")
    return scaler


class OwnRegions:
    """What makes a plugin for mixed precision one with ampkit's regions and scaler: to be inherited from before it."""

    device: Any
    precision: Any
    scaler: Any

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"],
        device: str,
        scaler: GradScaler | None = None,
        *,
        policy: Policy | str | None = None,
        cache: WeightCache | None = None,
    ) -> None:
        kind = device.partition(":")[0]
        if not getattr(getattr(torch, kind, None), "is_available", lambda: True)():
            raise RuntimeError(
                f"device is {device!r}, which this machine does not have: nothing would be cast. Pass the device "
                f"that it trains on, as 'cpu'"
            )
        self.policy = None if policy is None else named_policy(policy, kind)
        self.cache = cache
        scaler = GradScaler(device) if precision == "16-mixed" and scaler is None else checked(scaler)
        super().__init__(precision, device, scaler if precision == "16-mixed" else None)  # type: ignore[call-arg]
        self.scaler = scaler    # which the libraries' own plugins refuse in bfloat16

    def region(self) -> autocast:
        """A region with the plugin's settings."""
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
        return autocast(self.device, dtype, policy=self.policy, cache=self.cache)
