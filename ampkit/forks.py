"""Locks that a forked child gets anew: one for the rare changes of state that all threads share.

A child of `os.fork` inherits locks that the parent's threads hold, but not the threads that would release them.
"""

from __future__ import annotations

import os
import threading

import torch

__all__ = ["clear_torch_cache", "process_lock"]


class _Locks:
    shared = threading.RLock()
    forking = threading.RLock()  # held by a thread that forks; reentrant, since a callback of the fork may fork too


def process_lock() -> threading.RLock:
    """Return the lock of this process, to be used in a `with` statement."""
    return _Locks.shared


def clear_torch_cache() -> None:
    """Drop the casts that torch's own autocast holds, but not while this process forks.

    torch drops them under a mutex and without the GIL, so another thread could fork in between: in the child every
    region, of `torch.autocast` as well, would then wait for that mutex forever.
    """
    with _Locks.forking:
        torch.clear_autocast_cache()


def _renew() -> None:
    _Locks.shared = threading.RLock()
    _Locks.forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _Locks.forking.acquire(),
        after_in_parent=lambda: _Locks.forking.release(),
        after_in_child=_renew,
    )
