"""Moving device scalars without a wait where none is needed, and never without one that is."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; itself if it is there.

    Devices order their work by themselves. The host does not: a `non_blocking` copy to it returns before the values
    have arrived (torch lets them arrive in pinned memory), and whoever reads them at once reads garbage. So a copy to
    the host waits for the device; every other one does not.
    """
    if tensor.device == device:
        return tensor
    return tensor.to(device, non_blocking=device.type != "cpu")
