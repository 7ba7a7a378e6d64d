"""Locks across `os.fork`: a child inherits locks that the parent's threads hold, but not the threads."""

from __future__ import annotations

import os
import sys
import threading

import torch

_locks: list[tuple[str, str]] = []  # module and name


def renewed_lock(module: str, name: str) -> threading.RLock:
    """A reentrant lock that the module must assign to this name; a forked child assigns a new lock to it."""
    _locks.append((module, name))
    return threading.RLock()


_clearing = threading.RLock()  # the forking thread holds it during a fork; reentrant, since a handler may fork too


def clear_torch_cache() -> None:
    """Drop the casts that torch's own autocast holds, but not while this process forks.

    torch drops them under its own mutex and without the GIL, so another thread could fork meanwhile: in the child every
    region, also of `torch.autocast`, would then deadlock on that mutex.
    """
    with _clearing:
        torch.clear_autocast_cache()


def _renew() -> None:
    for module, name in _locks:
        setattr(sys.modules[module], name, threading.RLock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
    os.register_at_fork(before=_clearing.acquire, after_in_parent=_clearing.release, after_in_child=_clearing.release)
