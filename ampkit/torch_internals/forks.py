"""Locks across `os.fork`: a child inherits locks that the parent's threads hold, but not the threads."""

from __future__ import annotations

import os
import sys
import threading

import torch

_named: list[tuple[str, str]] = []


def renewed_lock(module: str, name: str) -> threading.RLock:
    """A reentrant lock for a module to keep under this name; a forked child gets a new one there."""
    _named.append((module, name))
    return threading.RLock()


_clearing = threading.RLock()       # held by the thread that forks, and released on both sides; a handler may fork too


def clear_torch_cache() -> None:
    """Drop the casts that torch's own autocast holds, but not while this process forks.

    torch clears it under a mutex of its own and without the GIL, so another thread could fork meanwhile: in the child
    every region, also of `torch.autocast`, would then deadlock on that mutex.
    """
    with _clearing:
        torch.clear_autocast_cache()


def _renew() -> None:
    for module, name in _named:
        setattr(sys.modules[module], name, threading.RLock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
    os.register_at_fork(
        before=_clearing.acquire, after_in_parent=_clearing.release, after_in_child=_clearing.release
    )
