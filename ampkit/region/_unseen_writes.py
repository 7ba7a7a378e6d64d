"""Who can write to a weight without its version counter knowing: what shares its memory, and collectives."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

__all__ = ["collectives", "owns_its_memory"]

_c10d: Any = dist.distributed_c10d if dist.is_available() else None


def owns_its_memory(weight: Tensor) -> bool:
    """Whether nothing else can write to a weight's memory: no alias, no array it was made of, no other process."""
    if type(weight) is not Parameter and type(weight) is not Tensor:
        return False        # it may lie in tensors inside the subclass, which have users of their own
    storage = weight.untyped_storage()
    return (
        _use_count(storage) == _ALONE
        and storage.resizable()         # memory of arrays, files and DLPack is not
        and not (weight.is_cpu and storage.is_shared())
    )


def _use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors have a storage, and one for its Python object."""
    return torch._C._storage_Use_Count(storage._cdata)  # pyright: ignore


_lone = torch.empty(0)
_ALONE = _use_count(_lone.untyped_storage())


def collectives() -> Any:
    """Something that differs after each collective of this process; each can write to a weight and move no version."""
    if _c10d is None or not (groups := _c10d._world.pg_map):
        return None
    try:
        return [(weakref.ref(group), group._get_sequence_number_for_group()) for group in groups]
    except RuntimeError:        # a backend that does not count
        return object()
