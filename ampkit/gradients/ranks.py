"""Ranks that must skip together: agree on one found_inf, take norms over all of them, and find drift between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ampkit.gradients.collect import combined, moved


def several() -> bool:
    """Whether torch.distributed is initialized with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def agree(found_inf: dict[torch.device, Tensor], groups: Sequence[Any], device: torch.device) -> None:
    """Set every flag to the maximum over all ranks of all groups, in place. Synchronizes by the collectives alone.

    Args:
        found_inf: flags by device; a rank without gradients gets a clear flag on `device`, with which it takes part.
        groups: process groups, in the same order on every rank, each at one small all-reduce.
        device: where the flags are combined, of the same type on every rank.
    """
    if not groups:
        return
    if not found_inf:
        found_inf[device] = torch.zeros((), dtype=torch.float32, device=device)
    flag = combined(list(found_inf.values()), device).clone()
    for group in groups:
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    for local in found_inf.values():
        local.copy_(moved(flag, local.device))


def differing(values: dict[str, float], device: torch.device, group: Any) -> dict[str, tuple[float, float]]:
    """The lowest and the highest value of each number that differs between the ranks of a group (None: all ranks).

    Synchronizes: one all-reduce and one read.
    """
    mine = torch.tensor([*values.values()], dtype=torch.float64, device="cpu")
    message = torch.cat((mine, -mine)).to(device)
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    highest, lowest = message.reshape(2, -1).tolist()
    return {name: (-low, high) for name, low, high in zip(values, lowest, highest, strict=True) if -low != high}


def total(norm: Tensor, norm_type: float, groups: Sequence[Any]) -> Tensor:
    """The norm of a vector with parts on the ranks of `groups`, from the norm of this rank's part."""
    if not groups:
        return norm
    if norm_type == float("inf"):
        for group in groups:
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    # float64: squares of float32 norms may overflow float32
    powers = norm.double() if norm_type == 0 else norm.double() ** norm_type
    for group in groups:
        dist.all_reduce(powers, group=group)
    return (powers if norm_type == 0 else powers ** (1.0 / norm_type)).to(norm.dtype)
