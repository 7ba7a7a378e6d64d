"""The open regions of a thread: a stack of entries, each of which records the state to restore.

An entry writes torch's own autocast state (enabled, dtype, cache flag) as `torch.autocast` does, and puts a mode above
it. What it changes is recorded first and restored as values. Restoring is therefore idempotent, and repeating it
completes an enter or a leave that an interrupt cut short.
"""

from __future__ import annotations

import asyncio
import sys
from types import FrameType
from typing import Any, Protocol

import torch

from ampkit.policy.policy import Policy, register_changes
from ampkit.region import recording
from ampkit.region.arguments import NAMED_POLICIES
from ampkit.region.mode import AutocastMode, DispatchGuard
from ampkit.region.spec import RegionSpec
from ampkit.region.thread_state import thread
from ampkit.region.weight_cache import RegionCache, WeightCache
from ampkit.torch_internals import self_check
from ampkit.torch_internals.checkpoint import note_region, top_hooks
from ampkit.torch_internals.dispatcher import current
from ampkit.torch_internals.dynamo import frame_on_stack, tracer
from ampkit.torch_internals.forks import clear_torch_cache
from ampkit.torch_internals.tensors import is_capturing


class Watch(Protocol):
    """Looks up the modules that run while a region with module rules is open."""

    def __init__(self, policy: Policy) -> None: ...
    def begin(self) -> None: ...
    def remove(self) -> None: ...


class Entry:
    """An open region: what entering it changes, and the state to restore.

    The state is recorded before anything changes, so `leave` also undoes an `enter` that an exception cut short, and
    completes a `leave` that was cut short.
    """

    __slots__ = (
        "cache", "cache_flag", "complete", "dtype", "enabled", "entered_cache", "exit_pending", "frame", "guard",
        "leaving", "spec", "watch",
    )

    def __init__(
        self,
        spec: RegionSpec,
        stack: list[Entry],
        watch: type[Watch] | None,
        frame: FrameType | None,
    ) -> None:
        device_type = spec.device_type
        outer = current()
        if top_hooks(True) is not None:
            note_region(outer)
        self.spec = spec
        self.frame = frame              # of the compiled graph that enters it; an exception may end that call
        self.exit_pending = False       # to be left as soon as nothing is open inside it
        self.complete = False           # `enter` has ended, and `leave` has not begun
        self.leaving: FrameType | None = None   # of `leave`, while it runs
        self.enabled = torch.is_autocast_enabled(device_type)
        self.dtype = torch.get_autocast_dtype(device_type)
        self.cache_flag = torch.is_autocast_cache_enabled()
        self.cache = cache = _cache_for(spec, stack)
        first = cache is spec.cache and all(outside.cache is not cache for outside in stack)
        self.entered_cache = spec.cache if first else None
        mode = _mode(outer, device_type, spec.policy, cache if spec.cache_enabled else None)
        self.watch = None
        if mode.has_module_rules and watch is not None and spec.enabled:
            policy = dict(mode.policies)[device_type]
            if policy.modules:
                self.watch = watch(policy)
        active = spec.enabled or any(
            torch.is_autocast_enabled(other) for other, _ in mode.policies if other != device_type
        )
        in_float32 = spec.enabled and spec.dtype is torch.float32
        self.guard = DispatchGuard(mode, outer, active=active, everything=in_float32)

    def enter(self) -> None:
        """Make this the innermost region of the thread."""
        spec = self.spec
        if self.entered_cache is not None:
            self.entered_cache.enter()
        self.guard.enter()
        torch.set_autocast_enabled(spec.device_type, spec.enabled)
        if spec.dtype is not self.dtype:
            torch.set_autocast_dtype(spec.device_type, spec.dtype)
        if spec.cache_enabled is not self.cache_flag:
            torch.set_autocast_cache_enabled(spec.cache_enabled)
        thread.levels[self]
        if self.watch is not None:
            self.watch.begin()
        self.complete = True

    def leave(self, *, last: bool) -> None:
        """Restore the state found on entry."""
        self.leaving = sys._getframe()
        again = not self.complete
        self.exit_pending = True        # if this is cut short, the next region that is entered or left completes it
        self.complete = False
        if self.watch is not None:
            self.watch.remove()
        if again:
            self._uncount_again()
        elif torch.autocast_decrement_nesting() == 0:
            clear_torch_cache()
        torch.set_autocast_enabled(self.spec.device_type, self.enabled)
        torch.set_autocast_dtype(self.spec.device_type, self.dtype)
        torch.set_autocast_cache_enabled(self.cache_flag)
        self.guard.leave(again=again)
        if self.entered_cache is not None:
            self.entered_cache.leave()
        elif last and self.spec.cache is None:
            self.cache.clear()
        thread.levels.pop(self, None)
        self.leaving = None

    def is_overdue(self) -> bool:
        """Whether to leave it now: its exit is pending, and no `leave` of it runs further down this thread's stack.

        One does if a signal handler, or a finalizer that leaving triggers, opens a region of its own.
        """
        return self.exit_pending and (self.leaving is None or not frame_on_stack(self.leaving))

    def _uncount_again(self) -> None:
        """Take the region out of torch's nesting count; an interrupt may have come before or after it was counted."""
        level = thread.levels.get(self)
        if level is None:
            return
        now = torch.autocast_decrement_nesting()
        while now >= level:
            now = torch.autocast_decrement_nesting()
        while now < level - 1:
            now = torch.autocast_increment_nesting()
        if now == 0:
            clear_torch_cache()


_uncached_modes: dict[Any, AutocastMode] = {}


