"""custom_fwd and custom_bwd: autocast inside a `torch.autograd.Function`.

A function's backward may run anywhere: in another thread, in a region or outside. These decorators make it see the
autocast state its forward saw. Unlike torch's, they also carry the policy, and work with `setup_context`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch.autograd.function import Function

from ampkit.policy.casting import is_eligible
from ampkit.policy.policy import Policy
from ampkit.region import graph
from ampkit.region.arguments import autocast_device_type
from ampkit.region.autocast import autocast
from ampkit.region.spec import RegionSpec
from ampkit.region.thread_state import thread
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
    """Decorator for the `forward` of an autograd function; `custom_bwd` on its `backward` goes with it.

    Without `cast_inputs` the body runs in the ambient autocast state. With it, in a region, floating-point tensor
    arguments on the device (float64 excepted, containers looked into) are cast to that dtype and the body runs with
    autocast off; outside a region it changes nothing. `device_type` None is the current accelerator, else the CPU.
    `forward` may take `ctx` or leave it to `setup_context`. Raises `ValueError` for a device type that is no string.
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    kind = autocast_device_type(device_type)

    @functools.wraps(fwd)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        enabled = torch.is_autocast_enabled(kind)
        ctx: Any = args[0] if args and hasattr(args[0], "save_for_backward") else None
        if ctx is not None and tracing():
            state: Any = (enabled and cast_inputs is None, torch.get_autocast_dtype(kind), _rules(kind))
        else:
            state = RegionSpec(
                kind, torch.get_autocast_dtype(kind), enabled and cast_inputs is None, True, _policy_here(kind)
            )
        if ctx is not None:
            ctx._ampkit_state = state
        if cast_inputs is None or not enabled:
            output = fwd(*args, **kwargs)
        else:
            with autocast(kind, enabled=False):
                output = fwd(*_cast(args, kind, cast_inputs), **_cast(kwargs, kind, cast_inputs))
        if ctx is None:     # only now: the body may have applied other functions
            _await_setup_context(fwd, state)
        return output

    decorated._ampkit_wraps = fwd  # type: ignore[attr-defined]
    return decorated


@overload       # Any parameters: `backward(ctx, grad)` narrows the `*grad_outputs` of the method that it overrides.
def custom_bwd(bwd: Callable[..., R], *, device_type: str | None = None) -> Callable[..., R]: ...
@overload
def custom_bwd(*, device_type: str | None = None) -> Callable[[Callable[..., R]], Callable[..., R]]: ...
def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str | None = None) -> Callable[..., Any]:
    """Decorator for the `backward` of an autograd function: it runs in the autocast state its forward ran in.

    That state overrides the region that backward was called in. Raises `AttributeError` in backward if `forward` has
    no `custom_fwd`, `ValueError` for a device type that is no string.
    """
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    kind = autocast_device_type(device_type)

    @functools.wraps(bwd)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        state = getattr(args[0], "_ampkit_state", None)
        if state is None:
            raise AttributeError(
                f"{bwd.__qualname__} has custom_bwd, but its forward did not run under custom_fwd; decorate both"
            )
        if isinstance(state, RegionSpec):
            with autocast.of(state._replace(cache_enabled=torch.is_autocast_cache_enabled())):
                return bwd(*args, **kwargs)
        enabled, dtype, rules = state       # of a forward in the same trace
        graph.enter(kind, dtype, enabled, torch.is_autocast_cache_enabled(), rules)
        try:
            return bwd(*args, **kwargs)
        finally:
            graph.leave_region()

    return decorated


@called_while_tracing
def _rules(kind: str) -> str:
    """The active rules for a device type, as a `Policy.text`."""
    return _policy_here(kind).text


def _policy_here(kind: str) -> Policy:
    """The active policy for a device type; torch.amp's in a region of torch's, or in none."""
    mode = current()
    return (None if mode is None else dict(mode.policies).get(kind)) or _torch_policy(kind)


_torch_policy = functools.cache(Policy.torch)


def _await_setup_context(fwd: Callable[..., Any], state: RegionSpec) -> None:
    """Hand `state` to the `setup_context` that torch calls right after this forward, since only that gets the ctx."""
    thread.forward = state
    for cls in _applied(sys._getframe(2), fwd):
        if not hasattr(cls.setup_context, "_ampkit_wraps"):
            cls.setup_context = staticmethod(_take_state(cls.setup_context))


def _applied(frame: FrameType | None, fwd: Callable[..., Any]) -> list[type[Function]]:
    """The `Function` being applied; since torch 2.15, where no frame shows it, all that have this forward."""
    while frame is not None:
        cls = frame.f_locals.get("cls") or frame.f_locals.get("autograd_function")
        if isinstance(cls, type) and issubclass(cls, Function) and _forward_is(cls, fwd):
            return [cls]
        frame = frame.f_back
    found, pending = [], [Function]
    while pending:
        for cls in pending.pop().__subclasses__():
            pending.append(cls)
            if _forward_is(cls, fwd) and cls.setup_context is not Function.setup_context:
                found.append(cls)
    return found


def _forward_is(cls: type[Function], fwd: Callable[..., Any]) -> bool:
    return getattr(cls.forward, "_ampkit_wraps", None) is fwd


def _take_state(setup_context: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(setup_context)
    def decorated(ctx: Any, inputs: Any, output: Any) -> Any:
        ctx._ampkit_state = thread.forward
        return setup_context(ctx, inputs, output)

    decorated._ampkit_wraps = setup_context  # type: ignore[attr-defined]
    return decorated


def _cast(value: Any, kind: str, dtype: torch.dtype) -> Any:
    """Eligible tensors cast, containers rebuilt in their own type; strings, bytes, arrays and the rest as they are."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if is_eligible(value, kind) else value
    if isinstance(value, Mapping):
        cast = {_cast(key, kind, dtype): _cast(item, kind, dtype) for key, item in value.items()}
        return cast if type(value) is dict else _rebuilt(value, cast)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, kind, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, kind, dtype) for item in value)
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and not hasattr(value, "__array__"):
        return (_cast(item, kind, dtype) for item in value) if iter(value) is value else value
    return value


def _rebuilt(original: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the original's type; a plain dict where that type cannot be built from one."""
    try:
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:
        return items
