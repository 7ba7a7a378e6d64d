"""autocast: the region in which operators run in the precision their policy says.

The regions of a thread are a stack. An `autocast` object holds only what it was constructed with; everything an
entry changes is kept per entry, so one object may be entered again while it is open, and a decorated function may
recurse. A region writes torch's own autocast state (enabled, dtype, cache flag) as `torch.autocast` does, and puts
`_lifted_mode.AutocastMode` above it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

import torch
from torch.nn import Module

from ampkit.policy.policy import Policy, register_changes
from ampkit.region import (
    _checkpoint_frames,
    _compiled,
    _compiled_modules,
    _decorate,
    _lifted_mode,
    _module_regions,
    _self_check,
    recording,
)
from ampkit.region._lifted_mode import AutocastMode, Entered
from ampkit.region._region_arguments import available, checked_dtype, checked_flag, current_device_type, device_kind
from ampkit.region._unwound import is_running
from ampkit.region.weight_cache import RegionCache, WeightCache, capturing

__all__ = [
    "autocast", "clear_autocast_cache", "float32_region", "get_autocast_dtype", "is_autocast_enabled",
]


class autocast:
    """Region of automatic mixed precision; takes the place of `torch.autocast`.

    Use it as a context manager, or as a decorator of a function, method, generator or coroutine::

        with autocast("cuda"):
            loss = loss_fn(model(x), y)

    Inside, matrix products, convolutions and the like take `dtype` inputs; softmax, norms and losses float32 ones;
    operators that need one dtype for all inputs get the widest. `Policy.explain` says what an operator does and why.

    `device_type`: a device type or a string like `"cuda:0"`; None is the current accelerator, else `"cpu"`.
    `dtype`: None is the enclosing region's, else float16 on accelerators and bfloat16 on CPU.
    `enabled`: False makes an island in which nothing is cast.
    `cache_enabled`: whether the cast of a weight is kept until the outermost region is left; None is the enclosing
    region's choice, else True. `policy`: None is the enclosing region's for this device, else
    `Policy.default(device_type)`. `cache`: a `WeightCache` that outlives the region.

    Warns and disables itself as torch does where the device or the dtype is not to be had. Raises `ValueError` or
    `TypeError` for arguments of the wrong type, `RuntimeError` for a device that has no autocast or no bfloat16, and
    on leaving, if an inner region is still open. Entering and leaving never sync.
    """

    of_module = False       # entered by a rule of `Policy.for_modules`, around one module

    @_compiled.runs_as_it_is
    def __init__(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: Policy | None = None,
        cache: WeightCache | None = None,
    ) -> None:
        if not _compiled.tracing():
            leave_ended(regions())
        self.device = device_type if device_type is not None else current_device_type()
        kind = device_kind(self.device)
        self._kind = kind
        self.fast_dtype = torch.get_autocast_dtype(kind) if dtype is None else checked_dtype(dtype)
        self._enabled = available(self, kind) if checked_flag("enabled", enabled) else False
        if cache_enabled is None:
            cache_enabled = torch.is_autocast_cache_enabled()
        self._cache_enabled = checked_flag("cache_enabled", cache_enabled)
        if policy is not None and (not isinstance(policy, Policy) or policy.device_type != kind):
            raise TypeError(f"policy is {policy!r}; expected a Policy for {kind!r}, such as Policy.default({kind!r})")
        if cache is not None and not isinstance(cache, WeightCache):
            raise TypeError(f"cache is {cache!r}; expected a WeightCache")
        self.policy = policy
        self.cache = cache

    def __repr__(self) -> str:
        more = "" if self.policy is None else f", policy={self.policy!r}"
        return f"autocast({self.device!r}, {self.fast_dtype}, enabled={self._enabled}{more})"

    @_compiled.runs_as_it_is
    def __enter__(self, root: Module | None = None) -> autocast:
        if _compiled.tracing():
            _compiled_modules.enter(self, root)
        else:
            push(self, root)
        return self

    enter = __enter__       # paths of `Policy.for_modules` count from `root`, where one is given

    @_compiled.runs_as_it_is
    def __exit__(self, exc_type: Any = None, exc_value: Any = None, traceback: Any = None) -> Literal[False]:
        depth = None
        try:
            if _compiled.tracing():
                _compiled_modules.leave(self)
                return False
            stack = regions()
            innermost = bool(stack) and stack[-1].owner is self and not stack[-1].overdue
            depth = len(stack) - 1 if innermost else _depth_without(self, stack, exc_type)
            leave_down_to(stack, depth)
        except BaseException as error:      # an interrupt kept leaving from beginning, or cut it short
            stack = regions()
            if depth is None and type(error) is not RuntimeError:
                depth = _depth_without(self, stack, exc_type)
            if depth is not None:
                leave_down_to(stack, depth)
            raise
        return False

    leave = __exit__

    def is_open(self) -> bool:
        """Whether it was entered in this thread, and not left."""
        return any(region.owner is self for region in regions())

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """`func` with its body run inside the region, also when it is a generator or a coroutine."""
        return _decorate.in_region(self, func)


class float32_region(autocast):
    """Region that computes everything in float32, whatever comes in: an island that also casts its inputs.

    `autocast(enabled=False)` leaves low-precision tensors as they are, and they then meet float32 weights. Here they
    are cast up. Arguments, and use as a decorator, as of `autocast`.
    """

    @_compiled.runs_as_it_is
    def __init__(self, device_type: str | None = None, *, policy: Policy | None = None) -> None:
        super().__init__(device_type, None, False, policy=policy)
        self.fast_dtype = torch.float32
        self._enabled = True


class _Region:
    """One entry of an `autocast`: what it changed, and what to put back.

    Made before it changes anything, and put back as values: `leave` undoes an `enter` that an exception has cut short,
    an interrupt or an error, and completes a `leave` that was cut short.
    """

    __slots__ = (
        "cache", "dtype", "enabled", "entered", "flag", "frame", "hooks", "kind", "overdue", "owner", "whole",
    )

    def __init__(
        self, owner: autocast, stack: list[_Region], root: Module | None, frame: FrameType | None
    ) -> None:
        kind = owner._kind
        outer = _lifted_mode.current()
        if _checkpoint_frames.top_hooks(True) is not None:
            _checkpoint_frames.note_region(outer)
        self.owner = owner
        self.frame = frame          # of the compiled graph that enters it, whose call an exception may end
        self.overdue = False        # to be left as soon as nothing is open inside it
        self.whole = False          # entered to the end, and leaving it has not begun
        self.kind = kind
        self.enabled = torch.is_autocast_enabled(kind)
        self.dtype = torch.get_autocast_dtype(kind)
        self.flag = torch.is_autocast_cache_enabled()
        self.cache = self._cache(owner, stack)
        self.hooks: _module_regions.Watch | None = None
        policy, policies = _policies(outer, kind, owner.policy)
        if owner._enabled and policy.modules:
            self.hooks = _module_regions.Watch(policy, root)
        active = owner._enabled or any(torch.is_autocast_enabled(other) for other, _ in policies if other != kind)
        self.entered = Entered(_mode(policies, self.cache if owner._cache_enabled else None), outer, active=active)

    def enter(self) -> None:
        """Make the region the thread's."""
        owner = self.owner
        self.entered.enter()
        torch.set_autocast_enabled(self.kind, owner._enabled)
        torch.set_autocast_dtype(self.kind, owner.fast_dtype)
        torch.set_autocast_cache_enabled(owner._cache_enabled)
        _levels[self]
        if self.hooks is not None:
            self.hooks.begin()
        self.whole = True

    def _cache(self, owner: autocast, stack: list[_Region]) -> WeightCache:
        """The cache of this entry: its own if it was given one, else the enclosing region's, else a new one."""
        capture = capturing()
        if owner.cache is not None and not capture:
            owner.cache.enter()
            return owner.cache
        if stack and stack[-1].cache.in_capture == capture:
            return stack[-1].cache
        if capture:
            fresh = RegionCache()
            fresh.in_capture = True
            return fresh
        return _thread_cache()

    def leave(self, *, last: bool) -> None:
        """Put back what was found on entry."""
        again = not self.whole
        self.overdue = True         # if this is cut short, the next region that is entered or left completes it
        self.whole = False
        if self.hooks is not None:
            self.hooks.remove()
        if again:
            self._uncount_again()
        elif torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(self.kind, self.enabled)
        torch.set_autocast_dtype(self.kind, self.dtype)
        torch.set_autocast_cache_enabled(self.flag)
        self.entered.leave(again=again)
        if self.owner.cache is not None:
            self.owner.cache.leave()
        elif last:
            self.cache.clear()
        _levels.pop(self, None)

    def _uncount_again(self) -> None:
        """Take the region out of torch's count, where it may not be in it, or no longer."""
        level = _levels.get(self)
        if level is None:
            return
        now = torch.autocast_decrement_nesting()
        while now >= level:
            now = torch.autocast_decrement_nesting()
        while now < level - 1:
            now = torch.autocast_increment_nesting()
        if now == 0:
            torch.clear_autocast_cache()


