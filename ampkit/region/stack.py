"""The open regions of a thread: a stack of entries, each of which records the state to restore.

An entry writes torch's own autocast state (enabled, dtype, cache flag) as `torch.autocast` does, and puts a mode above
it. What it changes is recorded first and restored as values, so leaving may be repeated: what an interrupt cut short,
the next region that is entered or left completes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from ampkit.engine import policy_mark, self_check
from ampkit.engine.autocast_mode import AutocastMode
from ampkit.engine.thread_state import thread
from ampkit.engine.weight_cache import RegionCache, WeightCache
from ampkit.policy.policy import Policy, register_changes
from ampkit.region.arguments import NAMED_POLICIES, RegionSpec
from ampkit.region.recording import new_mode, records
from ampkit.torch_internals.checkpoint import follow
from ampkit.torch_internals.dispatcher import (
    TLS_NAME,
    current,
    get_in_tls,
    is_excluded,
    is_included,
    put_in_tls,
    set_excluded,
    set_included,
)
from ampkit.torch_internals.dynamo import frame_on_stack, tracer
from ampkit.torch_internals.forks import clear_torch_cache
from ampkit.torch_internals.tensors import is_capturing

__all__ = ["Entry", "RegionOrderError", "leave_down_to", "leave_ended", "pop", "push"]

_is_enabled, _dtype_of, _cache_flag = (
    torch.is_autocast_enabled, torch.get_autocast_dtype, torch.is_autocast_cache_enabled
)
_set_enabled, _set_dtype, _set_cache_flag = (
    torch.set_autocast_enabled, torch.set_autocast_dtype, torch.set_autocast_cache_enabled
)
_increment, _decrement = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_uncached_modes: dict[Any, AutocastMode] = {}


BeginRules = Callable[["Entry"], None]
"""Begins the module rules of an open region and sets the entry's `end_rules`. Passed in by `autocast`, because what it
registers enters regions in turn."""


class RegionOrderError(RuntimeError):
    """A region is left in another order than it was entered, or in another thread."""


class Entry:
    """An open region: what entering it changes, and the state to restore."""

    __slots__ = (
        "active", "begin_rules", "cache", "cache_flag", "counted", "dtype", "enabled", "end_rules", "ended", "excluded",
        "failed", "frame", "included", "key", "mark", "mode", "muted", "outer", "own_cache", "spec",
    )

    def __init__(
        self,
        spec: RegionSpec,
        stack: list[Entry],
        begin_rules: BeginRules | None,
        frame: FrameType | None,
        recomputes: bool,
    ) -> None:
        """Record the state; changes nothing."""
        kind = spec.device_type
        try:
            outer = get_in_tls(TLS_NAME)
        except RuntimeError:        # the first region of the thread
            outer = None
        self.outer = outer = outer if outer is not None and outer.open else None
        self.spec = spec
        self.frame = frame          # of the compiled graph that enters it; an exception may end that call
        self.ended = False          # to be left as soon as nothing is open inside it
        self.counted = False        # in torch's count of open regions
        self.enabled = _is_enabled(kind)
        self.dtype = _dtype_of(kind)
        self.cache_flag = _cache_flag()
        self.mark = thread.mark
        capture = kind == "cuda" and is_capturing()
        cache: WeightCache | RegionCache | None = None if capture else spec.cache
        self.own_cache = None if cache is None or any(entry.cache is cache for entry in stack) else spec.cache
        if cache is None:
            cache = stack[-1].cache if stack else thread.cache
            if cache is None or cache.in_capture != capture:
                cache = _new_cache(capture)
        self.cache = cache
        mode = cache.latest
        if (
            mode is None or outer is not None or mode.policy is not (spec.policy or NAMED_POLICIES["default", kind])
            or mode.changes != register_changes() or mode.record is not None or records or not spec.cache_enabled
        ):
            mode = _mode(outer, kind, spec.policy, cache if spec.cache_enabled else None)
        self.mode = mode
        self.key = key = mode.key
        self.included = is_included(key)
        self.excluded = is_excluded(key)    # inside a disabled region, or inside an operator
        # The enclosing region's key, where it is another one.
        self.muted = None if outer is None or outer.key is key or is_excluded(outer.key) else outer.key
        self.failed = False         # an exception ended the region, perhaps before it came to every module
        self.end_rules: Callable[[bool], None] | None = None    # given `failed`; set by `begin_rules`
        active = spec.enabled or recomputes
        has_rules = active and mode.has_module_rules and bool(dict(mode.policies)[kind].modules)
        self.begin_rules = begin_rules if has_rules else None
        self.active = active or (
            mode.policy is None and any(_is_enabled(other) for other, _ in mode.policies if other != kind)
        )

    def leave(self, *, last: bool) -> None:
        """Restore the state found on entry; `last`: no other entry is open in this thread. May be repeated."""
        self.ended = True
        if self.end_rules is not None:
            self.end_rules(self.failed)
        if self.counted:
            self.counted = False
            if _decrement() <= 0 or (last and not self.enabled):
                clear_torch_cache()
        spec, active = self.spec, self.active
        _set_enabled(spec.device_type, self.enabled)
        if spec.dtype is not self.dtype:
            _set_dtype(spec.device_type, self.dtype)
        if spec.cache_enabled is not self.cache_flag:
            _set_cache_flag(self.cache_flag)
        if active and not self.included:
            set_included(self.key, False)
        if self.excluded is active:
            set_excluded(self.key, self.excluded)
        if self.muted is not None:
            set_excluded(self.muted, False)
        if self.mark is not (self.mode.mark if active else ()):
            policy_mark.write(self.mark)
        put_in_tls(TLS_NAME, self.outer or self.mode.closed_copy or self.mode.closed())
        if self.own_cache is not None:
            self.own_cache.leave()
        elif last and spec.cache is None:
            self.cache.clear()


def _new_cache(capture: bool) -> RegionCache:
    """The cache of an outermost region that was given none: the thread's, or one for a CUDA graph being captured."""
    fresh = RegionCache()
    fresh.in_capture = capture
    if not capture:
        thread.cache = thread.cache or fresh
        return thread.cache
    return fresh


