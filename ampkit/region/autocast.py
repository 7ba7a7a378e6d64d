"""autocast: the region in which operators run in the precision their policy says.

An `autocast` object holds a checked description and nothing else, so one object may be entered again while it is open,
and a decorated function may recurse. What an entry changes is the business of `stack`; following modules, of
`module_hooks`; and what Dynamo traces in place of both, of `graph_modules`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.nn import Module

from ampkit.policy.policy import Policy
from ampkit.region import graph_modules
from ampkit.region.arguments import autocast_device_type, checked_spec, float32_spec
from ampkit.region.decorate import in_region
from ampkit.region.module_hooks import Watch, leave_interrupted
from ampkit.region.spec import RegionSpec
from ampkit.region.stack import depth_without, leave_down_to, leave_ended, push
from ampkit.region.thread_state import thread
from ampkit.region.weight_cache import WeightCache
from ampkit.torch_internals.dynamo import dynamo_skip, tracing
from ampkit.torch_internals.forks import clear_torch_cache

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
    `enabled`: False makes a disabled region, in which nothing is cast.
    `cache_enabled`: whether the cast of a weight is kept until the outermost region is left; None is the enclosing
    region's choice, else True. `policy`: None is the enclosing region's for this device, else
    `Policy.default(device_type)`. `cache`: a `WeightCache` that outlives the region.

    Warns and disables itself as torch does where the device or the dtype is not to be had. Raises `ValueError` or
    `TypeError` for arguments of the wrong type, `RuntimeError` for a device that has no autocast or no bfloat16, and
    on leaving, if an inner region is still open. Entering and leaving never sync.
    """

    spec: RegionSpec

    @dynamo_skip
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
        if not tracing() and thread.regions:
            leave_ended(thread.regions)
        self.spec = checked_spec(device_type, dtype, enabled, cache_enabled, policy, cache)

    @classmethod
    def of(cls, spec: RegionSpec) -> autocast:
        """A region that was checked before."""
        region = cls.__new__(cls)
        region.spec = spec
        return region

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "spec" not in state:     # a pickle of a version that had no description apart from the object
            flags = state["_enabled"], state["_cache_enabled"]
            state = {
                "spec": RegionSpec(
                    state["_kind"], state["fast_dtype"], *flags, state["policy"], state["cache"], state["device"]
                )
            }
        vars(self).update(state)

    @property
    def device(self) -> str:
        """The device as it was given."""
        return self.spec.device or self.spec.device_type

    @property
    def fast_dtype(self) -> torch.dtype:
        """The dtype that operators which run in low precision are cast to."""
        return self.spec.dtype

    @property
    def policy(self) -> Policy | None:
        """The policy that was given."""
        return self.spec.policy

    @property
    def cache(self) -> WeightCache | None:
        """The cache that was given."""
        return self.spec.cache

    @property
    def _enabled(self) -> bool:         # torch's names
        return self.spec.enabled

    @property
    def _cache_enabled(self) -> bool:
        return self.spec.cache_enabled

    def __repr__(self) -> str:
        return str(self.spec)

    @dynamo_skip
    def __enter__(self, root: Module | None = None) -> autocast:
        if tracing():
            graph_modules.enter(self.spec, root)
        else:
            leave_interrupted()
            push(self.spec, root, Watch)
        return self

    enter = __enter__       # paths of `Policy.for_modules` count from `root`, where one is given

    @dynamo_skip
    def __exit__(self, exc_type: Any = None, exc_value: Any = None, traceback: Any = None) -> Literal[False]:
        depth = None
        try:
            if tracing():
                graph_modules.leave(self.spec)
                return False
            stack, spec = thread.regions, self.spec
            innermost = bool(stack) and stack[-1].spec is spec and not stack[-1].exit_pending
            depth = len(stack) - 1 if innermost else depth_without(spec, stack, exc_type)
            leave_down_to(stack, depth)
        except BaseException as error:      # an interrupt kept leaving from beginning, or cut it short
            stack, spec = thread.regions, self.spec
            if depth is None and type(error) is not RuntimeError:
                depth = depth_without(spec, stack, exc_type)
            if depth is not None:
                leave_down_to(stack, depth)
            raise
        return False

    leave = __exit__

    def __call__(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """`func` with its body run inside the region, also when it is a generator or a coroutine."""
        return in_region(self, func)


class float32_region(autocast):
    """Region that computes everything in float32, whatever comes in: one that also casts its inputs.

    `autocast(enabled=False)` leaves low-precision tensors as they are, and they then meet float32 weights. Here they
    are cast up where something is computed from them, by any operator of ATen. What computes nothing keeps its dtype:
    views, conversions, writes in place or to `out=`; so do operators of other libraries that no policy lists, and in
    what `torch.export` captures those of ATen on no list. Arguments, and use as a decorator, as of `autocast`.
    """

    @dynamo_skip
    def __init__(self, device_type: str | None = None, *, policy: Policy | None = None) -> None:
        if not tracing() and thread.regions:
            leave_ended(thread.regions)
        self.spec = float32_spec(device_type, policy)


def is_autocast_enabled(device_type: str | None = None) -> bool:
    """Whether autocast is on for a device type, in this thread, here. None is the current accelerator, else CPU."""
    return torch.is_autocast_enabled(autocast_device_type(device_type))


def get_autocast_dtype(device_type: str | None = None) -> torch.dtype:
    """The dtype that a region for a device type casts to, or would. None is the current accelerator, else CPU."""
    return torch.get_autocast_dtype(autocast_device_type(device_type))


def clear_autocast_cache() -> None:
    """Drop the weight casts of the regions open in this thread; weights are cast anew at their next use."""
    for entry in thread.regions:
        entry.cache.clear()
    clear_torch_cache()
