"""Which modules run in this thread while regions with module rules are open, and where their paths start."""

from __future__ import annotations

from types import FrameType
from typing import NamedTuple

import torch
from torch.nn import Module

from ampkit.policy.policy import Policy
from ampkit.region.spec import RegionSpec
from ampkit.region.thread_state import thread
from ampkit.torch_internals.dispatcher import current


class Followed(NamedTuple):
    """An open region with module rules."""

    policy: Policy
    root: Module | None     # where paths start; None: at the outermost module called in the region
    depth: int              # how many modules were running when it was entered
    roots: list[Module]     # the outermost modules called in it

    def start(self, module: Module) -> Module:
        """Where the path of `module`, which is about to run, starts."""
        if self.root is not None:
            return self.root
        return thread.modules[self.depth].module if len(thread.modules) > self.depth else module


class Called(NamedTuple):
    """A running module."""

    module: Module
    region: RegionSpec | None   # entered for it, if any
    call: FrameType             # the frame that runs its hooks and its forward


def in_force(policy: Policy) -> bool:
    """Whether operators here follow `policy`: no disabled region or one with another policy is inside its own."""
    mode = current()
    return (
        mode is not None
        and (policy.device_type, policy) in mode.policies
        and torch.is_autocast_enabled(policy.device_type)
    )


def followed(outermost: Module) -> tuple[Policy | None, Module]:
    """The policy whose module rules hold around a compiled call, None if there is none, and where its paths start.

    `outermost` is the outermost module called in the compiled function.
    """
    if not thread.followed:
        return None, outermost
    return thread.followed[-1].policy, thread.followed[-1].start(outermost)