def _mode(
    outer: AutocastMode | None,
    device_type: str,
    policy: Policy | None,
    cache: WeightCache | RegionCache | None,
) -> AutocastMode:
    """The mode of a region: its policy for its device type, the enclosing mode's for the others.

    Made once for a cache and its policies, and again after `register_op` has changed the rules.
    """
    every = {} if outer is None else dict(outer.policies)
    every[device_type] = policy or every.get(device_type) or NAMED_POLICIES["default", device_type]
    policies = tuple(every.items())
    modes = _uncached_modes if cache is None else cache.modes
    mode = modes.get(policies)
    record = records[-1] if records else None
    if mode is None or mode.changes != register_changes() or mode.record is not record:
        self_check.once()
        follow(_recomputing)
        if len(modes) >= 16:
            modes.clear()
        mode = modes[policies] = new_mode(policies, cache)
    if mode.policy is not None:
        mode.policy = every[device_type]    # may be another object than the equal one that it was made for
    if cache is not None:
        cache.latest = mode
    return mode


def push(
    spec: RegionSpec,
    begin_rules: BeginRules | None = None,
    frame: FrameType | None = None,
    *,
    recomputes: bool = False,
) -> None:
    """Enter a region. `begin_rules` is called last if the region's policy has module rules; see `module_hooks`.

    `frame` is that of the compiled graph that enters it, if one does. `recomputes`: operators reach the region though
    autocast is off, because torch's checkpoint turns it on afterwards where it was on in the forward.
    """
    stack = thread.regions
    if stack:
        leave_ended(stack)
    depth = len(stack)
    try:
        entry = Entry(spec, stack, begin_rules, frame, recomputes)
        stack.append(entry)
        active = entry.active
        if entry.own_cache is not None:
            entry.own_cache.enter()
        put_in_tls(TLS_NAME, entry.mode)
        mark = entry.mode.mark if active else ()
        if mark is not entry.mark:
            policy_mark.write(mark)
        if active and not entry.included:
            set_included(entry.key, True)
        if entry.excluded is active:
            set_excluded(entry.key, not active)
        if entry.muted is not None:
            set_excluded(entry.muted, True)
        _set_enabled(spec.device_type, spec.enabled)
        if spec.dtype is not entry.dtype:
            _set_dtype(spec.device_type, spec.dtype)
        if spec.cache_enabled is not entry.cache_flag:
            _set_cache_flag(spec.cache_enabled)
        entry.counted = True
        _increment()
        if entry.begin_rules is not None:
            entry.begin_rules(entry)
    except BaseException:
        leave_down_to(stack, depth)
        raise