def _cache_for(spec: RegionSpec, stack: list[Entry]) -> WeightCache | RegionCache:
    """The cache of an entry: the one it was given, else the enclosing region's, else the thread's."""
    capture = is_capturing()
    if spec.cache is not None and not capture:
        return spec.cache
    if stack and stack[-1].cache.in_capture == capture:
        return stack[-1].cache
    if capture:
        fresh = RegionCache()
        fresh.in_capture = True
        return fresh
    cache = thread.cache
    if cache is None:
        cache = thread.cache = RegionCache()
    return cache


def _mode(
    outer: AutocastMode | None, device_type: str, policy: Policy | None, cache: WeightCache | RegionCache | None
) -> AutocastMode:
    """The mode of a region: its policy for its device type, the enclosing mode's for the others."""
    if outer is None:
        policy = policy or NAMED_POLICIES["default", device_type]
        latest = None if cache is None else cache.latest
        if latest is not None and latest.policy is policy and _still_serves(latest):
            return latest
        policies = ((device_type, policy),)
    else:
        every = dict(outer.policies)
        every[device_type] = policy or every.get(device_type) or NAMED_POLICIES["default", device_type]
        policies = tuple(every.items())
    return _mode_for(policies, cache)


def _mode_for(policies: tuple[tuple[str, Policy], ...], cache: WeightCache | RegionCache | None) -> AutocastMode:
    """The mode for these policies and this cache; made once, and again after `register_op` has changed the rules."""
    modes = _uncached_modes if cache is None else cache.modes
    mode = modes.get(policies)
    if mode is None or not _still_serves(mode):
        self_check.once()
        if len(modes) >= 16:
            modes.clear()
        mode = modes[policies] = recording.new_mode(policies, cache)
    if cache is not None:
        cache.latest = mode
    return mode


def _still_serves(mode: AutocastMode) -> bool:
    return mode.changes == register_changes() and mode.record is recording.current()


def push(
    spec: RegionSpec, watch: type[Watch] | None = None, frame: FrameType | None = None
) -> None:
    """Enter a region; `frame` is that of the compiled graph that enters it, if one does.

    If the policy has module rules, a `watch` looks up the modules that run.
    """
    stack = thread.regions
    if stack:
        leave_ended(stack)
    entry = Entry(spec, stack, watch, frame)
    depth = len(stack)
    try:
        stack.append(entry)
        entry.enter()
    except BaseException:
        leave_down_to(stack, depth)
        raise


def leave_down_to(stack: list[Entry], depth: int) -> None:
    """Leave the innermost regions of this thread until `depth` are open, then those whose exit is pending."""
    try:
        _leave_all(stack, depth)
    except BaseException:       # an interrupt: complete what it cut short
        _leave_all(stack, depth)
        raise


def _leave_all(stack: list[Entry], depth: int) -> None:
    while len(stack) > depth or (stack and stack[-1].is_overdue()):
        entry = stack[-1]
        entry.leave(last=len(stack) == 1)
        if stack and stack[-1] is entry:
            stack.pop()


def leave_ended(stack: list[Entry]) -> None:
    """Leave the innermost regions whose exit is pending, or whose compiled graph an exception has ended."""
    while stack:
        frame = stack[-1].frame
        if not stack[-1].is_overdue() and (frame is None or frame_on_stack(frame) or tracer() is not None):
            return      # a trace must leave the thread's state as it was
        leave_down_to(stack, len(stack) - 1)


def pop(spec: RegionSpec) -> None:
    """Leave a region, which must be the innermost open one of this thread, apart from modules' regions inside it."""
    stack = thread.regions
    leave_down_to(stack, depth_without(spec, stack))


def is_entered(spec: RegionSpec) -> bool:
    """Whether a region was entered in this thread, and not left."""
    # A list: Python swallows an interrupt that is raised in a generator while it is closed.
    return id(spec) in [id(entry.spec) for entry in thread.regions]


def depth_without(spec: RegionSpec, stack: list[Entry], exc_type: type[BaseException] | None = None) -> int:
    """How many regions stay open when `spec` is left, together with regions inside it whose own exit did not run.

    Those are regions of modules, whose forward was interrupted; and any region, if an exception ends `spec`: it may
    come from a signal handler that has cut their exit short. `GeneratorExit` and `CancelledError` come from none: they
    end generators and tasks, inside whose regions others may have opened theirs. Raises `RuntimeError` for a region
    that is not open, or not the innermost.
    """
    leave_ended(stack)
    depth = len(stack) - 1
    while depth >= 0 and (stack[depth].spec is not spec or stack[depth].exit_pending):
        depth -= 1
    if depth < 0:
        raise RuntimeError(_out_of_order(spec, None))
    suspended = exc_type is None or issubclass(exc_type, (GeneratorExit, asyncio.CancelledError))
    if suspended and False in [inner.spec.of_module for inner in stack[depth + 1 :]]:
        stack[depth].exit_pending = True
        raise RuntimeError(_out_of_order(spec, stack[-1].spec))
    return depth


def _out_of_order(spec: RegionSpec, innermost: RegionSpec | None) -> str:
    if innermost is None:
        return (
            f"{spec} is being left in a thread that never entered it, or left twice; enter and leave a region in "
            "one thread, by `with` or as a decorator"
        )
    return (
        f"{spec} is being left while {innermost}, entered after it, is still open, and stays open until that one is "
        "left; leave regions in the reverse of the order they were entered. A generator or coroutine that is suspended "
        "inside `with autocast():` does this: decorate its function with autocast instead"
    )
