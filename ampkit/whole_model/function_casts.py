"""Casts for single functions, by Apex's names: half, float and promote, as decorators and by registration.

They act where a region does: inside `ampkit.autocast`, and so inside the forward of a model at O1. A torch function is
registered as a rule for its operator; a user's function, or one of another library, is wrapped. torch itself stays as
it is.
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
from ampkit.region.autocast import autocast
from ampkit.torch_internals.operators import OpOverload, OpOverloadPacket

P = ParamSpec("P")
R = TypeVar("R")


def half_function(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn` with its tensor arguments cast to the region's dtype, containers looked into; for use as a decorator.

    Outside a region it is called as it is.

    Raises:
        TypeError: anything but a function.

    >>> @half_function
    ... def double(x):
    ...     return x + x
    >>> with autocast("cpu", torch.bfloat16):
    ...     double(torch.ones(1))
    tensor([2.], dtype=torch.bfloat16)
    """
    return _casting(fn, Rule.LOWER, "half_function")


def float_function(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn` computed in float32: its tensor arguments are cast up, and autocast is off inside.

    Outside a region it is called as it is.

    Raises:
        TypeError: anything but a function.
    """
    return _casting(fn, Rule.FLOAT32, "float_function")


def promote_function(fn: Callable[P, R]) -> Callable[P, R]:
    """`fn` with its tensor arguments cast to the widest dtype among them.

    Outside a region it is called as it is.

    Raises:
        TypeError: anything but a function.
    """
    return _casting(fn, Rule.PROMOTE, "promote_function")


def register_half_function(owner: Any, name: str) -> None:
    """Have `owner.name` run in the region's dtype, in every region from now on.

    A function of torch (`register_half_function(torch, "bmm")`, also in `torch.nn.functional`, `torch.linalg`,
    `torch.Tensor`) is registered with `register_op`, and so is an operator of `torch.library`. Any other is replaced in
    its module or class by `half_function` of itself.

    Raises:
        AttributeError: `owner` has no such function. ValueError: a torch function that is no single operator.
    """
    _register(owner, name, Rule.LOWER, "half_function")


def register_float_function(owner: Any, name: str) -> None:
    """Have `owner.name` run in float32; see `register_half_function`."""
    _register(owner, name, Rule.FLOAT32, "float_function")


def register_promote_function(owner: Any, name: str) -> None:
    """Have `owner.name` run in the widest dtype of its arguments; see `register_half_function`."""
    _register(owner, name, Rule.PROMOTE, "promote_function")


@contextmanager
def disable_casts() -> Iterator[None]:
    """Casts nothing: open regions are disabled. A model at O1 that is called inside opens its own.

    >>> with autocast("cpu", torch.bfloat16), disable_casts():
    ...     torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
    torch.float32
    """
    with ExitStack() as disabled:
        for device_type in TORCH:
            if torch.is_autocast_enabled(device_type):
                disabled.enter_context(autocast(device_type, enabled=False))
        yield


def _casting(fn: Callable[P, R], rule: Rule, name: str) -> Callable[P, R]:
    """`fn` with its tensor arguments cast by `rule` where a region is open for the device of one of them."""
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"{name} takes a function, got {fn!r}; decorate a module's forward, not its class")
    function: Callable[..., Any] = fn

    @functools.wraps(fn)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []
        map_tensors((args, kwargs), lambda tensor: tensors.append(tensor) or tensor)
        device_type = next(filter(_is_enabled, (tensor.device.type for tensor in tensors)), None)
        dtype = None if device_type is None else _dtype(rule, tensors, device_type)
        if device_type is None or dtype is None:
            return function(*args, **kwargs)
        cast = casting.cast_to(device_type, dtype).tensor
        args, kwargs = map_tensors(args, cast), map_tensors(kwargs, cast)
        if rule is not Rule.FLOAT32:
            return function(*args, **kwargs)
        with autocast(device_type, enabled=False):
            return function(*args, **kwargs)

    decorated._ampkit_casts = name  # type: ignore[attr-defined]
    return decorated


def _is_enabled(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _dtype(rule: Rule, tensors: list[Tensor], device_type: str) -> torch.dtype | None:
    if rule is Rule.PROMOTE:
        return casting.widest_dtype(tensors, device_type)
    return torch.float32 if rule is Rule.FLOAT32 else torch.get_autocast_dtype(device_type)


def _register(owner: Any, name: str, rule: Rule, decorator: str) -> None:
    fn = getattr(owner, name, None)
    if fn is None:
        raise AttributeError(f"{getattr(owner, '__name__', owner)} has no function {name!r} to register")
    origin = owner.__name__ if isinstance(owner, types.ModuleType) else getattr(owner, "__module__", "")
    if isinstance(fn, OpOverload | OpOverloadPacket) or hasattr(fn, "_opoverload"):
        register_op(fn, rule)
    elif origin.partition(".")[0] == "torch":
        register_op(_operator(owner, name), rule)
    elif not hasattr(fn, "_ampkit_casts"):
        setattr(owner, name, _casting(fn, rule, decorator))


def _operator(owner: Any, name: str) -> OpOverloadPacket:
    """The operator behind a torch function: `linalg_norm` for `torch.linalg.norm`, else by its own name."""
    module = getattr(owner, "__name__", "").rpartition(".")[2]
    for candidate in (f"{module}_{name}", name, f"{name}_loss"):
        packet = getattr(torch.ops.aten, candidate, None)
        if isinstance(packet, OpOverloadPacket):
            return packet
    raise ValueError(
        f"{getattr(owner, '__name__', owner)}.{name} is no single operator that a rule could name; register the "
        f"operators it is made of (`record_casts` lists them), or call it in a function of yours that is decorated"
    )
