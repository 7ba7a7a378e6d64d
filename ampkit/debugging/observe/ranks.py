"""The rank of this process."""

from __future__ import annotations

import os

import torch


def rank() -> int | None:
    """Return the rank of this process among several; None if there is only one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() if torch.distributed.get_world_size() > 1 else None
    return int(os.environ["RANK"]) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
