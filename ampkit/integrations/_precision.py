"""What the integrations share, and Lightning's two kinds of precision plugin."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ampkit.policy.policy import Policy
from ampkit.region.arguments import named_policy
from ampkit.region.autocast import autocast
from ampkit.region.weight_cache import WeightCache
from ampkit.scaler.grad_scaler import GradScaler


def dtype_of(precision: str) -> torch.dtype:
    """What "16-mixed" or "bf16-mixed" computes in."""
    return torch.bfloat16 if precision == "bf16-mixed" else torch.float16


def checked(scaler: GradScaler | None) -> GradScaler | None:
    """The scaler that was given; raises `TypeError` for one of torch's."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler is a {type(scaler).__module__}.{type(scaler).__name__}; expected an ampkit.GradScaler")
    return scaler


def policy_for(policy: Policy | str | None, device: str) -> Policy | None:
    """The policy that was given, by itself or by its name; None: the default for the device.

    Raises `ValueError` for an unknown name, `RuntimeError` where this machine has no such device: regions for it cast
    nothing.
    """
    kind = device.partition(":")[0]
    backend = getattr(torch, kind, None)
    if not getattr(backend, "is_available", lambda: True)():
        raise RuntimeError(
            f"device is {device!r}, which this machine does not have: nothing would be cast. Pass the device that it "
            f"trains on, as 'cpu'"
        )
    return None if policy is None else named_policy(policy, kind)


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
        self.policy = policy_for(policy, device)
        self.cache = cache
        scaler = GradScaler(device) if precision == "16-mixed" and scaler is None else checked(scaler)
        super().__init__(precision, device, scaler)  # type: ignore[call-arg]

    def region(self) -> autocast:
        """A region with the plugin's settings."""
        return autocast(self.device, dtype_of(self.precision), policy=self.policy, cache=self.cache)
