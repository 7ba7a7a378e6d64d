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

from ampkit.containers import map_tensors
from ampkit.engine.casting import is_eligible
from ampkit.engine.policy_mark import MARK_DEVICES
from ampkit.policy.op_table import TORCH, Rule
from ampkit.policy.policy import register_op
from ampkit.region.autocast import autocast
from ampkit.region.custom_function import cast_eligible
from ampkit.region.decorate import in_pieces, in_place_of
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

    For a function, method, generator or coroutine that 16 bits spoil, and whose arguments may come in 16 bits: rotary
    embeddings, quaternions, a solver. Unlike `autocast(enabled=False)` it names no device, and computes in float32
    whatever comes in; so does its backward. `Policy.for_modules` does it to modules::

        @float_function
        def rotary(positions, frequencies):
            return (positions[:, None] @ frequencies[None]).cos()

    Arguments are cast as by `custom_fwd(cast_inputs=torch.float32)`: floating-point tensors on a device whose autocast
    is on, float64 excepted, in lists, tuples, mappings and dataclasses too; a method of a dataclass gets a copy of it.
    What the function reads elsewhere, such as 16-bit weights of its module, stays as it is. Results stay float32:
    rounding them would lose what was gained, and the next operator that wants 16 bits casts by itself.

    Outside a region, and where autocast is off, it is called as it is: nothing casts 16-bit weights there either.

    Raises:
        TypeError: anything but a function, or an asynchronous generator function.

    >>> @float_function
    ... def product(x):
    ...     return x @ x
    >>> with autocast("cpu", torch.bfloat16):
    ...     product(torch.ones(1, 1, dtype=torch.bfloat16))
    tensor([[1.]])
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
    with _Disabled():
        yield


class _Disabled:
    """Context in which autocast is off; may be entered again after it was left."""

    def __enter__(self) -> None:
        with ExitStack() as regions:
            for kind in _enabled():
                regions.enter_context(autocast(kind, enabled=False))
            self.regions = regions.pop_all()

    def __exit__(self, *exc: Any) -> None:
        self.regions.__exit__(*exc)


def _enabled() -> list[str]:
    """The device types whose autocast is on."""
    return [kind for kind in TORCH if torch.is_autocast_enabled(kind) and kind not in MARK_DEVICES]


def _casting(fn: Callable[P, R], rule: Rule, name: str) -> Callable[P, R]:
    """`fn` with its tensor arguments cast by `rule` where a region is open for their device."""
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"{name} takes a function, got {fn!r}; decorate a module's forward, not its class")
    function: Callable[..., Any] = fn
    run = in_pieces(fn) if rule is Rule.FLOAT32 else None

    def call(*args: Any, **kwargs: Any) -> Any:
        kinds = _enabled()
        for kind in kinds:
            dtype = _dtype(rule, kind, (args, kwargs))
            args, kwargs = cast_eligible(args, kind, dtype), cast_eligible(kwargs, kind, dtype)
        if rule is not Rule.FLOAT32:
            return function(*args, **kwargs)
        if run is not None:
            return run(_Disabled(), function(*args, **kwargs))
        return _disabled(kinds, function, args, kwargs)

    decorated = in_place_of(fn, call) if rule is Rule.FLOAT32 else functools.wraps(fn)(call)
    decorated._ampkit_casts = name  # type: ignore[attr-defined]
    return decorated


def _disabled(kinds: list[str], function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call with autocast off for these device types. No `ExitStack`: torch.compile traces none."""
    if not kinds:
        return function(*args, **kwargs)
    with autocast(kinds[0], enabled=False):
        return _disabled(kinds[1:], function, args, kwargs)


def _dtype(rule: Rule, kind: str, values: Any) -> torch.dtype:
    if rule is not Rule.PROMOTE:
        return torch.float32 if rule is Rule.FLOAT32 else torch.get_autocast_dtype(kind)
    dtypes: list[torch.dtype] = []
    map_tensors(values, lambda tensor: dtypes.append(tensor.dtype) or tensor if is_eligible(tensor, kind) else tensor)
    return dtypes[0] if len(set(dtypes)) == 1 else torch.float32


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
