"""Entering the regions that `Policy.for_modules` asks for, as modules run.

Global forward hooks, in place only while a region whose policy has module rules is open. They follow which module runs
inside which, name each by its path from the outermost one, and enter a region of the module's own around its forward.
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

_lock = renewed_lock(__name__, "_lock")     # reentrant, as a signal's handler may open a region with module rules too
_watches: weakref.WeakSet[Watch] = weakref.WeakSet()        # of all threads; those of a thread that ends go with it
_KEY = AROUND       # one key, where a handle has a new one each time: torch.compile guards on the keys


class Watch:
    """One region with module rules to be open, `begin` to `remove`; the hooks are there while any is.

    Paths count from `root`; from the outermost module called in the region where that is None.
    """

    def __init__(self, policy: Policy, root: Module | None) -> None:
        self.followed = thread.followed
        self.modules = thread.modules
        self.n_followed = len(self.followed)
        self.depth = len(self.modules)
        self.region = Followed(policy, root, self.depth, [] if root is None else [root])
        self.at_end = weakref.finalize(self, _thread_ended)     # with the region open
        self.at_end.atexit = False
        if root is None and self.followed and self.followed[-1].policy == policy:
            self.region = self.followed[-1]     # a region inside that has this policy from outside

    def begin(self) -> None:
        """Follow the modules that run in this thread."""
        self.followed.append(self.region)
        _watches.add(self)
        _place_hooks()

    def remove(self) -> None:
        """Stop watching. Once more, it completes a `begin` or `remove` that was cut short."""
        self.at_end.detach()
        del self.followed[self.n_followed :]
        del self.modules[self.depth :]      # of modules that were interrupted; their hooks did not run
        _watches.discard(self)
        _place_hooks()
        warn_of_unused(self.region.policy.modules, self.region.roots)


def _place_hooks() -> None:
    """Put the hooks where torch looks for them, or take them away: are there regions to watch?"""
    with _lock:
        if any(_watches):       # one that has just died may still be counted
            put_hooks(_KEY, _enter, _leave, always=True)
        else:
            take_hooks(_KEY, always=True)


def _thread_ended() -> None:
    """Take hooks away that nobody needs, unless the lock is held: the holder or the next region will.

    Nothing that dies may wait. A thread's data dies in a forked child as well, where no thread is left to let go.
    """
    if _lock.acquire(blocking=False):
        try:
            _place_hooks()
        finally:
            _lock.release()


def _forked() -> None:
    """In a child process: only the thread that forked is there."""
    _watches.intersection_update([watch for watch in _watches if watch.followed is thread.followed])
    _place_hooks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def watch_again() -> Callable[[], Watch | None]:
    """Watches for a recompute of what runs here: modules are followed there as here, by paths from the same module."""
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
            push(region, root, Watch)
        thread.modules.append(Called(module, region, sys._getframe(1)))
    except BaseException:
        if region is not None and is_entered(region):
            pop(region)
        raise


def leave_interrupted() -> None:
    """Leave the modules that were called last and ended by an exception that runs no hooks, `KeyboardInterrupt`."""
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
    while _leave_last() is not module:      # a module inside it was interrupted by what runs no hooks
        pass


def _leave_last() -> Module:
    """Note the end of the module that was called last, and leave the region that was entered for it."""
    depth = len(thread.modules) - 1
    called = thread.modules[depth]
    if called.region is not None and is_entered(called.region):     # it may be left already: by an interrupt
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
