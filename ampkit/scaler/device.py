"""The device type that a scaler is made for."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch


def device_type_of(device: str | torch.device | None) -> str:
    """The type of a device, given as such or by name; None: the current accelerator's, else "cpu"."""
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type
    if isinstance(device, float):
        raise TypeError(
            f"device is {device}; expected a device type like 'cuda'. The first scale is init_scale={device}: it comes "
            "second here, as in torch.amp, where torch.cuda.amp took it first"
        )
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device is {device!r}; expected None, a torch.device, or a device type like 'cuda'")
    return torch.device(device).type


def can_scale_on(device_type: str) -> bool:
    """Whether there is such a device; warns, with torch's sentence, where "cuda" is not available."""
    if device_type != "cuda" or torch.cuda.is_available() or find_spec("torch_xla"):
        return True
    warnings.warn("GradScaler is enabled for 'cuda', but CUDA is not available.  Disabling.", stacklevel=3)
    return False
