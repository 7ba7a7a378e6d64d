"""Ranks that must skip together: agree on one found_inf, take norms over all of them, and find drift between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ampkit.gradients.collect import combined, moved

Groups = tuple[Any, ...]
"""The process groups of a mesh, one for each dimension of several ranks; () for tensors without a mesh."""


def several() -> bool:
    """Whether torch.distributed is initialized with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Norms(NamedTuple):
    """The norm of gradients that several ranks hold.

    Args:
        norm: the norm, 0-d.
        judged: the norm by which ranks that skip together judge a step.
        is_same: whether all of these ranks have the same `judged`, to the bit.
    """

    norm: Tensor
    judged: Tensor
    is_same: bool


class Agreement:
    """The ranks that skip together, and the collectives in which they agree on flags and take norms.

    Norms and flags share a message. One all-reduce is enough where one group has all ranks: that of a mesh of one
    dimension, and all ranks where a mesh spans them. Other meshes take one for each dimension, and the process group
    of a scaler one more. Which collectives a rank issues, and how long their messages are, depends on the meshes of
    its parameters and on settings of its scaler: not on its gradients, of which it may have none, nor on their values.

    Args:
        meshes: the lowest rank of each mesh that a DTensor spans, by the mesh's groups, in the same order on all ranks.
        group: a process group whose ranks skip together besides; None: there is none.
    """

    def __init__(self, meshes: Mapping[Groups, int], group: Any = None) -> None:
        self._meshes = meshes
        self._of_meshes = [*dict.fromkeys(chain(*meshes))]
        self._joint: Any = None  # one group that has all ranks of all meshes
        if len(self._of_meshes) == 1:
            self._joint = self._of_meshes[0]
        elif any(map(_spans_all, meshes)):
            self._joint = dist.group.WORLD
        self._own = None if group is None or self._covers(group) else group

    def __bool__(self) -> bool:
        return bool(self._of_meshes) or self._own is not None

    def _covers(self, group: Any) -> bool:
        """Whether the collectives over the meshes reach all ranks of a group."""
        return group in self._of_meshes or self._joint is dist.group.WORLD

    def agree(self, found_inf: dict[torch.device, Tensor], device: torch.device) -> None:
        """Set every flag to the maximum over all ranks, in place. Synchronizes by the collectives alone.

        Args:
            found_inf: flags by device; a rank without gradients takes part with a clear flag on `device`.
            device: where the flags are combined, of the same type on every rank.
        """
        if not self:
            return
        groups = self._of_meshes if self._joint is None else [self._joint]
        if self._own is not None:
            groups = [self._own] if self._own.size() == dist.get_world_size() else [*groups, self._own]
        flag = _joined_flag(found_inf, device).clone()
        for group in groups:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        _set(found_inf, flag)

    def norms(
        self,
        parts: Mapping[Groups, Tensor],
        found_inf: dict[torch.device, Tensor],
        device: torch.device,
        norm_type: float,
        across: Any = None,
        judges: bool = False,
    ) -> Norms:
        """Take the norm over all ranks, and set every flag to the maximum over them. Synchronizes by the collectives.

        Args:
            parts: the norms of this rank's parts of the gradients by the groups that hold the others, 0-d; (): those
                that no other rank has a part of, or other ranks hold equal ones.
            found_inf: flags by device, as in `agree`.
            device: where norms and flags are combined.
            norm_type: the order of the norm.
            across: a process group whose ranks hold other gradients, apart from those of meshes that have all of its
                ranks; None: there is none.
            judges: whether steps are judged by their norm.
        """
        dtype = torch.float64 if any(norm.dtype is torch.float64 for norm in parts.values()) else torch.float32
        zero = torch.zeros((), dtype=torch.float64, device=device)
        values = dict.fromkeys((*self._meshes, ()), zero)
        values.update((groups, _power(norm, norm_type)) for groups, norm in parts.items())
        largest = values  # of ranks of one group that have other values, as of tensors without a mesh
        flag = _joined_flag(found_inf, device).double()
        if self._joint is not None:
            slots = {groups: self._slot(groups, first, values[groups]) for groups, first in self._meshes.items()}
            if judges:
                slots[()] = self._slot((), dist.get_rank(), values[()])
            lengths = [len(slot) for slot, _ in slots.values()]
            message = torch.cat([flag.reshape(1), *(slot for slot, _ in slots.values())])
            flags, *sums = _reduced(message, norm_type, self._joint).split([1, *lengths])
            flag, largest = flags[0], dict(values)
            for (groups, (_, index)), of_all in zip(slots.items(), sums, strict=True):
                values[groups], largest[groups] = of_all[index], of_all.max()
        else:
            for group in self._of_meshes:
                here = [groups for groups in self._meshes if group in groups]
                flag, *sums = _reduced(torch.stack([flag, *map(values.__getitem__, here)]), norm_type, group)
                values.update(zip(here, sums, strict=True))
        if across is not None:
            whole = [groups for groups in self._meshes if across in groups or _spans_all(groups)]
            rest = [
                [each.pop(groups) for groups in list(each) if groups not in whole] for each in (values, dict(largest))
            ]
            sums = [_joined(each, norm_type) for each in rest]
            with_flag, *sums = _reduced(torch.stack([flag, *sums]), norm_type, across)
            flag = with_flag if across is self._own else flag
            largest = {groups: largest[groups] for groups in whole} | {(): sums[1]}
            values[()] = sums[0]
        total, judged = _joined(values.values(), norm_type), _joined(largest.values(), norm_type)
        if self._own is not None and across is not self._own:
            flag, of_own = _reduced(torch.stack((flag, judged)), norm_type, self._own)
            judged = of_own if across is None else judged
        _set(found_inf, flag.ne(0).float())
        is_same = self._joint is not None or not self._meshes
        is_same = is_same and (across is None or across is self._own or self._covers(across))
        return Norms(_root(total, norm_type, dtype), _root(judged, norm_type, dtype), is_same)

    def _slot(self, groups: Groups, first: int, value: Tensor) -> tuple[Tensor, int]:
        """The part of a message for gradients of one mesh, and where in it the sum over this rank's mesh will be.

        One element if the mesh has all ranks of the message; else one for each of these, of which a mesh uses that of
        its lowest rank.
        """
        size = self._joint.size()
        if math.prod(group.size() for group in groups) == size:
            return value.reshape(1), 0
        index = first if self._joint is dist.group.WORLD else dist.get_group_rank(self._joint, first)
        slot = torch.zeros(size, dtype=value.dtype, device=value.device)
        slot[index] = value
        return slot, index


