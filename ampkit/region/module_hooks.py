"""Entering the regions that `Policy.for_modules` asks for, as modules run.

Global forward hooks, registered only while a region whose policy has module rules is open. They track which module runs
inside which, find each one's path from the outermost, and enter a region around its forward if a rule matches.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from ampkit.policy.module_paths import path_of
from ampkit.policy.policy import Policy
from ampkit.region.arguments import checked_spec, float32_spec
from ampkit.region.graph_modules import AROUND, after, before
from ampkit.region.running_modules import Called, Followed, in_force
from ampkit.region.spec import RegionSpec
from ampkit.region.stack import is_entered, pop, push
from ampkit.region.thread_state import thread
from ampkit.region.unused_patterns import warn_of_unused
from ampkit.torch_internals.dynamo import dynamo_skip, frame_on_stack, tracing
from ampkit.torch_internals.forks import renewed_lock
from ampkit.torch_internals.modules import put_hooks, take_hooks

_lock = renewed_lock(__name__, "_lock")     # reentrant: a signal handler may open such a region too
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()        # of all threads; freed with their thread
_KEY = AROUND       # constant, unlike a RemovableHandle's id: torch.compile guards on hook keys


class Watch:
    """An open region with module rules, from `begin` to `remove`; the hooks are registered while there is any.

    Paths count from `root`; if that is None, from the outermost module called in the region.
    """

    def __init__(self, policy: Policy, root: Module | None = None) -> None:
        self.followed = thread.followed
        self.modules = thread.modules
        self.n_followed = len(self.followed)
        self.depth = len(self.modules)
        self.region = Followed(policy, root, self.depth, [] if root is None else [root])
        self.at_end = weakref.finalize(self, _thread_ended)     # if it ends with the region open
        self.at_end.atexit = False
        if root is None and self.followed and self.followed[-1].policy == policy:
            self.region = self.followed[-1]     # a nested region that inherits the policy

    def begin(self) -> None:
        """Start to track the modules that run in this thread."""
        self.followed.append(self.region)
        _watches.add(self)
        _place_hooks()

    def remove(self) -> None:
        """Stop; also completes a `begin` or `remove` that was cut short."""
        self.at_end.detach()
        del self.followed[self.n_followed :]
        del self.modules[self.depth :]      # of modules that were interrupted; their hooks did not run
        _watches.discard(self)
        _place_hooks()
        warn_of_unused(self.region.policy.modules, self.region.roots)


def _place_hooks() -> None:
    """Register the global hooks if there is a region to watch, else remove them."""
    with _lock:
        if any(_watches):       # `len` may still count one that was just freed
            put_hooks(_KEY, _enter, _leave, always=True)
        else:
            take_hooks(_KEY, always=True)


def _thread_ended() -> None:
    """Remove hooks that no region needs, unless the lock is held: then its holder or the next region does.

    A finalizer must not block. This one also runs in a forked child, where no thread is left to release the lock.
    """
    if _lock.acquire(blocking=False):
        try:
            _place_hooks()
        finally:
            _lock.release()


def _forked() -> None:
    """In a forked child: only the thread that forked exists there."""
    _watches.intersection_update([watch for watch in _watches if watch.followed is thread.followed])
    _place_hooks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def watch_again() -> Callable[[], Watch | None]:
    """Makes the `Watch` for a recompute of what runs here, with paths from the same root."""
    if not thread.followed:
        return _no_watch
    found = thread.followed[-1]
    called = thread.modules[found.depth :]
    root = called[0].module if found.root is None and called else found.root
    return functools.partial(Watch, found.policy, root)


def _no_watch() -> None:
    return None


@dynamo_skip
def _enter(module: Module, args: Any) -> None:
    if tracing():
        before(module, args)
        return
    if not thread.followed:
        return
    leave_interrupted()
    watched = thread.followed[-1]
    policy = watched.policy
    root = watched.start(module)
    if root is module:
        watched.roots.append(root)
    value = policy.modules.find(module, path_of(root, module)) if in_force(policy) else None
    region = None if value is None else _region(policy, value)
    try:
        if region is not None:
            push(region, functools.partial(Watch, root=root))
        thread.modules.append(Called(module, region, sys._getframe(1)))
    except BaseException:
        if region is not None and is_entered(region):
            pop(region)
        raise


def leave_interrupted() -> None:
    """Leave the innermost modules whose call ended without running hooks, as with `KeyboardInterrupt`."""
    followed = thread.followed
    if not followed:
        return
    modules = thread.modules
    while followed and len(modules) > followed[-1].depth and not frame_on_stack(modules[-1].call):
        _leave_last()


@dynamo_skip
def _leave(module: Module, args: Any, output: Any) -> None:
    if tracing():
        after(module, args, output)
        return
    if module not in [called.module for called in thread.modules]:
        return      # it was entered before the region was
    while _leave_last() is not module:      # a module inside it ended without running hooks
        pass


def _leave_last() -> Module:
    """Drop the innermost module, and leave the region that was entered for it."""
    depth = len(thread.modules) - 1
    called = thread.modules[depth]
    if called.region is not None and is_entered(called.region):     # an interrupt may have left it
        pop(called.region)
    del thread.modules[depth:]
    return called.module


def _region(policy: Policy, value: Any) -> RegionSpec:
    """The region that a rule asks for: another policy, or a dtype under the same one."""
    if isinstance(value, Policy):
        return checked_spec(policy.device_type, policy=value, of_module=True)
    if value is torch.float32:
        return float32_spec(policy.device_type, policy, of_module=True)
    return checked_spec(policy.device_type, value, policy=policy, of_module=True)
