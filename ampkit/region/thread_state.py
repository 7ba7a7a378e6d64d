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
        self.mark: tuple[tuple[str, torch.dtype], ...] = ()     # in torch's autocast state; see `policy_guard`
        self.digits: dict[str, torch.dtype] = {}    # last written of a mark, open or closed
        self.followed: list[Any] = []       # the open regions with module rules; see `running_modules`
        self.modules: list[Any] = []        # the modules that run in them
        self.forward: Any = None            # the autocast state of the function whose forward has just run


thread = ThreadState()
