"""Entering the regions that `Policy.for_modules` asks for, as modules run.

Global forward hooks, in place only while a region whose policy has module rules is open. They follow which module runs
inside which, name each by its path from the outermost one, and enter a region of the module's own around its forward.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules import module as hooked

from ampkit.policy._module_rules import path_of
from ampkit.policy.policy import Policy
from ampkit.region import _lifted_mode
from ampkit.region._compiled import object_at, runs_as_it_is, tracing
from ampkit.region._compiled_modules import Watch, following, rule_name

_lock = threading.Lock()
_watchers = 0
_KEY: Any = "ampkit"     # one key, where a handle has a new one each time: torch.compile guards on the keys
_thread = threading.local()


class _Watch:
    """One open region with module rules; the hooks go when the last one is left."""

    def __init__(self, policy: Policy, root: Module | None) -> None:
        global _watchers
        self.running = _running()
        if root is None and self.running.open and self.running.open[-1][0] == policy:
            root = self.running.open[-1][1]     # a region inside that has this policy from outside
        self.running.open.append((policy, root))
        self.depth = len(self.running.modules)
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


class _Running:
    """The modules that run in this thread, outermost first, each with the region entered for it, if any."""

    def __init__(self) -> None:
        self.open: list[tuple[Policy, Module | None]] = []      # policies with module rules, and where paths start
        self.modules: list[tuple[Module, Any]] = []


def watch(policy: Policy, root: Module | None) -> _Watch:
    """Follow modules for a region with this policy; `remove()` the result on leaving it.

    Paths count from `root`; from the outermost module called in the region where that is None.
    """
    return _Watch(policy, root)


def _running() -> _Running:
    try:
        return _thread.running
    except AttributeError:
        _thread.running = _Running()
        return _thread.running


@runs_as_it_is
def _enter(module: Module, args: Any) -> None:
    if tracing():
        _traced.before(module, args)
        return
    running = _running()
    if not running.open:
        return
    policy, root = running.open[-1]
    if root is None:
        root = running.modules[0][0] if running.modules else module
    value = policy.modules.find(module, path_of(root, module)) if _in_force(policy) else None
    region = None if value is None else _region(policy, value).enter(root)
    running.modules.append((module, region))


def _in_force(policy: Policy) -> bool:
    """Whether the region with `policy` is what operators meet here: no island inside it, nor another policy."""
    mode = _lifted_mode.current()
    return (
        mode is not None
        and (policy.device_type, policy) in mode.policies
        and torch.is_autocast_enabled(policy.device_type)
    )


@runs_as_it_is
def _leave(module: Module, args: Any, output: Any) -> None:
    if tracing():
        _traced.after(module, args, output)
        return
    running = _running()
    if not any(entered is module for entered, _ in running.modules):
        return      # it was entered before the region was
    while True:     # more than once where a module inside it was interrupted, which runs no hooks
        entered, region = running.modules.pop()
        if region is not None:
            region.__exit__(None, None, None)
        if entered is module:
            return


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


class _Around(Watch):
    """Modules that run in a compiled function, while the region with the rules is open around its call."""

    def rule(self, module: Module) -> str | None:
        return None if following() else _rule_around(id(self.outermost), id(module))


def _rule_around(outermost_id: int, module_id: int) -> str | None:
    running = _running()
    if not running.open:
        return None
    policy, root = running.open[-1]
    if root is None:
        root = running.modules[0][0] if running.modules else object_at(outermost_id)
    return rule_name(policy, root, object_at(module_id))


_rule_around._dynamo_marked_constant = True  # type: ignore[attr-defined]
_traced = _Around(None, None)
