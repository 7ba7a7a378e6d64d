"""The base class of the precision plugins for Lightning and Fabric, and the check of a scaler in all integrations."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ampkit.policy.policy import Policy
from ampkit.region.arguments import named_policy
from ampkit.region.autocast import autocast
from ampkit.scaler.grad_scaler import GradScaler


def checked_scaler(scaler: GradScaler | None) -> GradScaler | None:
    """Return `scaler`; raise `TypeError` if it is not an `ampkit.GradScaler`."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler is a {type(scaler).__module__}.{type(scaler).__name__}; expected an ampkit.GradScaler")
    return scaler


class PrecisionPlugin:
    """Base class, before a library's `MixedPrecision`, that gives it ampkit's regions and scaler."""

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
    ) -> None:
        device_type = device.partition(":")[0]
        if not getattr(getattr(torch, device_type, None), "is_available", lambda: True)():
            raise RuntimeError(
                f"device is {device!r}, which this machine does not have: nothing would be cast. Pass the device "
                f"that it trains on, such as 'cpu'"
            )
        self.policy = None if policy is None else named_policy(policy, device_type)
        scaler = GradScaler(device) if precision == "16-mixed" and scaler is None else checked_scaler(scaler)
        super().__init__(precision, device, scaler if precision == "16-mixed" else None)  # type: ignore[call-arg]
        self.scaler = scaler  # not passed above: the libraries' plugins refuse a scaler in bfloat16

    def region(self) -> autocast:
        """Return a region with the plugin's settings."""
        dtype = torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16
        return autocast(self.device, dtype, policy=self.policy)
