"""Entering the regions that `Policy.for_modules` asks for, as modules run.

Global forward hooks, in place only while a region whose policy has module rules is open. They follow which module runs
inside which, name each by its path from the outermost one, and enter a region of the module's own around its forward.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules import module as hooked

from ampkit.policy._module_rules import path_of
from ampkit.policy.policy import Policy
from ampkit.region._compiled import runs_as_it_is, tracing
from ampkit.region._compiled_modules import AROUND, after, before
from ampkit.region._running_modules import Called, Open, Running, in_force, running_here
from ampkit.region._unwound import is_running

_lock = threading.Lock()
_watches: set[Watch] = set()        # of all threads
_KEY = AROUND       # one key, where a handle has a new one each time: torch.compile guards on the keys


class Watch:
    """One region with module rules to be open, `begin` to `remove`; the hooks are there while any is.

    Paths count from `root`; from the outermost module called in the region where that is None.
    """

    def __init__(self, policy: Policy, root: Module | None) -> None:
        self.running = running_here()
        self.n_open = len(self.running.open)
        self.depth = len(self.running.modules)
        self.region = Open(policy, root, self.depth)
        if root is None and self.running.open and self.running.open[-1].policy == policy:
            self.region = self.running.open[-1]     # a region inside that has this policy from outside

    def begin(self) -> None:
        """Follow the modules that run in this thread."""
        self.running.open.append(self.region)
        _watches.add(self)
        _place_hooks()

    def remove(self) -> None:
        """Stop watching. Once more, it completes a `begin` or `remove` that was cut short."""
        del self.running.open[self.n_open :]
        del self.running.modules[self.depth :]      # of modules that were interrupted; their hooks did not run
        _watches.discard(self)
        _place_hooks()


def _place_hooks() -> None:
    """Put the hooks where torch looks for them, or take them away: are there regions to watch?"""
    with _lock:
        if not _watches:        # somebody may have cleared torch's tables meanwhile
            hooked._global_forward_pre_hooks.pop(_KEY, None)
            hooked._global_forward_hooks.pop(_KEY, None)
            hooked._global_forward_hooks_always_called.pop(_KEY, None)
        elif _KEY not in hooked._global_forward_hooks_always_called:
            hooked._global_forward_pre_hooks[_KEY] = _enter
            hooked._global_forward_hooks[_KEY] = _leave
            hooked._global_forward_hooks_always_called[_KEY] = True


def _forked() -> None:
    """In a child process: only the thread that forked is there, and the lock may be held by another."""
    global _lock
    _lock = threading.Lock()
    running = running_here()
    _watches.intersection_update([watch for watch in _watches if watch.running is running])
    _place_hooks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def watch_again() -> Callable[[], Watch | None]:
    """Watches for a recompute of what runs here: modules are followed there as here, by paths from the same module."""
    running = running_here()
    if not running.open:
        return _no_watch
    found = running.open[-1]
    called = running.modules[found.depth :]
    root = called[0].module if found.root is None and called else found.root
    return functools.partial(Watch, found.policy, root)


def _no_watch() -> None:
    return None


@runs_as_it_is
def _enter(module: Module, args: Any) -> None:
    if tracing():
        before(module, args)
        return
    running = running_here()
    if not running.open:
        return
    leave_interrupted()
    policy = running.open[-1].policy
    root = running.open[-1].start(running, module)
    value = policy.modules.find(module, path_of(root, module)) if in_force(policy) else None
    region = None if value is None else _region(policy, value)
    try:
        if region is not None:
            region.enter(root)
        running.modules.append(Called(module, region, sys._getframe(1)))
    except BaseException:
        if region is not None and region.is_open():
            region.leave()
        raise


def leave_interrupted() -> None:
    """Leave the modules that were called last and ended by an exception that runs no hooks, `KeyboardInterrupt`."""
    if not _watches:
        return
    running = running_here()
    while running.open and len(running.modules) > running.open[-1].depth and not is_running(running.modules[-1].call):
        _leave_last(running)


@runs_as_it_is
def _leave(module: Module, args: Any, output: Any) -> None:
    if tracing():
        after(module, args, output)
        return
    running = running_here()
    if module not in [called.module for called in running.modules]:
        return      # it was entered before the region was
    while _leave_last(running) is not module:       # a module inside it was interrupted by what runs no hooks
        pass


def _leave_last(running: Running) -> Module:
    """Note the end of the module that was called last, and leave the region that was entered for it."""
    depth = len(running.modules) - 1
    called = running.modules[depth]
    if called.region is not None and called.region.is_open():       # it may be left already: by an interrupt
        called.region.leave()
    del running.modules[depth:]
    return called.module


def _region(policy: Policy, value: Any) -> Any:
    from ampkit.region.autocast import autocast, float32_region

    if isinstance(value, Policy):
        region = autocast(policy.device_type, policy=value)
    elif value is torch.float32:
        region = float32_region(policy.device_type, policy=policy)
    else:
        region = autocast(policy.device_type, value, policy=policy)
    region.of_module = True
    return region
