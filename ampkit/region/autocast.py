"""autocast: the region in which operators run in the precision their policy says.

The regions of a thread are a stack. An `autocast` object holds only what it was constructed with; everything an
entry changes is kept per entry, so one object may be entered again while it is open, and a decorated function may
recurse. A region writes torch's own autocast state (enabled, dtype, cache flag) as `torch.autocast` does, and puts
`_lifted_mode.AutocastMode` above it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
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
            leave_ended(_regions())
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
    def __enter__(self) -> autocast:
        return self.enter()

    @_compiled.runs_as_it_is
    def enter(self, root: Module | None = None) -> autocast:
        """As `with`; paths of `Policy.for_modules` count from `root` where one is given. Leave with `leave`."""
        if _compiled.tracing():
            _compiled_modules.enter(self, root)
            return self
        stack = _regions()
        leave_ended(stack)
        _module_regions.leave_interrupted()
        stack.append(_Region(self, stack, root))
        return self

    @_compiled.runs_as_it_is
    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> Literal[False]:
        self.leave()
        return False

    @_compiled.runs_as_it_is
    def leave(self) -> None:
        """Leave the region, which must be the innermost open one of this thread."""
        if _compiled.tracing():
            _compiled_modules.leave(self)
            return
        stack = _regions()
        leave_ended(stack)
        if not stack or stack[-1].owner is not self:
            _leave_interrupted(self, stack)
        stack.pop().leave(last=not stack)
        while stack and stack[-1].overdue:
            stack.pop().leave(last=not stack)

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
    """One entry of an `autocast`: what it changed, and what to put back."""

    __slots__ = ("cache", "dtype", "enabled", "entered", "flag", "graph", "hooks", "kind", "overdue", "owner")

    def __init__(self, owner: autocast, stack: list[_Region], root: Module | None) -> None:
        kind = owner._kind
        outer = _lifted_mode.current()
        if _checkpoint_frames.top_hooks(True) is not None:
            _checkpoint_frames.note_region(outer)
        self.owner = owner
        self.overdue = False        # its `with` ended too early; it is left together with the region inside it
        self.graph: FrameType | None = None     # the call of a compiled graph that entered it
        self.kind = kind
        self.enabled = torch.is_autocast_enabled(kind)
        self.dtype = torch.get_autocast_dtype(kind)
        self.flag = torch.is_autocast_cache_enabled()
        self.cache = self._cache(owner, stack)
        policy, policies = _policies(outer, kind, owner.policy)
        active = owner._enabled or any(torch.is_autocast_enabled(other) for other, _ in policies if other != kind)
        self.entered = Entered(_mode(policies, self.cache if owner._cache_enabled else None), outer, active=active)
        torch.set_autocast_enabled(kind, owner._enabled)
        torch.set_autocast_dtype(kind, owner.fast_dtype)
        torch.set_autocast_cache_enabled(owner._cache_enabled)
        torch.autocast_increment_nesting()
        self.hooks = _module_regions.watch(policy, root) if owner._enabled and policy.modules else None

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
        if self.hooks is not None:
            self.hooks.remove()
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(self.kind, self.enabled)
        torch.set_autocast_dtype(self.kind, self.dtype)
        torch.set_autocast_cache_enabled(self.flag)
        self.entered.leave()
        if self.owner.cache is not None:
            self.owner.cache.leave()
        elif last:
            self.cache.clear()


def is_autocast_enabled(device_type: str | None = None) -> bool:
    """Whether autocast is on for a device type, in this thread, here. None is the current accelerator, else CPU."""
    return torch.is_autocast_enabled(device_kind(device_type))


def get_autocast_dtype(device_type: str | None = None) -> torch.dtype:
    """The dtype that a region for a device type casts to, or would. None is the current accelerator, else CPU."""
    return torch.get_autocast_dtype(device_kind(device_type))


def clear_autocast_cache() -> None:
    """Drop the weight casts of the regions open in this thread; weights are cast anew at their next use."""
    for region in _regions():
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


_uncached_modes: dict[Any, AutocastMode] = {}
_default_policies: dict[str, Policy] = {}
_thread = threading.local()


def _regions() -> list[_Region]:
    """The regions open in this thread, outermost first."""
    try:
        return _thread.regions
    except AttributeError:
        _thread.regions = []
        return _thread.regions


def leave_ended(stack: list[_Region]) -> None:
    """Leave the innermost regions that compiled graphs entered whose call has ended with an exception."""
    while stack and stack[-1].graph is not None and not is_running(stack[-1].graph):
        if _compiled.tracer() is not None:
            return      # a trace must leave the thread's state as it was
        stack.pop().leave(last=not stack)


def _leave_interrupted(region: autocast, stack: list[_Region]) -> None:
    """Leave the regions of modules inside `region` whose forward was interrupted; `RuntimeError` for any other."""
    inner = [n for n, entry in enumerate(reversed(stack)) if entry.owner is region and not entry.overdue]
    if not inner:
        raise RuntimeError(_out_of_order(region, None))
    if not all(entry.owner.of_module for entry in stack[len(stack) - inner[0] :]):
        stack[-1 - inner[0]].overdue = True
        raise RuntimeError(_out_of_order(region, stack[-1].owner))
    for _ in range(inner[0]):
        stack.pop().leave(last=False)


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


@contextlib.contextmanager
def reentered(
    policies: tuple[tuple[str, Policy], ...], *, cached: bool, watch: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """A context for a recompute: regions with these policies, a cache of its own, and modules followed by `watch`.

    Enabled flags and dtypes are the caller's to restore, around it.
    """
    mode = recording.new_mode(policies, RegionCache() if cached else None)
    entered = Entered(mode, _lifted_mode.current(), active=bool(policies))
    try:
        with watch():
            yield
    finally:
        leave_ended(_regions())     # a recompute ends with an exception when it has what backward needs
        entered.leave()


def _run_again(mode: AutocastMode, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for a recompute in backward, under the policies of its forward.

    torch's checkpoint restores the enabled flags and dtypes itself.
    """
    watch = _module_regions.watch_again()

    def recompute(*args: Any, **kwargs: Any) -> Any:
        with reentered(mode.policies, cached=mode.cache is not None, watch=watch):
            return function(*args, **kwargs)

    return recompute


_checkpoint_frames.reenter = _run_again
