"""What the first FSDP leaves on the parameters that it shards."""

from __future__ import annotations

import torch


def is_flat(param: torch.Tensor) -> bool:
    """Whether `FullyShardedDataParallel` has put this parameter, or its elements, into a flat one that it shards."""
    return getattr(param, "_fsdp_flattened", False)
