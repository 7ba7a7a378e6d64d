"""Which modules run in this thread while regions with module rules are open, and where their paths start."""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from ampkit.policy.policy import Policy
from ampkit.region import _lifted_mode

_thread = threading.local()


class Open(NamedTuple):
    """An open region with module rules."""

    policy: Policy
    root: Module | None     # where paths start; None: at the outermost module called in the region
    depth: int              # how many modules were running when it was entered

    def start(self, running: Running, module: Module) -> Module:
        """Where the path of `module`, which is about to run, starts."""
        if self.root is not None:
            return self.root
        return running.modules[self.depth].module if len(running.modules) > self.depth else module


class Called(NamedTuple):
    """A module that runs."""

    module: Module
    region: Any         # entered for it, if any
    call: FrameType     # runs its hooks and its forward


class Running:
    """The modules that run in this thread, outermost first, and the regions with module rules."""

    def __init__(self) -> None:
        self.open: list[Open] = []
        self.modules: list[Called] = []


def running_here() -> Running:
    """Those of this thread."""
    try:
        return _thread.running
    except AttributeError:
        _thread.running = Running()
        return _thread.running


def in_force(policy: Policy) -> bool:
    """Whether the region with `policy` is what operators meet here: no island inside it, nor another policy."""
    mode = _lifted_mode.current()
    return (
        mode is not None
        and (policy.device_type, policy) in mode.policies
        and torch.is_autocast_enabled(policy.device_type)
    )


def followed(outermost: Module) -> tuple[Policy | None, Module]:
    """The policy whose module rules hold around a compiled call, None if there is none, and where its paths start.

    `outermost` is the outermost module called in the compiled function.
    """
    found = running_here()
    if not found.open:
        return None, outermost
    return found.open[-1].policy, found.open[-1].start(found, outermost)
