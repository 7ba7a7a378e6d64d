"""Enters and leaves regions: `push`, `pop`, and the stack of this thread's open regions with the state to restore.

A region sets torch's own autocast state (enabled, dtype, cache flag) as `torch.autocast` does, and makes the dispatcher
call an `AutocastMode`. An `Entry` reads all state that will change before `push` changes any, and restores it as
values, so leaving may be repeated: when an interrupt cuts an enter or a leave short, the next region that is entered or
left in the thread completes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from ampkit.engine import policy_mark, self_check
from ampkit.engine.autocast_mode import AutocastMode
from ampkit.engine.thread_state import OpenRegions, thread
from ampkit.engine.weight_cache import RegionCache, WeightCache
from ampkit.policy.policy import Policy, register_changes
from ampkit.region.arguments import DEFAULT_POLICIES, RegionSpec
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
from ampkit_kernels import CURRENT_CUDA, is_capturing

__all__ = ["Entry", "RegionOrderError", "leave_down_to", "leave_ended", "pop", "push"]

_is_enabled, _dtype_of, _cache_flag = (
    torch.is_autocast_enabled,
    torch.get_autocast_dtype,
    torch.is_autocast_cache_enabled,
)
_set_enabled, _set_dtype, _set_cache_flag = (
    torch.set_autocast_enabled,
    torch.set_autocast_dtype,
    torch.set_autocast_cache_enabled,
)
_increment, _decrement = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_uncached_modes: dict[Any, AutocastMode] = {}


BeginRules = Callable[["Entry"], None]
"""`begin_module_rules` of `module_hooks`: begins the module rules of an open region and sets the entry's `end_rules`.
`autocast` passes it to `push`, because `module_hooks` imports this module: its hooks enter regions too."""


class RegionOrderError(RuntimeError):
    """A region is left in another order than it was entered, or in another thread."""


class Entry:
    """An open region: what entering it sets, and the state to restore.

    `ended`: the region is to be left as soon as nothing is open inside it. `counted`: torch's count of open regions
    includes it. `failed`: an exception ended the region, perhaps before it came to every module.
    """

    __slots__ = (
        "active",
        "begin_rules",
        "cache",
        "cache_enabled",
        "counted",
        "device_type",
        "dtype",
        "enabled",
        "end_rules",
        "ended",
        "failed",
        "frame",
        "key",
        "mode",
        "muted_key",
        "old_cache_flag",
        "old_dtype",
        "old_enabled",
        "old_mark",
        "outer_mode",
        "own_cache",
        "spec",
        "was_excluded",
        "was_included",
    )

    def __init__(
        self,
        spec: RegionSpec,
        stack: OpenRegions,
        begin_rules: BeginRules | None,
        frame: FrameType | None,
        recomputes: bool,
    ) -> None:
        """Read the state to restore, and choose the cache and the mode. Changes no autocast or dispatcher state."""
        device_type, dtype, enabled, cache_enabled, policy, users_cache, _, _ = spec  # faster than by name
        try:
            outer_mode = get_in_tls(TLS_NAME)
        except RuntimeError:  # the first region of the thread
            outer_mode = None
        self.outer_mode = outer_mode = outer_mode if outer_mode is not None and outer_mode.open else None
        self.spec = spec
        self.device_type, self.dtype, self.enabled, self.cache_enabled = device_type, dtype, enabled, cache_enabled
        self.frame = frame  # of the compiled graph that enters it; an exception may end that call
        self.ended = self.counted = self.failed = False
        self.old_enabled = _is_enabled(device_type)
        self.old_dtype = _dtype_of(device_type)
        self.old_cache_flag = _cache_flag()
        self.old_mark = stack.mark
        # The cache: the user's, else the enclosing region's, else the thread's.
        capture = device_type == "cuda" and is_capturing(CURRENT_CUDA)
        cache: WeightCache | RegionCache | None = None if capture else users_cache
        # The user's cache is entered and left with the outermost region that has it.
        self.own_cache = None if cache is None or any(entry.cache is cache for entry in stack) else users_cache
        if cache is None:
            cache = stack[-1].cache if stack else stack.cache
            if cache is None or cache.in_capture != capture:
                cache = _new_cache(stack, capture)
        self.cache = cache
        # The mode: the one that the cache had last, unless its policies, rules or record are others.
        mode = cache.latest
        if (
            mode is None
            or outer_mode is not None
            or mode.policy is not (policy or DEFAULT_POLICIES[device_type])
            or mode.changes != register_changes()
            or mode.record is not None
            or records
            or not cache_enabled
        ):
            mode = _mode(outer_mode, device_type, policy, cache if cache_enabled else None)
        self.mode = mode
        self.key = key = mode.key
        self.was_included = is_included(key)
        self.was_excluded = is_excluded(key)  # inside a disabled region, or inside an operator
        outer_key = None if outer_mode is None else outer_mode.key
        # The enclosing region's key, where it is another one and would cast too.
        self.muted_key = None if outer_key is None or outer_key is key or is_excluded(outer_key) else outer_key
        self.end_rules: Callable[[bool], None] | None = None  # called with `failed`; set by `begin_rules`
        reached = enabled or recomputes
        has_rules = reached and mode.has_module_rules and bool(dict(mode.policies)[device_type].modules)
        self.begin_rules = begin_rules if has_rules else None
        # Whether operators reach the mode: also if this region is disabled inside one of another device type.
        self.active = reached or (
            mode.policy is None and any(_is_enabled(other) for other, _ in mode.policies if other != device_type)
        )

    def leave(self, stack: OpenRegions) -> None:
        """Restore the state. May be repeated."""
        last = len(stack) == 1
        self.ended = True
        if self.end_rules is not None:
            self.end_rules(self.failed)
        if self.counted:
            self.counted = False
            if _decrement() <= 0 or (last and not self.old_enabled):
                clear_torch_cache()
        active = self.active
        _set_enabled(self.device_type, self.old_enabled)
        if self.dtype is not self.old_dtype:
            _set_dtype(self.device_type, self.old_dtype)
        if self.cache_enabled is not self.old_cache_flag:
            _set_cache_flag(self.old_cache_flag)
        if active and not self.was_included:
            set_included(self.key, False)
        if self.was_excluded is active:
            set_excluded(self.key, self.was_excluded)
        if self.muted_key is not None:
            set_excluded(self.muted_key, False)
        if self.old_mark is not (self.mode.mark if active else ()):
            policy_mark.write(stack, self.old_mark)
        put_in_tls(TLS_NAME, self.outer_mode or self.mode.closed_copy or self.mode.closed())
        if self.own_cache is not None:
            self.own_cache.leave()
        elif last and self.spec.cache is None:
            self.cache.clear()


def _new_cache(stack: OpenRegions, capture: bool) -> RegionCache:
    """A cache for a region without a user's: the thread's, or one of its own while a CUDA graph is captured."""
    if capture:
        cache = RegionCache()
        cache.in_capture = True
        return cache
    stack.cache = stack.cache or RegionCache()
    return stack.cache


def _mode(
    outer_mode: AutocastMode | None,
    device_type: str,
    policy: Policy | None,
    cache: WeightCache | RegionCache | None,
) -> AutocastMode:
    """The mode of a region: its policy for its device type, the enclosing mode's policies for the other types.

    One is made for each cache and set of policies, and made again after `register_op` has changed the rules.
    """
    by_device_type = {} if outer_mode is None else dict(outer_mode.policies)
    policy = policy or by_device_type.get(device_type) or DEFAULT_POLICIES[device_type]
    by_device_type[device_type] = policy
    policies = tuple(by_device_type.items())
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
        mode.policy = policy  # may be another object than the equal one that the mode was made for
    if cache is not None:
        cache.latest = mode
    return mode


def push(
    stack: OpenRegions,
    spec: RegionSpec,
    begin_rules: BeginRules | None = None,
    frame: FrameType | None = None,
    *,
    recomputes: bool = False,
) -> None:
    """Enter a region: make its entry, then set the state. Leaves it again if an exception ends this call.

    Called by `autocast.__enter__`, by the hooks of modules with a rule, by graphs (`traced.enter_region`) and by
    recomputes of checkpoints.

    Args:
        stack: this thread's regions, `thread.regions`.
        spec: the region.
        begin_rules: called last if the region's policy has rules for modules.
        frame: the frame of the compiled graph that enters the region, if one does.
        recomputes: operators reach the region even if autocast is off in it, because torch's checkpoint turns autocast
            on afterwards where it was on in the forward.
    """
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
        if mark is not entry.old_mark:
            policy_mark.write(stack, mark)
        if active and not entry.was_included:
            set_included(entry.key, True)
        if entry.was_excluded is active:
            set_excluded(entry.key, not active)
        if entry.muted_key is not None:
            set_excluded(entry.muted_key, True)
        if entry.enabled is not entry.old_enabled:
            _set_enabled(entry.device_type, entry.enabled)
        if entry.dtype is not entry.old_dtype:
            _set_dtype(entry.device_type, entry.dtype)
        if entry.cache_enabled is not entry.old_cache_flag:
            _set_cache_flag(entry.cache_enabled)
        entry.counted = True
        _increment()
        if entry.begin_rules is not None:
            entry.begin_rules(entry)
    except BaseException:
        leave_down_to(stack, depth)
        raise


def pop(stack: OpenRegions, spec: RegionSpec, exc_type: type[BaseException] | None = None) -> None:
    """Leave a region of this thread, and the regions of modules inside it.

    Raises `RegionOrderError` if the region is not open, or not the innermost. If an exception of type `exc_type` ends
    the region, it ends all regions inside too, and nothing is raised: a signal handler may have raised it while one of
    those was being left. `GeneratorExit` and `CancelledError` do not come from signal handlers; they end generators and
    tasks, and other code may have opened the regions inside.
    """
    entry = stack[-1] if stack else None
    if entry is not None and entry.spec is spec and not entry.ended:  # the usual case
        entry.failed = exc_type is not None
        entry.leave(stack)
        if stack and stack[-1] is entry:
            stack.pop()
        if stack and stack[-1].ended:
            leave_ended(stack)
        return
    leave_ended(stack)
    depth = len(stack) - 1  # of the region, -1 if it is not open
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


def leave_down_to(stack: OpenRegions, depth: int) -> None:
    """Leave the innermost regions until `depth` are open, and those below them that have ended."""
    while len(stack) > depth or (stack and stack[-1].ended):
        entry = stack[-1]
        try:
            entry.leave(stack)
        except BaseException:  # an interrupt, or a warning of module rules as an error: restore the rest
            entry.leave(stack)
            raise
        if stack and stack[-1] is entry:
            stack.pop()


def leave_ended(stack: OpenRegions) -> None:
    """Leave the innermost regions that have ended, or that an exception has ended with the graph that entered them."""
    while stack:
        frame = stack[-1].frame
        # While Dynamo traces, such a region stays: a trace must leave the thread's state as it was.
        if not stack[-1].ended and (frame is None or frame_on_stack(frame) or tracer() is not None):
            return
        leave_down_to(stack, len(stack) - 1)


def _recomputing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function`, which a checkpoint recomputes in backward, to run under the policies that are active now.

    `torch_internals.checkpoint` calls this in the forward. torch's checkpoint restores enabled flags and dtypes itself.
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
            for device_type, policy in policies:
                dtype, enabled = _dtype_of(device_type), _is_enabled(device_type)
                spec = RegionSpec(device_type, dtype, enabled, cached, policy, of_module=of_module)
                push(stack, spec, begin_rules, recomputes=True)
            return function(*args, **kwargs)
        finally:
            leave_down_to(stack, depth)

    return recompute


def _out_of_order(spec: RegionSpec, innermost: RegionSpec | None) -> str:
    if innermost is None:
        return (
            f"{spec} is being left in a thread that never entered it, or left twice; enter and leave a region in one "
            "thread, once each, with `with` or as a decorator"
        )
    return (
        f"{spec} is being left while {innermost}, entered after it, is still open, and stays open until that one is "
        "left; leave regions in the reverse of the order they were entered. A generator or coroutine that is suspended "
        "inside `with autocast():` does this: decorate its function with autocast instead"
    )
