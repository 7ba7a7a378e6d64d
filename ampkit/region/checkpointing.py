"""Activation checkpointing inside a region: the recompute sees what the forward saw.

Inside a region, `torch.utils.checkpoint.checkpoint` does not need this (see `torch_internals.checkpoint`), nor does a
function decorated with `autocast`. Code that runs its own recomputation does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch.utils.checkpoint

from ampkit.region.snapshot import Snapshot
from ampkit.torch_internals.dynamo import tracing

__all__ = ["checkpoint", "checkpoint_context_fn"]

R = TypeVar("R")


def checkpoint(function: Callable[..., R], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> R:
    """`torch.utils.checkpoint.checkpoint`, with the region open here also open in the recompute.

    Enabled, dtype, policy and whether there is a cache are those of the call, whatever region backward is called in;
    the keyword arguments are torch's. Never syncs.
    """
    if not tracing():       # compiled code recomputes the traced graph, casts included
        function = Snapshot().wrap(function)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


def checkpoint_context_fn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint`: call it, or pass it, where the region is open.

    Returns a context for the forward, which does nothing, and one for the recompute, which restores the region.
    """
    return contextlib.nullcontext(), Snapshot().restored()