def is_autocast_enabled(device_type: str | None = None) -> bool:
    """Whether autocast is on for a device type, in this thread, here. None is the current accelerator, else CPU."""
    return torch.is_autocast_enabled(device_kind(device_type))


def get_autocast_dtype(device_type: str | None = None) -> torch.dtype:
    """The dtype that a region for a device type casts to, or would. None is the current accelerator, else CPU."""
    return torch.get_autocast_dtype(device_kind(device_type))


def clear_autocast_cache() -> None:
    """Drop the weight casts of the regions open in this thread; weights are cast anew at their next use."""
    for region in regions():
        region.cache.clear()
    torch.clear_autocast_cache()


def default_policy(kind: str) -> Policy:
    """The policy of a region that was given none; one object for each device type."""
    found = _default_policies.get(kind)
    if found is None:
        found = _default_policies[kind] = Policy.default(kind)
    return found


def _policies(
    outer: AutocastMode | None, kind: str, policy: Policy | None
) -> tuple[Policy, tuple[tuple[str, Policy], ...]]:
    """The policy of a region for a device type, and those of all devices with it."""
    if outer is None:
        policy = policy or default_policy(kind)
        return policy, ((kind, policy),)
    policies = dict(outer.policies)
    policies[kind] = policy or policies.get(kind) or default_policy(kind)
    return policies[kind], tuple(policies.items())


