"""Casts for single functions, by Apex's names: half, float and promote, as decorators and by registration.

They act where a region does: inside `ampkit.autocast`, and so inside the forward of a model at O1. A torch
function is registered as a rule for its operator; a function of yours, or of another library, is wrapped.
Nothing of torch's is replaced.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ampkit.containers import map_tensors
from ampkit.policy import casting
from ampkit.policy.op_table import TORCH, Rule
from ampkit.policy.policy import register_op
from ampkit.region.autocast import autocast, float32_region
from ampkit.torch_internals.operators import OpOverload, OpOverloadPacket
from ampkit.whole_model._boundary import casts_disabled

__all__ = [
    "disable_casts", "float_function", "half_function", "promote_function", "register_float_function",
    "register_half_function", "register_promote_function",
]

Function = Callable[..., Any]
P = ParamSpec("P")
R = TypeVar("R")


def half_function(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn` with its tensor arguments cast to the region's dtype, containers looked into; for use as a decorator.

    Outside a region it is called as it is. Raises `TypeError` for what is no function.

    >>> @half_function
    ... def double(x):
    ...     return x + x
    >>> with autocast("cpu", torch.bfloat16):
    ...     double(torch.ones(1))
    tensor([2.], dtype=torch.bfloat16)
    """

    function: Function = fn

    def call(device_type: str, args: Any, kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        return function(*_cast(args, device_type, dtype), **_cast(kwargs, device_type, dtype))

    return _wrapped(fn, call, "half_function")


def float_function(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn` computed in float32: its tensor arguments are cast up, and so is what operators inside it are given.

    Outside a region it is called as it is. Raises `TypeError` for what is no function.
    """

    function: Function = fn

    def call(device_type: str, args: Any, kwargs: Any) -> Any:
        with float32_region(device_type):
            return function(*_cast(args, device_type, torch.float32), **_cast(kwargs, device_type, torch.float32))

    return _wrapped(fn, call, "float_function")


def promote_function(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn` with its tensor arguments cast to the widest dtype among them.

    Outside a region it is called as it is. Raises `TypeError` for what is no function.
    """

    function: Function = fn

    def call(device_type: str, args: Any, kwargs: Any) -> Any:
        found: list[Tensor] = []
        map_tensors((args, kwargs), lambda tensor: found.append(tensor) or tensor)
        dtype = casting.widest_dtype(found, device_type)
        if dtype is None:
            return function(*args, **kwargs)
        return function(*_cast(args, device_type, dtype), **_cast(kwargs, device_type, dtype))

    return _wrapped(fn, call, "promote_function")


def register_half_function(owner: Any, name: str) -> None:
    """Have `owner.name` run in the region's dtype, in every region from now on.

    A function of torch (`register_half_function(torch, "bmm")`, also in `torch.nn.functional`, `torch.linalg`,
    `torch.Tensor`) is registered with `register_op`, and so is an operator of `torch.library`. Any other is
    replaced in its module or class by `half_function` of itself.

    Raises:
        AttributeError: `owner` has no such function. ValueError: a torch function that is no single operator.
    """
    _register(owner, name, Rule.LOWER, half_function)


def register_float_function(owner: Any, name: str) -> None:
    """Have `owner.name` run in float32; see `register_half_function`."""
    _register(owner, name, Rule.FLOAT32, float_function)


def register_promote_function(owner: Any, name: str) -> None:
    """Have `owner.name` run in the widest dtype of its arguments; see `register_half_function`."""
    _register(owner, name, Rule.PROMOTE, promote_function)


@contextmanager
def disable_casts() -> Iterator[None]:
    """Nothing is cast in here: open regions are disabled, and models at O1 enter none. Restored on exceptions too.

    >>> with autocast("cpu", torch.bfloat16), disable_casts():
    ...     torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
    torch.float32
    """
    with ExitStack() as disabled, casts_disabled():
        for device_type in TORCH:
            if torch.is_autocast_enabled(device_type):
                disabled.enter_context(autocast(device_type, enabled=False))
        yield


def _wrapped(fn: Function, call: Callable[[str, Any, Any], Any], name: str) -> Function:
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"{name} takes a function, got {fn!r}; decorate a module's forward, not its class")

    @functools.wraps(fn)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        device_type = _region_of(args, kwargs)
        return fn(*args, **kwargs) if device_type is None else call(device_type, args, kwargs)

    decorated._ampkit_casts = name  # type: ignore[attr-defined]
    return decorated


def _region_of(args: Any, kwargs: Any) -> str | None:
    """The device type of the first tensor argument for whose device autocast is enabled."""
    device_types: list[str] = []
    map_tensors((args, kwargs), lambda tensor: device_types.append(tensor.device.type) or tensor)
    for device_type in dict.fromkeys(device_types):
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            return device_type
    return None


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    return map_tensors(value, casting.cast_to(device_type, dtype).tensor)


def _register(owner: Any, name: str, rule: Rule, decorate: Callable[[Function], Function]) -> None:
    fn = getattr(owner, name, None)
    if fn is None:
        raise AttributeError(f"{getattr(owner, '__name__', owner)} has no function {name!r} to register")
    if isinstance(fn, OpOverload | OpOverloadPacket) or hasattr(fn, "_opoverload"):
        register_op(fn, rule)
    elif _is_torchs(owner):
        register_op(_operator(owner, name), rule)
    elif not hasattr(fn, "_ampkit_casts"):
        setattr(owner, name, decorate(fn))


def _is_torchs(owner: Any) -> bool:
    origin = owner.__name__ if isinstance(owner, types.ModuleType) else getattr(owner, "__module__", "")
    return origin.partition(".")[0] == "torch"


def _operator(owner: Any, name: str) -> OpOverloadPacket:
    """The operator behind a torch function: `linalg_norm` for `torch.linalg.norm`, else by its own name."""
    module = getattr(owner, "__name__", "").rpartition(".")[2]
    for candidate in (f"{module}_{name}", name, f"{name}_loss"):
        packet = getattr(torch.ops.aten, candidate, None)
        if isinstance(packet, OpOverloadPacket):
            return packet
    raise ValueError(
        f"{getattr(owner, '__name__', owner)}.{name} is no single operator that a rule could name; register the "
        f"operators it is made of (Policy.explain tells), or call it in a function of yours that is decorated"
    )
