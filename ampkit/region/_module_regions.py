"""Entering the regions that `Policy.for_modules` asks for, as modules run.

Global forward hooks, in place only while a region whose policy has module rules is open. They follow which module runs
inside which, name each by its path from the outermost one, and enter a region of the module's own around its forward.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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
_watchers = 0
_KEY = AROUND       # one key, where a handle has a new one each time: torch.compile guards on the keys


class _Watch:
    """One open region with module rules; the hooks go when the last one is left."""

    def __init__(self, policy: Policy, root: Module | None) -> None:
        global _watchers
        self.running = running_here()
        self.depth = len(self.running.modules)
        found = Open(policy, root, self.depth)
        if root is None and self.running.open and self.running.open[-1].policy == policy:
            found = self.running.open[-1]       # a region inside that has this policy from outside
        self.running.open.append(found)
        with _lock:
            _watchers += 1
            if _watchers == 1:
                hooked._global_forward_pre_hooks[_KEY] = _enter
                hooked._global_forward_hooks[_KEY] = _leave
                hooked._global_forward_hooks_always_called[_KEY] = True

    def remove(self) -> None:
        """Stop watching."""
        global _watchers
        self.running.open.pop()
        del self.running.modules[self.depth :]      # of modules that were interrupted; their hooks did not run
        with _lock:
            _watchers -= 1
            if _watchers == 0:      # somebody may have cleared torch's tables meanwhile
                hooked._global_forward_pre_hooks.pop(_KEY, None)
                hooked._global_forward_hooks.pop(_KEY, None)
                hooked._global_forward_hooks_always_called.pop(_KEY, None)


def watch(policy: Policy, root: Module | None) -> _Watch:
    """Follow modules for a region with this policy; `remove()` the result on leaving it.

    Paths count from `root`; from the outermost module called in the region where that is None.
    """
    return _Watch(policy, root)


def watch_again() -> Callable[[], AbstractContextManager[None]]:
    """Contexts for a recompute of what runs here: modules are followed there as here, by paths from the same module."""
    running = running_here()
    if not running.open:
        return contextlib.nullcontext
    found = running.open[-1]
    called = running.modules[found.depth :]
    root = called[0].module if found.root is None and called else found.root
    return functools.partial(_watched, found.policy, root)


@contextlib.contextmanager
def _watched(policy: Policy, root: Module | None) -> Iterator[None]:
    watching = watch(policy, root)
    try:
        yield
    finally:
        leave_interrupted()
        watching.remove()


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
    region = None if value is None else _region(policy, value).enter(root)
    running.modules.append(Called(module, region, sys._getframe(1)))


def leave_interrupted() -> None:
    """Leave the modules that were called last and ended by an exception that runs no hooks, `KeyboardInterrupt`."""
    if _watchers == 0:
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
    if not any(called.module is module for called in running.modules):
        return      # it was entered before the region was
    while _leave_last(running) is not module:       # a module inside it was interrupted by what runs no hooks
        pass


def _leave_last(running: Running) -> Module:
    """Note the end of the module that was called last, and leave the region that was entered for it."""
    called = running.modules.pop()
    if called.region is not None:
        called.region.__exit__(None, None, None)
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
