"""`custom_fwd` and `custom_bwd`: the autocast state of a `torch.autograd.Function`'s forward, restored in its backward.

Backward may run in another thread, in another region or outside any. Unlike torch's decorators of these names, these
also restore the policy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import torch

from ampkit.containers import map_tensors
from ampkit.dispatch.casting import is_eligible
from ampkit.dispatch.dispatcher import current_mode
from ampkit.policy.policy import Policy
from ampkit.region.arguments import TORCH_POLICIES, RegionSpec, autocast_device_type, region_text
from ampkit.region.autocast import autocast
from ampkit.region.compiled import enter_by_text, leave_region
from ampkit.torch_private import called_while_tracing, tracing

__all__ = ["custom_bwd", "custom_fwd"]

# Looked up in torch, whose module has a `__getattr__`, they would take ten times as long.
_is_enabled, _dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
_cache_flag = torch.is_autocast_cache_enabled

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
    """Decorate the `forward`, and `setup_context`, of an autograd function whose `backward` has `custom_bwd`.

    The autocast state is saved for backward. If `forward` takes no `ctx`, decorate `setup_context` with the same
    arguments: it saves the state. Never synchronizes with the device.

    Args:
        fwd: the function; None, as in `@custom_fwd(device_type="cuda")`: a decorator is returned.
        device_type: a device type; None: the current accelerator, or the CPU without one.
        cast_inputs: None: the body runs in the autocast state of its caller. A dtype: in a region, floating-point
            tensor arguments on the device, float64 excepted, in any nesting of containers, are cast to it, and the body
            runs with autocast disabled; outside a region nothing changes.

    Returns:
        The decorated function.

    Raises:
        ValueError: `device_type` is not a string.
        RuntimeError: the device has no autocast.
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    kind = autocast_device_type(device_type)

    @functools.wraps(fwd)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        enabled = _is_enabled(kind)
        ctx: tuple[Any, ...] = args[:1] if len(args) > 0 and hasattr(args[0], "save_for_backward") else ()
        if ctx:
            policy = _policy_text(kind) if tracing() else _open_policy(kind)
            ctx[0]._ampkit_state = enabled and cast_inputs is None, _dtype_of(kind), policy
        if cast_inputs is None or not enabled:
            return fwd(*args, **kwargs)
        with autocast(kind, enabled=False):
            # Without `ctx`: before torch 2.12 Dynamo cannot trace whether it is a dataclass.
            inputs = cast_eligible(args[len(ctx) :], kind, cast_inputs)
            return fwd(*ctx, *inputs, **cast_eligible(kwargs, kind, cast_inputs))

    return decorated


@overload  # Any parameters: `backward(ctx, grad)` narrows the `*grad_outputs` of the method that it overrides.
def custom_bwd(bwd: Callable[..., R], *, device_type: str | None = None) -> Callable[..., R]: ...
@overload
def custom_bwd(*, device_type: str | None = None) -> Callable[[Callable[..., R]], Callable[..., R]]: ...
def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str | None = None) -> Callable[..., Any]:
    """Decorate the `backward` of an autograd function, to run in the autocast state that its forward ran in.

    That state overrides the region in which backward is called. Never synchronizes with the device.

    Args:
        bwd: the function; None, as in `@custom_bwd(device_type="cuda")`: a decorator is returned.
        device_type: a device type; None: the current accelerator, or the CPU without one.

    Returns:
        The decorated function.

    Raises:
        AttributeError: in backward, if `forward`, or `setup_context` if there is one, has no `custom_fwd`.
        ValueError: `device_type` is not a string.
        RuntimeError: the device has no autocast.
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
                "setup_context if it has one"
            )
        enabled, dtype, policy = state
        if isinstance(policy, Policy):
            with autocast._of(RegionSpec(kind, dtype, enabled, _cache_flag(), policy)):
                return bwd(*args, **kwargs)
        enter_by_text(region_text(kind, enabled, dtype, torch.is_autocast_cache_enabled(), policy))  # in the same trace
        try:
            return bwd(*args, **kwargs)
        finally:
            leave_region()

    return decorated


@called_while_tracing
def _policy_text(kind: str) -> str:
    """Return the `Policy.text` of the open region's policy for a device type."""
    return _open_policy(kind).text


def _open_policy(kind: str) -> Policy:
    """Return the open region's policy for a device type; outside regions, and in `torch.autocast`, torch.amp's list."""
    mode = current_mode()
    return (None if mode is None else mode.policy_for(kind)) or TORCH_POLICIES[kind]


def cast_eligible(tree: Any, kind: str, dtype: torch.dtype) -> Any:
    """Cast the tensors in `tree`, any nesting of containers, that a region of this device type would cast."""
    return map_tensors(tree, lambda tensor: tensor.to(dtype) if is_eligible(tensor, kind) else tensor)
