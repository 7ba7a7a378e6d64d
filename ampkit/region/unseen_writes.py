"""Who can write to a weight without its version counter knowing: what shares its memory, and collectives."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ampkit.torch_internals.tensors import n_collectives, process_groups, use_count

__all__ = ["collectives", "owns_its_memory"]

_c10d: Any = dist.distributed_c10d if dist.is_available() else None


def owns_its_memory(weight: Tensor) -> bool:
    """Whether nothing else can write to a weight's memory: no alias, no array it was made of, no other process."""
    if type(weight) is not Parameter and type(weight) is not Tensor:
        return False        # it may lie in tensors inside the subclass, which have users of their own
    storage = weight.untyped_storage()
    return (
        use_count(storage) == _use_count_alone()
        and storage.resizable()         # memory of arrays, files and DLPack is not
        and not (weight.is_cpu and storage.is_shared())
    )


@functools.cache
def _use_count_alone() -> int:
    """The count of a storage that one tensor has."""
    tensor = torch.empty(0, device="cpu")
    return use_count(tensor.untyped_storage())


def collectives() -> Any:
    """Something that differs after each collective of this process; each can write to a weight and move no version."""
    if _c10d is None or not (groups := process_groups(_c10d)):
        return None
    try:
        return [(weakref.ref(group), n_collectives(group)) for group in groups]
    except RuntimeError:        # a backend that does not count
        return object()
