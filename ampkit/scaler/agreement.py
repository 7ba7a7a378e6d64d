"""A check that data-parallel ranks have not drifted apart."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ampkit.gradients import ranks
from ampkit.scaler.grad_scaler import GradScaler

_COMPARED = ("scale", "updates", "steps", "skips")


def check_ranks(scaler: GradScaler, process_group: Any = None) -> None:
    """Raise if ranks hold different loss scales or have taken different numbers of steps. Every rank must call it.

    Under DDP all ranks see the same gradients, and the scaler exchanges nothing. They still drift apart when one of
    them loads another state, or steps parameters that DDP does not know. Call it now and then, after `update`: it costs
    an all-reduce of eight numbers and two host reads. No-op in a single process and for a disabled scaler.

    Args:
        scaler: the scaler of this rank.
        process_group: the ranks to compare; None: all.

    Raises:
        RuntimeError: what differs, on every rank, with the lowest and the highest value.

    >>> check_ranks(GradScaler("cpu"))
    """
    if not scaler.is_enabled() or not ranks.several():
        return
    stats = scaler.stats()
    mine = torch.tensor([float(getattr(stats, name)) for name in _COMPARED], dtype=torch.float64, device="cpu")
    scale = scaler._live.scale
    message = torch.cat((mine, -mine)).to("cpu" if scale is None else scale.device)
    dist.all_reduce(message, dist.ReduceOp.MAX, group=process_group)
    highest, lowest = message.reshape(2, -1).tolist()
    differing = [
        f"{name} from {-low:g} to {high:g}"
        for name, low, high in zip(_COMPARED, lowest, highest, strict=True)
        if -low != high
    ]
    if differing:
        raise RuntimeError(
            f"ranks have drifted apart: {', '.join(differing)}. Load the same scaler state on all ranks, and tell the "
            "scaler which ranks hold shards: GradScaler(process_group=...)"
        )
