"""wrap_forward: a region around the forward of a module whose source one cannot decorate.

The module's class is replaced by a subclass of it that differs in one thing: its forward is decorated with `autocast`.
Replicas share the class, so each thread of `nn.DataParallel` enters the region itself; copies and pickles wrap the
copy. Forward hooks would do without the class, but a `KeyboardInterrupt` in forward would leave the region open.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.nn import Module

from ampkit.containers import cast_tree
from ampkit.dtypes import as_dtype
from ampkit.engine.weight_cache import WeightCache
from ampkit.policy.module_paths import is_scripted
from ampkit.policy.policy import Policy
from ampkit.region.autocast import autocast

__all__ = ["unwrap_forward", "wrap_forward"]

M = TypeVar("M", bound=Module)


class Wrapper(Protocol):
    """What is done around a forward: a value that can be copied and pickled."""

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward(module, ...)`, wrapped."""
        ...


class WrappedForward(Module):
    """What the class of a module derives from, beside the class it had, when its forward has been wrapped.

    Wrappers of one sort share a subclass of this one, which distinguishes them from others; a module may have several.
    Copies and pickles are made as the class underneath, and wrapped again.
    """

    _ampkit_wrappers: dict[type[WrappedForward], tuple[type[Module], Wrapper]]

    @classmethod
    def put_around(cls, module: Module, wrapper: Wrapper) -> None:
        """Wrap the forward of `module`, in it and in every replica and copy of it."""
        object.__setattr__(module, "__class__", cls._wrapped(type(module), wrapper))

    @classmethod
    def _wrapped(cls, inner: type[Module], wrapper: Wrapper) -> type[Module]:
        body: dict[str, Any] = {
            "forward": wrapper.around(inner.forward),
            "_ampkit_wrappers": {**getattr(inner, "_ampkit_wrappers", {}), cls: (inner, wrapper)},
            "__module__": inner.__module__, "__qualname__": inner.__qualname__, "__doc__": inner.__doc__,
        }
        later = getattr(inner, "cls_to_become", None)     # the class that a lazy module takes at its first call
        if later is not None:
            body["cls_to_become"] = cls._wrapped(later, wrapper)
        return type(inner.__name__, (cls, inner), body)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """How to make the module again: with the class that it had before all wrappers, and these around it."""
        make, arguments, *rest = super().__reduce_ex__(protocol)  # type: ignore[misc]
        inner = next(iter(self._ampkit_wrappers.values()))[0]
        arguments = tuple(inner if value is type(self) else value for value in arguments)
        wrappers = [(sort, wrapper) for sort, (_, wrapper) in self._ampkit_wrappers.items()]
        return (_wrapped_again, (wrappers, make, arguments), *rest)


def _wrapped_again(
    wrappers: list[tuple[type[WrappedForward], Wrapper]], make: Callable[..., M], arguments: tuple[Any, ...]
) -> M:
    """A copied or unpickled module before it has its state."""
    module = make(*arguments)
    for sort, wrapper in wrappers:
        sort.put_around(module, wrapper)
    return module


class _Region(NamedTuple):
    """The region that `wrap_forward` opens: its arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cast_outputs: torch.dtype | None = None

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` in the region."""
        inside, dtype = autocast(*self.args, **self.kwargs)(forward), self.cast_outputs
        if dtype is None:
            return inside

        @functools.wraps(forward)
        def cast(*args: Any, **kwargs: Any) -> Any:
            return cast_tree(inside(*args, **kwargs), dtype)

        return cast


class _Wrapped(WrappedForward):
    """Modules under `wrap_forward`."""


def wrap_forward(
    module: M,
    device_type: str | None = None,
    dtype: torch.dtype | str | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    *,
    policy: Policy | str | None = None,
    cache: WeightCache | None = None,
    cast_outputs: torch.dtype | str | None = None,
) -> M:
    """Run `module`'s forward, from now on and in every replica and copy, inside `autocast` with these arguments.

    As decorating `forward` with `autocast`, for modules one cannot edit: threads of `nn.DataParallel` or
    `parallel_apply` each enter the region themselves. Each call is a region of its own, which casts every weight: in
    `generate()` for each token. `cache=WeightCache()` keeps casts from call to call, as far as it can see that weights
    were not written, which is why it is not the default. `cast_outputs`: a dtype, or its name, for the floating-point
    tensors that forward returns, in any nesting of containers; None leaves them. Returns `module`, whose class is now a
    subclass of the one it had; `unwrap_forward` gives that back.

    Raises:
        TypeError: anything but a module or a dtype.
        ValueError: an unknown name of a dtype.
        RuntimeError: a module that is wrapped already, is scripted, or has a forward of its own that its class does
            not know.
    """
    if not isinstance(module, Module):
        raise TypeError(f"wrap_forward takes an nn.Module, got {type(module).__name__}; decorate functions instead")
    outputs = as_dtype(cast_outputs)
    if outputs is not None and not isinstance(outputs, torch.dtype):
        raise (ValueError if isinstance(outputs, str) else TypeError)(
            f"cast_outputs is {outputs!r}; expected a torch.dtype such as torch.float32, its name, or None"
        )
    cls = type(module)
    if isinstance(module, _Wrapped):
        raise RuntimeError(f"this {cls.__name__} is wrapped already; a second region would only repeat the first")
    if is_scripted(module):
        raise RuntimeError(
            "this module is scripted or traced: TorchScript runs its forward, which cannot be decorated; call it in "
            "`with autocast(...):`, or wrap an nn.Module that calls it"
        )
    if "forward" in vars(module):
        raise RuntimeError(
            f"this {cls.__name__} was given a forward of its own, which its class does not know; decorate that: "
            "module.forward = autocast(...)(module.forward)"
        )
    args = device_type, dtype, enabled, cache_enabled
    _Wrapped.put_around(module, _Region(args, {"policy": policy, "cache": cache}, outputs))
    return module


def unwrap_forward(module: M) -> M:
    """Take away what `wrap_forward` put around `module`'s forward; replicas and copies keep theirs. Returns `module`.

    Raises:
        TypeError: anything but a module.
        RuntimeError: a module that is not wrapped, or whose class something else (`initialize`, `half`) changed after.
    """
    if not isinstance(module, Module):
        raise TypeError(f"unwrap_forward takes an nn.Module, got {type(module).__name__}")
    cls = type(module)
    if not isinstance(module, _Wrapped):
        raise RuntimeError(f"this {cls.__name__} is not under wrap_forward: there is nothing to take away")
    if _Wrapped not in cls.__bases__:
        raise RuntimeError(f"the forward of this {cls.__name__} was wrapped by something else after wrap_forward")
    object.__setattr__(module, "__class__", module._ampkit_wrappers[_Wrapped][0])
    return module
