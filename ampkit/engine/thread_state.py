"""What regions know of each thread, in one place."""

from __future__ import annotations

import threading
from typing import Any

import torch


class ThreadState(threading.local):
    """The regions of this thread, and what goes with them."""

    def __init__(self) -> None:
        self.regions: list[Any] = []        # the entries of the open ones, outermost first; see `stack`
        self.cache: Any = None              # of regions that were given none; empty while none is open
        self.mark: tuple[tuple[str, torch.dtype], ...] = ()     # in torch's autocast state; see `policy_mark`
        self.module_lookup: Any = None      # of the innermost region with module rules; see `module_hooks`
        self.modules: list[Any] = []        # the bound modules that run, each with the number of regions around it
        self.reused: list[Any] = []         # while a record is taken: the casts that the current call has from a cache
        self.announced: list[Any] = []      # policies of the regions that a trace enters next, and whether of a module


thread = ThreadState()