def pop(spec: RegionSpec, exc_type: type[BaseException] | None = None) -> None:
    """Leave a region and those of modules inside it; `exc_type` is that of the exception that ends it.

    An exception may come from a signal handler and have cut the exit of regions inside short, so it ends those too and
    nothing is raised beside it. `GeneratorExit` and `CancelledError` come from none: they end generators and tasks,
    inside whose regions others may have opened theirs. Raises `RegionOrderError` for a region that is not open, or not
    the innermost.
    """
    stack = thread.regions
    if stack and stack[-1].spec is spec and not stack[-1].ended:
        entry = stack[-1]
        entry.failed = exc_type is not None
        entry.leave(last=len(stack) == 1)
        if stack and stack[-1] is entry:
            stack.pop()
        if stack and stack[-1].ended:
            leave_ended(stack)
        return
    leave_ended(stack)
    depth = len(stack) - 1
    while depth >= 0 and (stack[depth].spec is not spec or stack[depth].ended):
        depth -= 1
    if exc_type is None or issubclass(exc_type, (GeneratorExit, asyncio.CancelledError)):
        if depth < 0:
            raise RegionOrderError(_out_of_order(spec, None))
        if not all(inner.spec.of_module for inner in stack[depth + 1 :]):
            stack[depth].ended = True
            raise RegionOrderError(_out_of_order(spec, stack[-1].spec))
    if depth >= 0:
        leave_down_to(stack, depth)


def leave_down_to(stack: list[Entry], depth: int) -> None:
    """Leave the innermost regions of this thread until `depth` are open, then those that have ended."""
    while len(stack) > depth or (stack and stack[-1].ended):
        entry = stack[-1]
        try:
            entry.leave(last=len(stack) == 1)
        except BaseException:       # an interrupt, or an error of the hooks: restore the rest
            entry.leave(last=len(stack) == 1)
            raise
        if stack and stack[-1] is entry:
            stack.pop()


def leave_ended(stack: list[Entry]) -> None:
    """Leave the innermost regions that have ended, or whose compiled graph an exception has ended."""
    while stack:
        frame = stack[-1].frame
        if not stack[-1].ended and (frame is None or frame_on_stack(frame) or tracer() is not None):
            return      # a trace must leave the thread's state as it was
        leave_down_to(stack, len(stack) - 1)


def _recomputing(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for a checkpoint's recompute in backward, under the policies that are active here, if any are.

    torch's checkpoint restores the enabled flags and dtypes itself.
    """
    mode = current()
    if mode is None:
        return function
    policies, cached = mode.policies, mode.cache is not None
    begin_rules = next((entry.begin_rules for entry in thread.regions if entry.begin_rules is not None), None)
    of_module = bool(thread.regions) and thread.regions[-1].spec.of_module

    def recompute(*args: Any, **kwargs: Any) -> Any:
        stack = thread.regions
        depth = len(stack)
        try:
            for kind, policy in policies:
                spec = RegionSpec(
                    kind, _dtype_of(kind), _is_enabled(kind), cached, policy, of_module=of_module
                )
                push(spec, begin_rules, recomputes=True)
            return function(*args, **kwargs)
        finally:
            leave_down_to(stack, depth)

    return recompute


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
