"""Activation checkpointing inside a region: the recompute sees what the forward saw.

Inside a region, `torch.utils.checkpoint.checkpoint` needs nothing of this (see `_checkpoint_frames`), nor does a
function decorated with `autocast`. Code that runs its own recomputation does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint

from ampkit.policy.op_table import TORCH
from ampkit.region import _lifted_mode, _module_regions
from ampkit.region._compiled import tracing
from ampkit.region.autocast import reentered

__all__ = ["checkpoint", "checkpoint_context_fn"]


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, with the region open here also open in the recompute.

    Enabled, dtype, policy and whether there is a cache are those of the call, whatever region backward is called in;
    the keyword arguments are torch's. Never syncs.
    """
    if not tracing():       # compiled code computes again what it has recorded, the casts too
        function = Snapshot().wrap(function)
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


def checkpoint_context_fn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint`: call it, or pass it, where the region is open.

    Returns a context for the forward, which does nothing, and one for the recompute, which restores the region.
    """
    return contextlib.nullcontext(), Snapshot().restored()


class Snapshot:
    """The autocast state of this thread at this moment, to be restored elsewhere: another thread, or a recompute."""

    def __init__(self) -> None:
        mode = _lifted_mode.current()
        self.policies = mode.policies if mode is not None else ()
        self.cached = mode is not None and mode.cache is not None
        self.native = _native()
        self.watch = _module_regions.watch_again()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which the state is as it was; weights are cast into a cache of its own."""
        now = _native()
        _set_native(self.native)
        try:
            with reentered(self.policies, cached=self.cached, watch=self.watch):
                yield
        finally:
            _set_native(now)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` run in that state."""

        @functools.wraps(function, updated=())
        def restored(*args: Any, **kwargs: Any) -> Any:
            with self.restored():
                return function(*args, **kwargs)

        return restored


def _native() -> list[tuple[str, bool, torch.dtype]]:
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in TORCH]


def _set_native(states: list[tuple[str, bool, torch.dtype]]) -> None:
    for kind, enabled, dtype in states:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
