"""What the weight cache needs of torch: tracing state, storages, collectives; the layout of recurrent weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampkit.torch_internals.lookup import private

n_dispatch_modes: Callable[[], int] = private("_C._len_torch_dispatch_stack")
push_dispatch_mode: Callable[[Any], None] = private("_C._push_on_torch_dispatch_stack")
pop_dispatch_mode: Callable[[Any], Any] = private("_C._pop_torch_dispatch_stack")
tracing_state: Callable[[], Any] = private("_C._get_tracing_state")
_use_count: Callable[[int], int] = private("_C._storage_Use_Count")


def use_count(storage: torch.UntypedStorage) -> int:
    """References to a storage: one per tensor that uses it, and one for its Python object."""
    return _use_count(storage._cdata)


def process_groups(c10d: Any) -> Any:
    """The process groups of `torch.distributed`, each of which counts its collectives."""
    return c10d._world.pg_map


def n_collectives(group: Any) -> int:
    """How many collectives of a group this process has started; `RuntimeError` if its backend does not count."""
    return group._get_sequence_number_for_group()


def flatten_rnn_weights(*args: Any) -> None:
    """Move the weights of a recurrent layer into one buffer, in cuDNN's layout."""
    torch._cudnn_rnn_flatten_weight(*args)
