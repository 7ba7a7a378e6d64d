"""Moving scalars between devices, with a host sync only where one is needed."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; itself if it is there.

    Copies between devices are ordered by their streams. A `non_blocking` copy to the CPU returns before the values have
    arrived (torch copies into pinned memory), and reading them at once gives garbage. So a copy to the CPU syncs; every
    other one does not.
    """
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")


def host_value_or_none(value: Tensor) -> float | None:
    """The number in a one-element tensor if the host can see it without waiting for a device, else None."""
    return value.numpy().item() if value.is_cpu and type(value) is Tensor else None  # a FakeTensor holds no number
