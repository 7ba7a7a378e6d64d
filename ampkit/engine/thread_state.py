"""The state of regions in each thread, in one place."""

from __future__ import annotations

import threading
from typing import Any

import torch


class OpenRegions(list[Any]):
    """The entries of a thread's open regions, outermost first (`region/stack`), and what entering and leaving them use.

    To look up an attribute of a thread-local object takes as long as ten of this one's.
    """

    __slots__ = ("cache", "digits", "mark")

    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = None  # for regions that were given no cache; empty while no region is open
        self.mark: tuple[tuple[str, torch.dtype], ...] = ()  # the policy mark that is set: `policy_mark`
        self.digits: dict[str, torch.dtype] = {}  # of the mark that was set last, which torch keeps


class ThreadState(threading.local):
    """The regions of this thread, and the state that belongs to them."""

    def __init__(self) -> None:
        self.regions = OpenRegions()
        self.module_lookup: Any = None  # of the innermost region with module rules: `region/module_hooks`
        self.modules: list[Any] = []  # the bound modules that run, each with the number of regions around it
        self.reused: list[Any] = []  # casts that the current call took from a cache, while calls are recorded
        self.announced: list[Any] = []  # policies of the regions that a trace enters next, and whether of a module


thread = ThreadState()
