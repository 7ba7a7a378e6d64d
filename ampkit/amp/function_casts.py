"""Casts for single functions under Apex's names: `half_function`, `register_half_function`, `disable_casts`, ...

They act inside `ampkit.autocast`, and so inside the forward of a model at O1. Registering a torch function adds a rule
for its operator; functions of users and other libraries are wrapped. torch itself is not patched.
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
from ampkit.dispatch.casting import is_eligible
from ampkit.dispatch.dynamo_guard import TAG_DEVICES
from ampkit.policy.policy import register_op
from ampkit.policy.rules import Rule
from ampkit.policy.torch_lists import TORCH
from ampkit.region.autocast import autocast
from ampkit.region.custom_function import cast_eligible
from ampkit.region.decorate import runner_for, wrapper_for
from ampkit.torch_private import OpOverload, OpOverloadPacket

P = ParamSpec("P")
R = TypeVar("R")


def half_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Cast the tensor arguments of a function to the region's dtype. Never synchronizes.

    Outside a region the function is called unchanged.

    Args:
        fn: the function; its tensors may also be in lists, tuples, mappings and dataclasses.

    Returns:
        A function with the signature of `fn`.

    Raises:
        TypeError: `fn` is not a function.

    >>> @half_function
    ... def double(x):
    ...     return x + x
    >>> with autocast("cpu", torch.bfloat16):
    ...     double(torch.ones(1))
    tensor([2.], dtype=torch.bfloat16)
    """
    return _casting(fn, Rule.LOWER, "half_function")


def float_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Compute a function in float32: cast its tensor arguments up and turn autocast off inside. Never synchronizes.

    For code that needs float32 precision, such as rotary embeddings, quaternions or a solver. Unlike
    `autocast(enabled=False)` it names no device, and computes in float32 from 16-bit arguments as well; so does
    backward. `Policy.for_modules` does the same for modules::

        @float_function
        def rotary(positions, frequencies):
            return (positions[:, None] @ frequencies[None]).cos()

    Arguments are cast as by `custom_fwd(cast_inputs=torch.float32)`: floating-point tensors on a device whose autocast
    is on, float64 excepted, in lists, tuples, mappings and dataclasses included; a method of a dataclass gets a copy of
    it. Tensors that are not arguments, such as 16-bit weights of a module, are not cast. Results are float32.

    Outside a region, and if autocast is off, the function is called unchanged.

    Args:
        fn: a function, method, generator function or coroutine function.

    Returns:
        A function with the signature of `fn`.

    Raises:
        TypeError: `fn` is not a function, or is an asynchronous generator function.

    >>> @float_function
    ... def product(x):
    ...     return x @ x
    >>> with autocast("cpu", torch.bfloat16):
    ...     product(torch.ones(1, 1, dtype=torch.bfloat16))
    tensor([[1.]])
    """
    return _casting(fn, Rule.FLOAT32, "float_function")


def promote_function(fn: Callable[P, R]) -> Callable[P, R]:
    """Cast the tensor arguments of a function to the widest dtype among them. Never synchronizes.

    Outside a region the function is called unchanged.

    Args:
        fn: the function; its tensors may also be in lists, tuples, mappings and dataclasses.

    Returns:
        A function with the signature of `fn`.

    Raises:
        TypeError: `fn` is not a function.
    """
    return _casting(fn, Rule.PROMOTE, "promote_function")


def register_half_function(owner: Any, name: str) -> None:
    """Compute `owner.name` in the region's dtype, in all regions entered later. Never synchronizes.

    A torch function (`register_half_function(torch, "bmm")`) is registered with `register_op`, and so is an operator of
    `torch.library`. Any other function is replaced in its module or class by `half_function` of it.

    Args:
        owner: the module or class that has the function, such as `torch`, `torch.nn.functional` or `torch.Tensor`.
        name: the function's name in it.

    Raises:
        AttributeError: `owner` has no such function.
        ValueError: a torch function that is not a single operator.
    """
    _register(owner, name, Rule.LOWER, "half_function")


def register_float_function(owner: Any, name: str) -> None:
    """Compute `owner.name` in float32; raises as `register_half_function`.

    Args:
        owner: the module or class that has the function.
        name: the function's name in it.
    """
    _register(owner, name, Rule.FLOAT32, "float_function")


def register_promote_function(owner: Any, name: str) -> None:
    """Compute `owner.name` in the widest dtype of its arguments; raises as `register_half_function`.

    Args:
        owner: the module or class that has the function.
        name: the function's name in it.
    """
    _register(owner, name, Rule.PROMOTE, "promote_function")


@contextmanager
def disable_casts() -> Iterator[None]:
    """Disable open regions inside a `with` block. A model at O1 that is called inside opens its own region.

    Never synchronizes.

    >>> with autocast("cpu", torch.bfloat16), disable_casts():
    ...     torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype
    torch.float32
    """
    with _Disabled():
        yield


class _Disabled:
    """Context in which autocast is off for every device type; reusable."""

    def __enter__(self) -> None:
        with ExitStack() as regions:
            for device_type in _enabled():
                regions.enter_context(autocast(device_type, enabled=False))
            self.regions = regions.pop_all()

    def __exit__(self, *exc: Any) -> None:
        self.regions.__exit__(*exc)


def _enabled() -> list[str]:
    """Return the device types whose autocast is on."""
    return [name for name in TORCH if torch.is_autocast_enabled(name) and name not in TAG_DEVICES]


def _casting(fn: Callable[P, R], rule: Rule, name: str) -> Callable[P, R]:
    """Wrap `fn` to cast its tensor arguments by `rule` if a region is open for their device."""
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"{name} takes a function, got {fn!r}; decorate a module's forward, not its class")
    function: Callable[..., Any] = fn
    run = runner_for(fn) if rule is Rule.FLOAT32 else None

    def call(*args: Any, **kwargs: Any) -> Any:
        device_types = _enabled()
        for device_type in device_types:
            dtype = _dtype(rule, device_type, (args, kwargs))
            args, kwargs = cast_eligible(args, device_type, dtype), cast_eligible(kwargs, device_type, dtype)
        if rule is not Rule.FLOAT32:
            return function(*args, **kwargs)
        if run is not None:
            return run(_Disabled(), function(*args, **kwargs))
        return _disabled(device_types, function, args, kwargs)

    decorated = wrapper_for(fn, call) if rule is Rule.FLOAT32 else functools.wraps(fn)(call)
    decorated._ampkit_casts = name  # type: ignore[attr-defined]
    return decorated


def _disabled(device_types: list[str], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `function` with autocast off for these device types; recursive, as torch.compile traces no `ExitStack`."""
    if not device_types:
        return function(*args, **kwargs)
    with autocast(device_types[0], enabled=False):
        return _disabled(device_types[1:], function, args, kwargs)


