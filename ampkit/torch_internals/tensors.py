"""Tensors: shards of DTensors; for weight caches ownership of storages, counts of collectives, casts without a copy."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ampkit.torch_internals.private_names import private

n_dispatch_modes: Callable[[], int] = private("_C._len_torch_dispatch_stack")
tracing_state: Callable[[], Any] = private("_C._get_tracing_state")
set_grad_enabled: Callable[[bool], None] = private("_C._set_grad_enabled")  # context managers run in Python
_use_count: Callable[[int], int] = private("_C._storage_Use_Count")
_c10d: Any = dist.distributed_c10d if dist.is_available() else None

# The public properties run in Python: a step looks at a thousand DTensors, some of them five times.
_place: Callable[[Any], tuple[Any, Any]] = attrgetter("_spec.mesh", "_spec.placements")
_shard: Callable[[Any], Tensor] = attrgetter("_local_tensor")


def dtensor_class() -> Any:
    """The class of DTensors; None before torch has imported it, when there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    dtensor = dtensor_class()
    return dtensor is not None and isinstance(tensor, dtensor)


def placements_of(tensors: Sequence[Tensor]) -> list[tuple[Any, Any] | None]:
    """The mesh and the placements of each DTensor; None for any other tensor."""
    dtensor = dtensor_class()
    if dtensor is None:
        return [None] * len(tensors)
    return [_place(tensor) if isinstance(tensor, dtensor) else None for tensor in tensors]


def local_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's shard of each DTensor, as `to_local` returns it without autograd. Other tensors unchanged."""
    dtensor = dtensor_class()
    if dtensor is None:
        return list(tensors)
    return [_shard(tensor) if isinstance(tensor, dtensor) else tensor for tensor in tensors]


def owns_its_memory(weight: Tensor) -> bool:
    """Whether nothing else can write to a weight's memory: no alias, no array it was made from, no other process."""
    if type(weight) is not Parameter and type(weight) is not Tensor:
        return False  # tensors inside the subclass may hold its memory, and others may use them
    storage = weight.untyped_storage()
    return (
        _use_count(storage._cdata) == _use_count_alone()
        and storage.resizable()  # the memory of arrays, files and DLPack is not
        and not (weight.is_cpu and storage.is_shared())
    )


@functools.cache
def _use_count_alone() -> int:
    """The use count of a storage with one tensor: one for the tensor, and one for the storage's Python object."""
    tensor = torch.empty(0, device="cpu")
    return _use_count(tensor.untyped_storage()._cdata)


def n_collectives() -> list[Any] | None:
    """How many collectives each process group has started; None if a backend does not count.

    Any of them may write to a weight without incrementing its version counter.
    """
    groups = () if _c10d is None else _c10d._world.pg_map
    if not groups:
        return []
    try:
        return [(weakref.ref(group), group._get_sequence_number_for_group()) for group in list(groups)]
    except RuntimeError:
        return None


class _Cast(torch.autograd.Function):
    """The autograd history of a cast, without a copy."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        ctx.set_materialize_grads(False)  # without an incoming gradient the weight has none either, not zeros
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None if grad is None else grad.to(ctx.dtype), None


def connected(weight: Tensor, values: Tensor) -> Tensor:
    """`values` as the cast of `weight`, without a copy, differentiable where autograd records.

    It shares the version counter of `values`: a later write to them makes every graph that has saved it stale.
    """
    return _Cast.apply(weight, values)


def flatten_rnn_weights(*args: Any) -> None:
    """Move the weights of a recurrent layer into one buffer, in cuDNN's layout."""
    torch._cudnn_rnn_flatten_weight(*args)
