"""Enters and leaves regions: `enter`, `leave`, and the open regions of this thread.

A region sets torch's own autocast state (enabled, dtype, cache flag), as `torch.autocast` does, and has the dispatcher
call an `AutocastMode`. `read` reads all state that a region changes, as one value, and `write` sets it. Entering reads
and then writes; leaving writes what was read.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch

from ampkit.dispatch import self_check
from ampkit.dispatch.dispatcher import KEY, TLS_NAME, TORCH_KEY, current_mode
from ampkit.dispatch.dynamo_guard import MARK_DEVICES, Mark, current_mark, write_mark
from ampkit.dispatch.mode import AutocastMode, observers
from ampkit.dispatch.weight_cache import WeightCasts
from ampkit.forks import clear_torch_cache
from ampkit.policy.policy import Policy, register_changes
from ampkit.region.arguments import DEFAULT_POLICIES, RegionSpec
from ampkit.torch_private import is_excluded, is_included, put_in_tls, set_excluded, set_included, tracer
from ampkit_kernels import CURRENT_CUDA, is_capturing

__all__ = ["RegionOrderError", "call_at_end", "enter", "leave", "leave_down_to", "leave_ended_graphs", "thread"]

_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_dtype_of, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
_cache_flag, _set_cache_flag = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
_KEY_SETTERS = (  # in the order of `State.keys`
    functools.partial(set_included, KEY),
    functools.partial(set_excluded, KEY),
    functools.partial(set_included, TORCH_KEY),
    functools.partial(set_excluded, TORCH_KEY),
)
_new = tuple.__new__  # makes a named tuple without a call of Python
_MOST_MODES = 16  # that a thread keeps


class RegionOrderError(RuntimeError):
    """A region is left in another order than it was entered, or in another thread."""


class State(NamedTuple):
    """What a region changes in its thread."""

    device_type: str
    enabled: bool  # this and the next two: torch's autocast state
    dtype: torch.dtype
    cache_enabled: bool
    mode: AutocastMode  # that operators find
    keys: tuple[bool, bool, bool, bool]  # whether KEY is included and excluded, and whether TORCH_KEY is
    mark: Mark  # of the policy, for Dynamo


class OpenRegion(NamedTuple):
    """A region that a thread has entered and not yet left."""

    spec: RegionSpec
    before: State  # to restore
    state: State  # that it has set
    cache: WeightCasts
    graph: FrameType | None  # of the compiled graph that has entered it
    reached: bool  # whether its operators reach its mode
    at_end: Callable[[], None] | None = None  # called when it is left


class ThreadState(threading.local):
    """The regions of this thread, and what they share."""

    def __init__(self) -> None:
        self.regions: list[OpenRegion] = []  # outermost first
        self.cache: WeightCasts | None = None  # empty while no region is open
        self.modes: dict[Any, AutocastMode] = {}  # by what they are made of


thread = ThreadState()


def read(device_type: str, mode: AutocastMode) -> State:
    """The state of this thread that a region for this device type changes, with the mode that is in the thread."""
    return _new(
        State,
        (
            device_type,
            _is_enabled(device_type),
            _dtype_of(device_type),
            _cache_flag(),
            mode,
            (is_included(KEY), is_excluded(KEY), is_included(TORCH_KEY), is_excluded(TORCH_KEY)),
            current_mark() if _is_enabled(MARK_DEVICES[0]) else (),
        ),
    )


def write(state: State, now: State) -> None:
    """Set the state of this thread, which was set to `now` before."""
    device_type, enabled, dtype, cache_enabled, mode, keys, mark = state
    if mode is not now.mode:
        put_in_tls(TLS_NAME, mode)
    if keys != now.keys:
        for set_key, value, before in zip(_KEY_SETTERS, keys, now.keys, strict=True):
            if value is not before:
                set_key(value)
    if mark != now.mark:
        write_mark(mark)
    _set_enabled(device_type, enabled)
    if dtype is not now.dtype:
        _set_dtype(device_type, dtype)
    _set_cache_flag(cache_enabled)


def enter(
    spec: RegionSpec,
    *,
    graph: FrameType | None = None,
    recomputes: bool = False,
) -> None:
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
    cache, outer = _cache(spec.device_type), current_mode()
    mode = _mode(spec, outer, cache)
    before = read(spec.device_type, outer or mode.closed)
    reached = spec.enabled or recomputes
    if len(mode.policies) > 1:  # operators also reach the mode if a region of another device type is around this one
        reached = reached or any(_is_enabled(each) for each, _ in mode.policies if each != spec.device_type)
    keys = _keys(mode if reached else None, before.keys)
    mark = mode.mark if reached else mode.mark_without_casts
    after = _new(State, (spec.device_type, spec.enabled, spec.dtype, spec.cache_enabled, mode, keys, mark))
    regions.append(_new(OpenRegion, (spec, before, after, cache, graph, reached, None)))
    torch.autocast_increment_nesting()
    write(after, before)


def call_at_end(call: Callable[[], None]) -> None:
    """Have `call` called when the innermost region is left."""
    thread.regions[-1] = thread.regions[-1]._replace(at_end=call)


def leave(spec: RegionSpec, exc_type: type[BaseException] | None = None) -> None:
    """Leave the innermost region, `spec`, and the regions of modules inside it that an exception has ended.

    Raises:
        RegionOrderError: `spec` is not open in this thread, or not the innermost region, and no exception of type
            `exc_type` is ending it. The regions inside are left too.
    """
    regions = thread.regions
    if regions and regions[-1].spec is spec:
        _leave_innermost()
        return
    leave_ended_graphs()
    depth = next((n for n in reversed(range(len(regions))) if regions[n].spec is spec), None)
    if depth is None:
        if exc_type is None:
            raise RegionOrderError(
                f"{spec} is being left in a thread that has not entered it, or that has left it already; enter and "
                "leave a region in one thread, once each and in order, with `with` or as a decorator"
            )
        return
    inner = [region.spec for region in regions[depth + 1 :] if not region.spec.of_module]
    leave_down_to(depth)
    if inner and (exc_type is None or issubclass(exc_type, (GeneratorExit, asyncio.CancelledError))):
        raise RegionOrderError(
            f"{spec} was left while {inner[-1]}, entered after it, was still open: both have been left; leave regions "
            "in the reverse of the order they were entered. A generator or coroutine that is suspended inside `with "
            "autocast():` does this: decorate its function with autocast instead"
        )


def leave_down_to(depth: int) -> None:
    """Leave the innermost regions until `depth` are open."""
    while len(thread.regions) > depth:
        _leave_innermost()


def _leave_innermost() -> None:
    region = thread.regions.pop()
    if region.at_end is not None:
        region.at_end()
    write(region.before, region.state)
    if torch.autocast_decrement_nesting() == 0:
        clear_torch_cache()
    if not thread.regions or thread.regions[-1].cache is not region.cache:
        region.cache.clear()


def leave_ended_graphs() -> None:
    """Leave the innermost regions that compiled graphs have entered whose calls an exception has ended.

    Only graphs that `torch.compile(backend="eager")` runs hold regions. While Dynamo traces, such a region stays: a
    trace must leave the thread's state as it was.
    """
    regions = thread.regions
    while regions and regions[-1].graph is not None:
        if _on_stack(regions[-1].graph) or tracer() is not None:
            return
        _leave_innermost()


def _keys(mode: AutocastMode | None, before: tuple[bool, bool, bool, bool]) -> tuple[bool, bool, bool, bool]:
    """`State.keys` of a region whose operators reach a mode; None: none."""
    included, excluded, torch_included, torch_excluded = before
    if mode is not None and mode.key is KEY:
        return True, False, torch_included, torch_included or torch_excluded
    if mode is not None:
        return included, included or excluded, True, False
    return included, included or excluded, torch_included, torch_included or torch_excluded


def _cache(device_type: str) -> WeightCasts:
    """The cache of a region: the enclosing region's, else the thread's; its own in the capture of a CUDA graph."""
    in_capture = device_type == "cuda" and is_capturing(CURRENT_CUDA)
    if thread.regions and thread.regions[-1].cache.in_capture == in_capture:
        return thread.regions[-1].cache
    if in_capture:
        return WeightCasts(in_capture=True)
    thread.cache = thread.cache or WeightCasts()
    return thread.cache


def _mode(spec: RegionSpec, outer: AutocastMode | None, cache: WeightCasts) -> AutocastMode:
    """The mode of a region: its policy for its device type, the enclosing mode's policies for the other types."""
    policies: tuple[tuple[str, Policy], ...]
    if outer is None:
        policies = ((spec.device_type, spec.policy or DEFAULT_POLICIES[spec.device_type]),)
    else:
        inherited = dict(outer.policies)
        policy = spec.policy or inherited.get(spec.device_type) or DEFAULT_POLICIES[spec.device_type]
        policies = tuple({**inherited, spec.device_type: policy}.items())
    observer = next(reversed(observers), None)
    # `register_op` changes the rules of every policy.
    key = policies, spec.cache_enabled, cache.in_capture, register_changes(), observer
    mode = thread.modes.get(key)
    if mode is None or (mode.cache is not None and mode.cache is not cache):
        self_check.once()
        if len(thread.modes) >= _MOST_MODES:
            thread.modes.clear()
        mode = thread.modes[key] = AutocastMode(policies, cache if spec.cache_enabled else None, observer)
    return mode


def _on_stack(frame: FrameType) -> bool:
    """Whether the call of a frame is still running in this thread."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None