def _dtype(rule: Rule, device_type: str, arguments: Any) -> torch.dtype:
    """Return the dtype that `rule` gives the tensors among `arguments` that are on this device."""
    if rule is Rule.FLOAT32:
        return torch.float32
    if rule is Rule.LOWER:
        return torch.get_autocast_dtype(device_type)
    dtypes: list[torch.dtype] = []

    def note(tensor: Tensor) -> Tensor:
        if is_eligible(tensor, device_type):
            dtypes.append(tensor.dtype)
        return tensor

    map_tensors(arguments, note)
    return dtypes[0] if len(set(dtypes)) == 1 else torch.float32


def _register(owner: Any, name: str, rule: Rule, decorator: str) -> None:
    """Add a rule for a torch function or operator; wrap any other function in its place."""
    fn = getattr(owner, name, None)
    if fn is None:
        raise AttributeError(f"{getattr(owner, '__name__', owner)} has no function {name!r} to register")
    origin = owner.__name__ if isinstance(owner, types.ModuleType) else getattr(owner, "__module__", "")
    if isinstance(fn, OpOverload | OpOverloadPacket | torch.library.CustomOpDef):
        register_op(fn, rule)
    elif origin.partition(".")[0] == "torch":
        register_op(_operator(owner, name), rule)
    elif not hasattr(fn, "_ampkit_casts"):
        setattr(owner, name, _casting(fn, rule, decorator))


def _operator(owner: Any, name: str) -> OpOverloadPacket:
    """Return the operator of a torch function: `linalg_norm` for `torch.linalg.norm`, `bmm` for `torch.bmm`."""
    module = getattr(owner, "__name__", "").rpartition(".")[2]
    for candidate in (f"{module}_{name}", name, f"{name}_loss"):
        packet = getattr(torch.ops.aten, candidate, None)
        if isinstance(packet, OpOverloadPacket):
            return packet
    raise ValueError(
        f"{getattr(owner, '__name__', owner)}.{name} is not a single operator, and a rule names one; register the "
        f"operators that it calls (`record_casts` lists them), or call it in a decorated function of your own"
    )
