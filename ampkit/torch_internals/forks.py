"""Locks across `os.fork`: a child inherits locks that the parent's threads hold, but not the threads."""

from __future__ import annotations

import os
import sys
import threading
import time

import torch

_named: list[tuple[str, str]] = []
_clearing: list[None] = []      # one for each thread that is clearing torch's cache
_forking: int | None = None     # the thread that forks
_forked = threading.Event()
_forked.set()


def renewed_lock(module: str, name: str) -> threading.RLock:
    """A reentrant lock for a module to keep under this name; a forked child gets a new one there."""
    _named.append((module, name))
    return threading.RLock()


def clear_torch_cache() -> None:
    """Drop the casts that torch's own autocast holds, but not while this process forks.

    torch clears it under a mutex of its own and without the GIL, so another thread could fork meanwhile: in the child
    every region, also of `torch.autocast`, would then deadlock on that mutex.
    """
    while True:
        try:
            _clearing.append(None)
            if _forking is None or _forking == threading.get_ident():
                torch.clear_autocast_cache()
                return
        finally:
            del _clearing[-1:]
        _forked.wait(1.0)


def _before() -> None:
    """Keep threads from clearing, and wait for those that are clearing.

    At most 0.1 s: if a signal handler forks, this thread may be one of them.
    """
    global _forking
    _forked.clear()
    _forking = threading.get_ident()
    end = time.monotonic() + 0.1
    while _clearing and time.monotonic() < end:
        time.sleep(0.0001)


def _after() -> None:
    global _forking
    _forking = None
    _forked.set()


def _after_in_child() -> None:
    global _forked
    _forked = threading.Event()
    _clearing.clear()
    for module, name in _named:
        setattr(sys.modules[module], name, threading.RLock())
    _after()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
