"""The optimizer steps of this process: each outdates the casts of weights, in every cache.

Fused optimizers, and those that write through `.data`, move no version counter, so torch's hooks on every `step` tell
of them. Both ends of a step count: one that is interrupted never reaches its second hook.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["capturing", "seen", "watch_for"]


class Cache(Protocol):
    """What holds casts."""

    def drop_outdated(self) -> None: ...
    def renew_lock(self) -> None: ...


class _Seen:
    """What has been seen of optimizers since the first cache was made."""

    count = 0               # steps begun, and steps ended
    captured = False        # a step was captured into a CUDA graph, whose replays call no hook
    watched = False
    caches: weakref.WeakSet[Any] = weakref.WeakSet()
    lock = threading.RLock()        # a signal's handler may make a cache while one is being made


seen = _Seen()


def watch_for(cache: Cache) -> None:
    """Have `drop_outdated` of a cache called at every step, as long as the cache lives."""
    with seen.lock:
        if not seen.watched:
            seen.watched = True
            register_optimizer_step_pre_hook(_begins)
            register_optimizer_step_post_hook(_ends)
        seen.caches.add(cache)


def capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _begins(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Outdate every cast. Should two threads count as one here, the ends of their steps count too."""
    seen.count += 1


def _ends(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Outdate every cast, and free those held; a compiled step leaves that to their next use."""
    if torch.compiler.is_compiling():
        seen.count += 1
        return
    with seen.lock:
        seen.count += 1
        seen.captured = seen.captured or capturing()
        caches = list(seen.caches)
    for cache in caches:
        cache.drop_outdated()


def _after_fork() -> None:
    """In a forked child: a thread of the parent may have held any lock, and is gone from the child with it."""
    seen.lock = threading.RLock()
    for cache in list(seen.caches):
        cache.renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