def _spans_all(groups: Groups) -> bool:
    return math.prod(group.size() for group in groups) == dist.get_world_size()


def _joined_flag(found_inf: dict[torch.device, Tensor], device: torch.device) -> Tensor:
    """The flags of all devices as one of 0.0 or 1.0 on `device`; without flags a clear one, which is added to them."""
    if not found_inf:
        found_inf[device] = torch.zeros((), dtype=torch.float32, device=device)
    return combined(list(found_inf.values()), device).ne(0).float()


def _set(found_inf: Mapping[torch.device, Tensor], flag: Tensor) -> None:
    for local in found_inf.values():
        local.copy_(moved(flag, local.device))


def _reduced(message: Tensor, norm_type: float, group: Any) -> Tensor:
    """A message of flags and powers of norms, added up over a group, or for the largest magnitude the maximum."""
    if norm_type == math.inf:  # NaN may get lost in a maximum
        message = message.nan_to_num_(nan=math.inf, posinf=math.inf)
    dist.all_reduce(message, dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM, group=group)
    return message


def _joined(values: Iterable[Tensor], norm_type: float) -> Tensor:
    """The power of a vector's norm from those of its parts."""
    together = torch.stack(list(values))
    return together.max() if norm_type == math.inf else together.sum()


def _power(norm: Tensor, norm_type: float) -> Tensor:
    """What adds up over the parts of a vector, in float64: squares of float32 norms may overflow float32."""
    return norm.double() if norm_type in (0.0, math.inf) else norm.double() ** norm_type


def _root(power: Tensor, norm_type: float, dtype: torch.dtype) -> Tensor:
    """The inverse of `_power`, in `dtype`."""
    return (power if norm_type in (0.0, math.inf) else power ** (1.0 / norm_type)).to(dtype)


def differing(values: dict[str, float], device: torch.device, group: Any) -> dict[str, tuple[float, float]]:
    """The lowest and the highest value of each number that differs between the ranks of a group (None: all ranks).

    Synchronizes: one all-reduce and one read.
    """
    mine = torch.tensor([*values.values()], dtype=torch.float64, device="cpu")
    message = torch.cat((mine, -mine)).to(device)
    dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
    highest, lowest = message.reshape(2, -1).tolist()
    return {name: (-low, high) for name, low, high in zip(values, lowest, highest, strict=True) if -low != high}
