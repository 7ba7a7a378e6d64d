"""Enters and leaves regions: `enter`, `leave`, and the open regions of this thread.

A region sets torch's own autocast state (enabled, dtype, cache flag), as `torch.autocast` does, and has the dispatcher
call an `AutocastMode`. `enter` reads the state that a region changes, as one value, and `write` sets it. Leaving writes
that state back.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch

from ampkit.dispatch import self_check
from ampkit.dispatch.dispatcher import KEY, TLS_NAME, TORCH_KEY, Exit, current_mode
from ampkit.dispatch.dynamo_guard import Tag, write_tag
from ampkit.dispatch.mode import AutocastMode, observers
from ampkit.dispatch.weight_cache import WeightCasts
from ampkit.forks import clear_torch_cache
from ampkit.policy.policy import register_changes
from ampkit.region.arguments import DEFAULT_POLICIES, RegionSpec
from ampkit.torch_private import is_excluded, is_included, put_in_tls, set_excluded, set_included, tracer
from ampkit_kernels import CURRENT_CUDA, is_capturing

__all__ = ["RegionOrderError", "call_at_end", "enter", "leave", "leave_down_to", "leave_ended_graphs", "thread"]

_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_dtype_of, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
_cache_flag, _set_cache_flag = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
_increment_nesting, _decrement_nesting = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
_OTHER_KEY = {KEY: TORCH_KEY, TORCH_KEY: KEY}
_new: Any = tuple.__new__  # makes a named tuple without a call of Python
_MOST_MODES = 16  # that a thread keeps


class RegionOrderError(RuntimeError):
    """A region ends in another order than it was entered, or in another thread."""


class State(NamedTuple):
    """The state that a region changes in its thread."""

    enabled: bool  # this and the next two: torch's autocast state for the region's device type
    dtype: torch.dtype
    cache_enabled: bool
    mode: AutocastMode  # that operators find
    included: bool  # whether the key of the region's mode is included, and whether it is excluded
    excluded: bool
    other_excluded: bool | None  # whether the other key is excluded; None if the enclosing region does not use it
    tag: Tag  # of the policy, for Dynamo


class OpenRegion(NamedTuple):
    """A region that a thread has entered and not yet left."""

    spec: RegionSpec
    before: State  # to restore
    state: State  # that it has set
    cache: WeightCasts
    graph: FrameType | None  # of the compiled graph that has entered it
    reached: bool  # whether its operators reach its mode
    at_end: Callable[[], None] | None = None  # called when it ends


class ThreadState(threading.local):
    """The regions of this thread, with their shared cache and modes."""

    def __init__(self) -> None:
        self.regions: list[OpenRegion] = []  # outermost first
        self.cache: WeightCasts | None = None  # empty while no region is open
        self.modes: dict[Any, AutocastMode] = {}  # by region settings
        self.last: tuple[Any, AutocastMode] | None = None  # the item of `modes` that was used last


thread = ThreadState()


def write(device_type: str, key: Any, state: State, now: State, *, read_now: bool = False) -> None:
    """Set the state of this thread, which was set to `now` before; `read_now`: it was read right before this call."""
    enabled, dtype, cache_enabled, mode, included, excluded, other_excluded, tag = state
    if mode is not now.mode:
        put_in_tls(TLS_NAME, mode)
    if included is not now.included:
        set_included(key, included)
    if excluded is not now.excluded:
        set_excluded(key, excluded)
    if other_excluded is not None and other_excluded is not now.other_excluded:
        set_excluded(_OTHER_KEY[key], other_excluded)
    if tag is not now.tag:
        write_tag(tag, now.tag)
    # torch's autocast state is written as a region ends in any case, since code in the region may have changed it.
    _set_enabled(device_type, enabled)
    if not read_now or dtype is not now.dtype:
        _set_dtype(device_type, dtype)
    if not read_now or cache_enabled is not now.cache_enabled:
        _set_cache_flag(cache_enabled)


def enter(spec: RegionSpec, *, graph: FrameType | None = None, recomputes: bool = False) -> OpenRegion:
    """Enter a region.

    Args:
        spec: the region.
        graph: the frame of the compiled graph that enters the region, if one does.
        recomputes: operators reach the region even if autocast is off in it, because torch's checkpoint turns autocast
            on afterwards where it was on in the forward.
    """
    regions = thread.regions
    if regions and regions[-1].graph is not None:
        leave_ended_graphs()
    around = regions[-1] if regions else None
    device_type, dtype, enabled, cache_enabled, *_ = spec
    in_capture = device_type == "cuda" and is_capturing(CURRENT_CUDA)
    cache = thread.cache if around is None else around.cache
    if cache is None or cache.in_capture is not in_capture:
        cache = _new_cache(in_capture=in_capture)
    outer = current_mode()
    mode = _mode(spec, outer, cache)
    key = mode.key
    values = (
        _is_enabled(device_type),
        _dtype_of(device_type),
        _cache_flag(),
        outer or mode.closed,
        is_included(key),
        is_excluded(key),  # inside a disabled region, or inside an operator
        None if outer is None or outer.key is key else is_excluded(outer.key),
        () if around is None else around.state.tag,
    )
    before = _new(State, values)
    reached = enabled or recomputes
    if len(mode.policies) > 1:  # operators also reach the mode if a region of another device type is around this one
        reached = reached or any(_is_enabled(each) for each, _ in mode.policies if each != device_type)
    if reached and not Exit.begun:
        included, excluded, tag = True, False, mode.tag
    else:
        included, excluded, tag = before.included, before.included or before.excluded, mode.tag_without_casts
    other_excluded = None if before.other_excluded is None else True
    state = _new(State, (enabled, dtype, cache_enabled, mode, included, excluded, other_excluded, tag))
    region = _new(OpenRegion, (spec, before, state, cache, graph, reached, None))
    regions.append(region)
    _increment_nesting()
    write(device_type, key, state, before, read_now=True)
    return region


def call_at_end(call: Callable[[], None]) -> None:
    """Have `call` called when the innermost region ends."""
    thread.regions[-1] = thread.regions[-1]._replace(at_end=call)


def leave(spec: RegionSpec, exc_type: type[BaseException] | None = None) -> None:
    """Leave the innermost region, `spec`, and the regions of modules inside it that an exception has ended.

    Raises:
        RegionOrderError: `spec` is not open in this thread, or not the innermost region, and no exception of type
            `exc_type` is ending it. The regions inside end as well.
    """
    regions = thread.regions
    if regions and regions[-1].spec is spec:
        _leave_innermost(regions)
        return
    leave_ended_graphs()
    depth = next((n for n in reversed(range(len(regions))) if regions[n].spec is spec), None)
    # Other exceptions end the regions inside as well. These two end a generator or a task, and other code may have
    # entered the regions inside.
    is_error = exc_type is None or issubclass(exc_type, (GeneratorExit, asyncio.CancelledError))
    if depth is None:
        if is_error:
            raise RegionOrderError(
                f"{spec} ends in a thread that has not entered it, or has exited it already; enter and exit a "
                "region in one thread, once each and in order, with `with` or as a decorator"
            )
        return
    inner = [region.spec for region in regions[depth + 1 :] if not region.spec.of_module]
    leave_down_to(depth)
    if inner and is_error:
        raise RegionOrderError(
            f"{spec} ended while {inner[-1]}, entered after it, was open, so both have ended; exit regions in "
            "the reverse order of entering them. A generator or coroutine that is suspended inside `with "
            "autocast():` does this: decorate its function with autocast instead"
        )


def leave_down_to(depth: int) -> None:
    """Leave the innermost regions until `depth` are open."""
    regions = thread.regions
    while len(regions) > depth:
        _leave_innermost(regions)


def _leave_innermost(regions: list[OpenRegion]) -> None:
    spec, before, state, cache, _, _, at_end = regions.pop()
    if at_end is not None:
        at_end()
    write(spec.device_type, state.mode.key, before, state)
    if _decrement_nesting() == 0:
        clear_torch_cache()
    if not regions or regions[-1].cache is not cache:
        cache.clear()


def leave_ended_graphs() -> None:
    """Leave the innermost regions that compiled graphs have entered whose calls an exception has ended.

    Only graphs that `torch.compile(backend="eager")` runs hold regions. While Dynamo traces, such a region remains: a
    trace must leave the thread's state as it was.
    """
    regions = thread.regions
    while regions and regions[-1].graph is not None:
        if _on_stack(regions[-1].graph) or tracer() is not None:
            return
        _leave_innermost(regions)


def _new_cache(*, in_capture: bool) -> WeightCasts:
    """Return the cache of an outermost region: the thread's, or its own while a graph is captured."""
    if in_capture:
        return WeightCasts(in_capture=True)
    thread.cache = thread.cache or WeightCasts()
    return thread.cache


def _mode(spec: RegionSpec, outer: AutocastMode | None, cache: WeightCasts) -> AutocastMode:
    """Return the mode of a region: its policy for its device type, the enclosing mode's for the other types."""
    device_type, policies = spec.device_type, {} if outer is None else dict(outer.policies)
    policies[device_type] = spec.policy or policies.get(device_type) or DEFAULT_POLICIES[device_type]
    observer = observers[-1] if observers else None
    # `register_op` changes the rules of every policy.
    key = tuple(policies.items()), cache if spec.cache_enabled else None, observer, register_changes()
    last = thread.last
    if last is not None and last[0] == key:  # takes less time than hashing the policies
        return last[1]
    mode = thread.modes.get(key)
    if mode is None:
        if not Exit.begun:
            self_check.once()
        if len(thread.modes) >= _MOST_MODES:
            thread.modes.clear()
        mode = thread.modes[key] = AutocastMode(*key[:3])
    thread.last = key, mode
    return mode


def _on_stack(frame: FrameType) -> bool:
    """Whether the call of a frame is still running in this thread."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None
