"""Ranks that must skip together: one found_inf and one norm for all of them, and numbers that differ between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ampkit.gradients.collect import combined, moved

Groups = tuple[Any, ...]
"""The process groups of a mesh, one for each dimension of several ranks; () for tensors without a mesh."""


def several() -> bool:
    """Whether torch.distributed is initialized with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class SkipGroups:
    """The process groups of the ranks that skip together, and the collectives for their flags and norms.

    There is one all-reduce for each dimension of the meshes, and one for an additional process group. Norms and flags
    share a message. Which collectives a rank issues, and how long their messages are, depends on the meshes of its
    parameters and on settings of its scaler: not on its gradients, of which it may have none, nor on their values.

    Args:
        meshes: the groups of each mesh that a DTensor spans, in the same order on all ranks.
        group: an additional process group whose ranks skip together; None: there is none.

    Attributes:
        groups: the groups over which flags are reduced, one after the other; empty for a rank that skips independently.
    """

    def __init__(self, meshes: Iterable[Groups], group: Any = None) -> None:
        self._meshes = tuple(meshes)
        self._dimensions = [*dict.fromkeys(chain(*self._meshes))]
        self._own = None if group in self._dimensions else group
        self.groups = self._dimensions if self._own is None else [*self._dimensions, self._own]

    def reduce_flags(self, found_inf: dict[torch.device, Tensor], device: torch.device) -> None:
        """Set every flag to the maximum over all ranks, in place. Synchronizes only by collectives.

        Args:
            found_inf: flags by device; a rank without gradients takes part with a clear flag on `device`.
            device: where the flags are combined, of the same type on every rank.
        """
        if not self.groups:
            return
        flag = _joined_flag(found_inf, device).clone()
        for group in self.groups:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        _set(found_inf, flag)

    def norm(
        self,
        parts: Mapping[Groups, Tensor],
        found_inf: dict[torch.device, Tensor],
        device: torch.device,
        norm_type: float,
        across: Any = None,
    ) -> Tensor:
        """Take the norm over all ranks, and set every flag to the maximum over them. Synchronizes by the collectives.

        Args:
            parts: the norms of this rank's parts of the gradients by the groups that hold the others, 0-d; (): the norm
                of gradients of which no other rank has a part, or other ranks hold equal ones.
            found_inf: flags by device, as in `reduce_flags`.
            device: where norms and flags are combined.
            norm_type: the order of the norm.
            across: a process group whose ranks hold other gradients, unless their mesh has all of its ranks; None:
                there is none.

        Returns:
            The norm, 0-d.
        """
        dtype = torch.float64 if any(norm.dtype is torch.float64 for norm in parts.values()) else torch.float32
        zero = torch.zeros((), dtype=torch.float64, device=device)
        powers = dict.fromkeys((*self._meshes, ()), zero)
        powers.update((groups, _power(norm, norm_type)) for groups, norm in parts.items())
        flag = _joined_flag(found_inf, device).double()
        for group in self._dimensions:
            here = [groups for groups in self._meshes if group in groups]
            flag, *sums = _reduced([flag, *map(powers.__getitem__, here)], norm_type, group)
            powers.update(zip(here, sums, strict=True))
        if across is not None:
            apart = [groups for groups in powers if groups == () or not (across in groups or _spans_all(groups))]
            rest = _joined([powers.pop(groups) for groups in apart], norm_type)
            flag, powers[()] = _reduced([flag, rest], norm_type, across)
        if self._own is not None and across is not self._own:
            (flag,) = _reduced([flag], norm_type, self._own)
        _set(found_inf, flag.ne(0).float())
        return _root(_joined(powers.values(), norm_type), norm_type, dtype)


NO_GROUPS = SkipGroups(())
"""The groups of a rank that skips independently."""


def _spans_all(groups: Groups) -> bool:
    """Whether a mesh has all ranks."""
    return math.prod(group.size() for group in groups) == dist.get_world_size()


def _joined_flag(found_inf: dict[torch.device, Tensor], device: torch.device) -> Tensor:
    """Return the flags of all devices as one flag of 0.0 or 1.0 on `device`; without flags add a clear one."""
    if not found_inf:
        found_inf[device] = torch.zeros((), dtype=torch.float32, device=device)
    return combined(list(found_inf.values()), device).ne(0).float()


def _set(found_inf: Mapping[torch.device, Tensor], flag: Tensor) -> None:
    for local in found_inf.values():
        local.copy_(moved(flag, local.device))


def _reduced(numbers: Sequence[Tensor], norm_type: float, group: Any) -> Tensor:
    """Return a message of flags and powers of norms, summed over a group; the maximum for the infinity norm."""
    message = torch.stack(list(numbers))
    if norm_type == math.inf:  # a maximum may ignore NaN
        message = message.nan_to_num_(nan=math.inf, posinf=math.inf)
    dist.all_reduce(message, dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM, group=group)
    return message


def _joined(values: Iterable[Tensor], norm_type: float) -> Tensor:
    """Return the power of a vector's norm from the powers of its parts."""
    together = torch.stack(list(values))
    return together.max() if norm_type == math.inf else together.sum()


def _power(norm: Tensor, norm_type: float) -> Tensor:
    """Return a norm's power, which sums over the parts of a vector, in float64: squares may overflow float32."""
    return norm.double() if norm_type in (0.0, math.inf) else norm.double() ** norm_type


def _root(power: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    """Return the inverse of `_power`, in `dtype`."""
    return (power if norm_type in (0.0, math.inf) else power ** (1.0 / norm_type)).to(dtype)


def differing(values: dict[str, float], device: torch.device, group: Any) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest value of each number that differs between the ranks of a group (None: all
    ranks).

    Synchronizes: one all-reduce and one read.
    """
    local = torch.tensor([*values.values()], dtype=torch.float64, device="cpu")
    message = torch.cat((local, -local)).to(device)
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    highest, lowest = message.reshape(2, -1).tolist()
    return {name: (-low, high) for name, low, high in zip(values, lowest, highest, strict=True) if -low != high}
