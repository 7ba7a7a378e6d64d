"""custom_fwd and custom_bwd: autocast inside a `torch.autograd.Function`.

A function's backward may run anywhere: in another thread, in a region or outside. These decorators make it see the
autocast state its forward saw. Unlike torch's, they also carry the policy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import torch

from ampkit.containers import map_tensors
from ampkit.engine.casting import is_eligible
from ampkit.policy.policy import Policy
from ampkit.region import traced
from ampkit.region.arguments import NAMED_POLICIES, RegionSpec, autocast_device_type
from ampkit.region.autocast import autocast
from ampkit.torch_internals.dispatcher import current
from ampkit.torch_internals.dynamo import called_while_tracing, tracing

__all__ = ["custom_bwd", "custom_fwd"]

P = ParamSpec("P")
R = TypeVar("R")


@overload
def custom_fwd(
    fwd: Callable[P, R], *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> Callable[P, R]: ...
@overload
def custom_fwd(
    *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def custom_fwd(
    fwd: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
) -> Callable[..., Any]:
    """Decorator for the `forward` (and `setup_context`) of an autograd function; `custom_bwd` goes on its `backward`.

    Without `cast_inputs` the body runs in the ambient autocast state. With it, in a region, floating-point tensor
    arguments on the device (float64 excepted, containers looked into) are cast to that dtype and the body runs with
    autocast off; outside a region it changes nothing. `device_type` None is the current accelerator, else the CPU.
    A `forward` without `ctx` has a `setup_context`: decorate that with the same arguments, since it is what records the
    state for backward.

    Raises:
        ValueError: a device type that is no string.
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    kind = autocast_device_type(device_type)

    @functools.wraps(fwd)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        enabled = torch.is_autocast_enabled(kind)
        ctx: tuple[Any, ...] = args[:1] if len(args) > 0 and hasattr(args[0], "save_for_backward") else ()
        if ctx:
            inside = enabled and cast_inputs is None, torch.get_autocast_dtype(kind)
            if tracing():
                ctx[0]._ampkit_state = *inside, _rules(kind)
            else:
                ctx[0]._ampkit_state = RegionSpec(kind, inside[1], inside[0], True, _policy_here(kind))
        if cast_inputs is None or not enabled:
            return fwd(*args, **kwargs)
        with autocast(kind, enabled=False):
            # Not `ctx`: before torch 2.12 Dynamo cannot ask it whether it is a dataclass.
            rest = cast_eligible(args[len(ctx) :], kind, cast_inputs)
            return fwd(*ctx, *rest, **cast_eligible(kwargs, kind, cast_inputs))

    return decorated


@overload       # Any parameters: `backward(ctx, grad)` narrows the `*grad_outputs` of the method that it overrides.
def custom_bwd(bwd: Callable[..., R], *, device_type: str | None = None) -> Callable[..., R]: ...
@overload
def custom_bwd(*, device_type: str | None = None) -> Callable[[Callable[..., R]], Callable[..., R]]: ...
def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str | None = None) -> Callable[..., Any]:
    """Decorator for the `backward` of an autograd function: it runs in the autocast state its forward ran in.

    That state overrides the region that backward was called in.

    Raises:
        AttributeError: in backward, if `forward`, or `setup_context` where there is one, has no `custom_fwd`.
        ValueError: a device type that is no string.
    """
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    kind = autocast_device_type(device_type)

    @functools.wraps(bwd)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        state = getattr(args[0], "_ampkit_state", None)
        if state is None:
            raise AttributeError(
                f"{bwd.__qualname__} has custom_bwd, but its forward did not run under custom_fwd; decorate both, and "
                "setup_context where there is one"
            )
        if isinstance(state, RegionSpec):
            with autocast.of(state._replace(cache_enabled=torch.is_autocast_cache_enabled())):
                return bwd(*args, **kwargs)
        enabled, dtype, rules = state       # of a forward in the same trace
        traced.enter_by_constants(kind, dtype, enabled, torch.is_autocast_cache_enabled(), rules)
        try:
            return bwd(*args, **kwargs)
        finally:
            traced.leave_region()

    return decorated


@called_while_tracing
def _rules(kind: str) -> str:
    """The active rules for a device type, as a `Policy.text`."""
    return _policy_here(kind).text


def _policy_here(kind: str) -> Policy:
    """The active policy for a device type; torch.amp's in a region of torch's, or in none."""
    mode = current()
    return (None if mode is None else dict(mode.policies).get(kind)) or NAMED_POLICIES["torch", kind]


def cast_eligible(value: Any, kind: str, dtype: torch.dtype) -> Any:
    """`value` with the eligible tensors in it cast, in any nesting of containers."""
    return map_tensors(value, lambda tensor: tensor.to(dtype) if is_eligible(tensor, kind) else tensor)
