"""What the weight caches need of torch: tracing state, storages, collectives, casts without a copy."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ampkit.torch_internals.private_names import private

n_dispatch_modes: Callable[[], int] = private("_C._len_torch_dispatch_stack")
tracing_state: Callable[[], Any] = private("_C._get_tracing_state")
_use_count: Callable[[int], int] = private("_C._storage_Use_Count")
_c10d: Any = dist.distributed_c10d if dist.is_available() else None


def owns_its_memory(weight: Tensor) -> bool:
    """Whether nothing else can write to a weight's memory: no alias, no array it was made of, no other process."""
    if type(weight) is not Parameter and type(weight) is not Tensor:
        return False        # it may lie in tensors inside the subclass, which have users of their own
    storage = weight.untyped_storage()
    return (
        _use_count(storage._cdata) == _use_count_alone()
        and storage.resizable()         # memory of arrays, files and DLPack is not
        and not (weight.is_cpu and storage.is_shared())
    )


@functools.cache
def _use_count_alone() -> int:
    """The count of a storage that one tensor has: one for that, and one for the storage's Python object."""
    tensor = torch.empty(0, device="cpu")
    return _use_count(tensor.untyped_storage()._cdata)


def n_collectives() -> list[Any] | None:
    """How many collectives each process group has started, any of which may write to a weight and bump no version.

    None where a backend does not count.
    """
    groups = () if _c10d is None else list(_c10d._world.pg_map)
    try:
        return [(weakref.ref(group), group._get_sequence_number_for_group()) for group in groups]
    except RuntimeError:
        return None


class _Cast(torch.autograd.Function):
    """Records in autograd what a cast records, and copies nothing."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        ctx.set_materialize_grads(False)        # where nothing comes back, the weight has no gradient, not one of 0
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:    # pyright: ignore[reportIncompatibleMethodOverride]
        return None if grad is None else grad.to(ctx.dtype), None


def connected(weight: Tensor, values: Tensor) -> Tensor:
    """`values` as the cast of `weight`, differentiable where autograd records: nothing is copied.

    It has the version counter of `values`: where they are written later, every graph that has saved it is stale.
    """
    return _Cast.apply(weight, values)


def flatten_rnn_weights(*args: Any) -> None:
    """Move the weights of a recurrent layer into one buffer, in cuDNN's layout."""
    torch._cudnn_rnn_flatten_weight(*args)
