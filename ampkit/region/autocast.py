"""`autocast`, the region that users enter: a context manager and a decorator.

An `autocast` object holds a checked description and nothing else, so one object may be entered again while it is open,
and a decorated function may recurse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, Self, TypeVar

import torch

from ampkit.forks import clear_torch_cache
from ampkit.policy.policy import Policy
from ampkit.region.arguments import RegionSpec, checked_spec
from ampkit.region.checkpoint import wrap_checkpoints
from ampkit.region.decorate import in_region
from ampkit.region.module_hooks import apply_module_rules, enter_in_trace, leave_in_trace
from ampkit.region.stack import enter, leave, leave_ended_graphs, thread
from ampkit.torch_private import called_while_tracing, dynamo_skip, tracing

__all__ = ["autocast", "clear_autocast_cache"]

P = ParamSpec("P")
R = TypeVar("R")


class autocast:
    """Region of automatic mixed precision, instead of `torch.autocast`.

    Use it as a context manager, or as a decorator of a function, method, generator or coroutine::

        with autocast("cuda"):
            loss = loss_fn(model(x), y)

    Inside, the inputs of matrix products and convolutions are cast to `dtype`. Softmax, norms and losses compute in
    float32. Operators that need one dtype for all inputs get the widest. `Policy.explain` returns the rule of an
    operator, and the reason for it. A function decorated with `ampkit.amp.float_function` computes in float32 inside.

    If the device or the dtype is not available, the region warns and is disabled, as in torch. Making, entering and
    leaving a region never synchronize with the device.

    Args:
        device_type: a device type or a string like `"cuda:0"`; None: the current accelerator, or `"cpu"` without one.
        dtype: the dtype, or its name, of operators in low precision; None: the enclosing region's. The
            outermost region uses float16 on accelerators and bfloat16 on CPU.
        enabled: False makes a disabled region, in which nothing is cast.
        cache_enabled: whether the cast of a weight is cached until the outermost region of the thread ends; None: as
            in the enclosing region, or True without one. An outer `autocast(device_type, enabled=False)` around several
            regions keeps their casts: around micro-batches, or the tokens of a generation loop.
        policy: a policy for the device type, "torch" or "default"; None: the enclosing region's policy for this device
            type, or the default policy.

    Raises:
        TypeError, ValueError: an argument has a wrong type, or a name is unknown.
        RuntimeError: the device has no autocast or no bfloat16; on leaving, an inner region is still open. It ends as
            well.
    """

    spec: RegionSpec

    @dynamo_skip
    def __init__(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | str | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: Policy | str | None = None,
    ) -> None:
        if not tracing() and thread.regions:
            leave_ended_graphs()  # which would be the enclosing region
        self.spec = checked_spec(device_type, dtype, enabled, cache_enabled, policy)

    @classmethod
    def _of(cls, spec: RegionSpec) -> autocast:
        """Return the region of a checked spec, without checking it again."""
        region = cls.__new__(cls)
        region.spec = spec
        return region

    @property
    def device(self) -> str:
        """The device, as the user wrote it."""
        return self.spec.device or self.spec.device_type

    @property
    def fast_dtype(self) -> torch.dtype:
        """The dtype that operators in low precision compute in."""
        return self.spec.dtype

    @property
    def _enabled(self) -> bool:  # these two names are torch's: libraries read them
        return self.spec.enabled

    @property
    def _cache_enabled(self) -> bool:
        return self.spec.cache_enabled

    def __repr__(self) -> str:
        return str(self.spec)

    @dynamo_skip
    def __enter__(self) -> Self:
        if tracing():
            _wrap_checkpoints()
            enter_in_trace(self.spec)
        else:
            wrap_checkpoints()
            region = enter(self.spec)
            if region.state.mode.with_module_rules:
                apply_module_rules(region)
        return self

    @dynamo_skip
    def __exit__(self, exc_type: Any = None, exc_value: Any = None, traceback: Any = None) -> Literal[False]:
        if tracing():
            leave_in_trace()
        else:
            leave(self.spec, exc_type)
        return False

    def __call__(self, func: Callable[P, R]) -> Callable[P, R]:
        """Wrap `func`, a function, method, generator or coroutine function, so that its body runs inside the region."""
        return in_region(self, func)


@called_while_tracing
def _wrap_checkpoints() -> bool:
    wrap_checkpoints()
    return True


def clear_autocast_cache() -> None:
    """Drop the weight casts of this thread's open regions and of `torch.autocast`. Never synchronizes.

    Weights are cast again at their next use.
    """
    for region in thread.regions:
        region.cache.clear()
    clear_torch_cache()