def _mode(policies: tuple[tuple[str, Policy], ...], cache: WeightCache | None) -> AutocastMode:
    """The mode for these policies and this cache; made once, unless `register_op` has changed the rules since."""
    modes = _uncached_modes if cache is None else cache.modes
    mode = modes.get(policies)
    if mode is None or mode.changes != register_changes() or mode.record is not recording.current():
        _self_check.once()
        if len(modes) >= 16:
            modes.clear()
        mode = modes[policies] = recording.new_mode(policies, cache)
    return mode


def _thread_cache() -> WeightCache:
    """The cache of this thread's regions that were given none; empty while no region is open."""
    try:
        return _thread.cache
    except AttributeError:
        _thread.cache = RegionCache()
        return _thread.cache


# Entry -> its level in torch's count of open regions. Looking an entry up the first time counts it: one instruction,
# so an interrupt comes before or after it, and whether an entry is counted is never in doubt.
_levels: defaultdict[_Region, int] = defaultdict(torch.autocast_increment_nesting)
_uncached_modes: dict[Any, AutocastMode] = {}
_default_policies: dict[str, Policy] = {}
_thread = threading.local()


def regions() -> list[_Region]:
    """The regions open in this thread, outermost first."""
    try:
        return _thread.regions
    except AttributeError:
        _thread.regions = []
        return _thread.regions


def push(owner: autocast, root: Module | None = None, frame: FrameType | None = None) -> None:
    """Enter a region; `frame` is that of the compiled graph that enters it, if one does."""
    stack = regions()
    if stack:
        leave_ended(stack)
    _module_regions.leave_interrupted()
    region = _Region(owner, stack, root, frame)
    depth = len(stack)
    try:
        stack.append(region)
        region.enter()
    except BaseException:
        leave_down_to(stack, depth)
        raise


def leave_down_to(stack: list[_Region], depth: int) -> None:
    """Leave the innermost regions of this thread until so many are open, and those around them that are overdue."""
    try:
        while len(stack) > depth or (stack and stack[-1].overdue):
            stack[-1].leave(last=len(stack) == 1)
            stack.pop()
    except BaseException:       # an interrupt: what it has cut short is done over
        while len(stack) > depth or (stack and stack[-1].overdue):
            stack[-1].leave(last=len(stack) == 1)
            stack.pop()
        raise


def leave_ended(stack: list[_Region]) -> None:
    """Leave the innermost regions that are overdue, or entered by a compiled graph whose call an exception ended."""
    while stack:
        frame = stack[-1].frame
        if not stack[-1].overdue and (frame is None or is_running(frame) or _compiled.tracer() is not None):
            return      # a trace must leave the thread's state as it was
        leave_down_to(stack, len(stack) - 1)


def _depth_without(region: autocast, stack: list[_Region], exc_type: type[BaseException] | None) -> int:
    """How many regions are open once `region` is left, with those inside that have to go with it.

    Those are of modules, whose forward was interrupted; and any, where an interrupt ends the region, which may have hit
    the leaving of theirs. `RuntimeError` for a region that is not open, or not the innermost.
    """
    leave_ended(stack)
    depth = len(stack) - 1
    while depth >= 0 and (stack[depth].owner is not region or stack[depth].overdue):
        depth -= 1
    if depth < 0:
        raise RuntimeError(_out_of_order(region, None))
    interrupted = exc_type is not None and issubclass(exc_type, (KeyboardInterrupt, SystemExit))
    if not interrupted and not all(inner.owner.of_module for inner in stack[depth + 1 :]):
        stack[depth].overdue = True
        raise RuntimeError(_out_of_order(region, stack[-1].owner))
    return depth


def _out_of_order(region: autocast, innermost: autocast | None) -> str:
    if innermost is None:
        return (
            f"{region} is being left in a thread that never entered it, or left twice; enter and leave a region in "
            "one thread, by `with` or as a decorator"
        )
    return (
        f"{region} is being left while {innermost}, entered after it, is still open, and stays open until that one is "
        "left; leave regions in the reverse of the order they were entered. A generator or coroutine that is suspended "
        "inside `with autocast():` does this: decorate its function with autocast instead"
    )
