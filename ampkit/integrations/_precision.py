"""What Lightning's two kinds of precision plugin share."""

from __future__ import annotations

import torch

from ampkit.scaler.grad_scaler import GradScaler


def dtype_of(precision: str) -> torch.dtype:
    """What "16-mixed" or "bf16-mixed" computes in."""
    return torch.bfloat16 if precision == "bf16-mixed" else torch.float16


def scaler_for(precision: str, device: str, scaler: GradScaler | None) -> GradScaler | None:
    """The scaler that was given, else one for the device where the precision needs one."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler is a {type(scaler).__module__}.{type(scaler).__name__}; expected an ampkit.GradScaler")
    return GradScaler(device) if scaler is None and precision == "16-mixed" else scaler
