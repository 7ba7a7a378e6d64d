"""Names of torch that optimizers, scaling and DTensors need, and that torch does not promise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ampkit.torch_private import private

__all__ = [
    "StorageWeakRef",
    "foreach_add_",
    "foreach_clamp_max_",
    "foreach_clamp_min_",
    "foreach_mul",
    "foreach_mul_",
    "gathered",
    "is_flat",
    "local_tensors",
    "placements_of",
    "ready_record",
    "skip_compilation",
    "update_scale_",
]

update_scale_: Any = private("_amp_update_scale_")
"""torch.amp's rule for the next scale, as one kernel: bit for bit what its `GradScaler.update` computes."""

ready_record: Any = private("amp.grad_scaler._refresh_per_optimizer_state")
"""Makes what torch.amp's scaler records about an optimizer: stage READY, no flags of inf or NaN."""

foreach_add_: Any = private("_foreach_add_")
foreach_mul: Any = private("_foreach_mul")
foreach_mul_: Any = private("_foreach_mul_")
foreach_clamp_min_: Any = private("_foreach_clamp_min_")
foreach_clamp_max_: Any = private("_foreach_clamp_max_")

skip_compilation: Any = private("_disable_dynamo")
"""Decorator: Dynamo runs the function as it is. It loses attributes that are set on an optimizer, in 2.11 with an
error."""

# The public properties run in Python: a step looks at a thousand DTensors, some of them five times.
_place: Callable[[Any], tuple[Any, Any]] = attrgetter("_spec.mesh", "_spec.placements")
_shard: Callable[[Any], Tensor] = attrgetter("_local_tensor")


def placements_of(tensors: Sequence[Tensor]) -> list[tuple[Any, Any] | None]:
    """The mesh and the placements of each DTensor; None for any other tensor."""
    try:
        return list(map(_place, tensors))
    except AttributeError:
        return [_place(tensor) if hasattr(tensor, "_spec") else None for tensor in tensors]


def local_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What `to_local` returns without autograd, for each DTensor: this rank's shard. Other tensors as they are."""
    try:
        return list(map(_shard, tensors))
    except AttributeError:
        return [_shard(tensor) if hasattr(tensor, "_local_tensor") else tensor for tensor in tensors]


def is_flat(param: Tensor) -> bool:
    """Whether `FullyShardedDataParallel` has put a parameter, or its elements, into a flat parameter that it shards."""
    return getattr(param, "_fsdp_flattened", False)


def gathered(optimizer: torch.optim.Optimizer, group: dict[str, Any], n: int) -> tuple[list[list[Any]], bool]:
    """A group's parameters that have gradients, the gradients, and the lists of state that torch's own step takes.

    Returns `n` lists in the order of `_init_group` of the optimizer's class, and its result: whether a parameter is
    complex (AdamW), or a gradient sparse (SGD). Makes the state of parameters that have none.
    """
    lists: list[list[Any]] = [[] for _ in range(n)]
    is_special: bool = optimizer._init_group(group, *lists)  # type: ignore[attr-defined]
    return lists, is_special
