"""`wrap_forward`: a region around the forward of a module whose source one cannot decorate.

The module's class is replaced by a subclass that differs only in its forward, which is decorated with `autocast`.
Replicas share the class, so each thread of `nn.DataParallel` enters the region itself; copies and pickles are wrapped
too. Forward hooks would need no subclass, but a `KeyboardInterrupt` in forward would leave the region open.

`half_precision.boundary` wraps forwards with a `Wrapper` of its own.
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
    """Something to do around a forward. It is copied and pickled with the module."""

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `forward(module, ...)`, a function of the class."""
        ...


class WrappedForward(Module):
    """Base of the classes of wrapped modules, beside the class that the module had.

    Each sort of wrapper has a subclass of this class; a module may have a wrapper of each sort. Copies and pickles are
    made with the original class, and wrapped again.
    """

    _ampkit_wrappers: dict[type[WrappedForward], tuple[type[Module], Wrapper]]  # sort -> (class inside, wrapper)

    @classmethod
    def put_around(cls, module: Module, wrapper: Wrapper) -> None:
        """Wrap the forward of `module`, and of every replica and copy made of it later."""
        object.__setattr__(module, "__class__", cls._wrapped(type(module), wrapper))

    @classmethod
    def _wrapped(cls, inner: type[Module], wrapper: Wrapper) -> type[Module]:
        """A subclass of `inner` with its forward wrapped."""
        body: dict[str, Any] = {
            "forward": wrapper.around(inner.forward),
            "_ampkit_wrappers": {**getattr(inner, "_ampkit_wrappers", {}), cls: (inner, wrapper)},
            "__module__": inner.__module__,
            "__qualname__": inner.__qualname__,
            "__doc__": inner.__doc__,
        }
        later = getattr(inner, "cls_to_become", None)  # the class that a lazy module takes at its first call
        if later is not None:
            body["cls_to_become"] = cls._wrapped(later, wrapper)
        return type(inner.__name__, (cls, inner), body)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """How to make the module again: with the class that it had before all wrappers, then wrapped."""
        make, arguments, *rest = super().__reduce_ex__(protocol)  # type: ignore[misc]
        original = next(iter(self._ampkit_wrappers.values()))[0]  # that of the first wrapper
        arguments = tuple(original if argument is type(self) else argument for argument in arguments)
        wrappers = [(sort, wrapper) for sort, (_, wrapper) in self._ampkit_wrappers.items()]
        return (_wrapped_again, (wrappers, make, arguments), *rest)


def _wrapped_again(
    wrappers: list[tuple[type[WrappedForward], Wrapper]], make: Callable[..., M], arguments: tuple[Any, ...]
) -> M:
    """Make a module that is copied or unpickled, wrapped and still without its state."""
    module = make(*arguments)
    for sort, wrapper in wrappers:
        sort.put_around(module, wrapper)
    return module


class _RegionWrapper(NamedTuple):
    """The wrapper of `wrap_forward`: the arguments of its region."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cast_outputs: torch.dtype | None = None

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Run `forward` in the region, and cast its outputs."""
        decorated, dtype = autocast(*self.args, **self.kwargs)(forward), self.cast_outputs
        if dtype is None:
            return decorated

        @functools.wraps(forward)
        def with_cast_outputs(*args: Any, **kwargs: Any) -> Any:
            return cast_tree(decorated(*args, **kwargs), dtype)

        return with_cast_outputs


class _WrappedInRegion(WrappedForward):
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

    The same as decorating `forward`, for modules one cannot edit: each thread of `nn.DataParallel` or `parallel_apply`
    enters the region itself. Each call is a region of its own that casts all weights again, in `generate()` for each
    token. Wrapping and calling never synchronize with the device.

    Args:
        module: the module; its class is replaced by a subclass, which `unwrap_forward` undoes.
        device_type, dtype, enabled, cache_enabled, policy: as for `autocast`, at each call.
        cache: `WeightCache()` keeps casts from call to call. It is not the default because it cannot detect every write
            to a weight.
        cast_outputs: dtype, or its name, to which the floating-point tensors that forward returns are cast, in any
            nesting of containers; None leaves them.

    Returns:
        `module`.

    Raises:
        TypeError: `module` is not a module, or an argument has a wrong type.
        ValueError: the name of a dtype or policy is unknown.
        RuntimeError: the module is wrapped already or scripted, it has a forward of its own beside its class's, or the
            device has no autocast.
    """
    if not isinstance(module, Module):
        raise TypeError(f"wrap_forward takes an nn.Module, got {type(module).__name__}; decorate functions instead")
    outputs = as_dtype(cast_outputs)
    if outputs is not None and not isinstance(outputs, torch.dtype):
        raise (ValueError if isinstance(outputs, str) else TypeError)(
            f"cast_outputs is {outputs!r}; expected a torch.dtype such as torch.float32, its name, or None"
        )
    cls = type(module)
    if isinstance(module, _WrappedInRegion):
        raise RuntimeError(f"this {cls.__name__} is wrapped already; a second region would only repeat the first")
    if is_scripted(module):
        raise RuntimeError(
            "this module is scripted or traced: TorchScript runs its forward, which cannot be decorated; call it in "
            "`with autocast(...):`, or wrap an nn.Module that calls it"
        )
    if "forward" in vars(module):
        raise RuntimeError(
            f"this {cls.__name__} was given a forward of its own, in place of its class's; decorate that: "
            "module.forward = autocast(...)(module.forward)"
        )
    args = device_type, dtype, enabled, cache_enabled
    _WrappedInRegion.put_around(module, _RegionWrapper(args, {"policy": policy, "cache": cache}, outputs))
    return module


def unwrap_forward(module: M) -> M:
    """Undo `wrap_forward`; replicas and copies stay wrapped. Never synchronizes with the device.

    Args:
        module: the wrapped module.

    Returns:
        `module`.

    Raises:
        TypeError: `module` is not a module.
        RuntimeError: the module is not wrapped, or was wrapped by `amp.initialize` or `half` afterwards.
    """
    if not isinstance(module, Module):
        raise TypeError(f"unwrap_forward takes an nn.Module, got {type(module).__name__}")
    cls = type(module)
    if not isinstance(module, _WrappedInRegion):
        raise RuntimeError(f"this {cls.__name__} is not under wrap_forward: there is nothing to undo")
    if _WrappedInRegion not in cls.__bases__:
        raise RuntimeError(f"the forward of this {cls.__name__} was wrapped by something else after wrap_forward")
    object.__setattr__(module, "__class__", module._ampkit_wrappers[_WrappedInRegion][0])
    return module
