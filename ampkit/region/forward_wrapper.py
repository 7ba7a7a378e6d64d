"""wrap_forward: a region around the forward of a module whose source one cannot decorate.

The module's class is replaced by a subclass of it that differs in one thing: its forward is decorated with `autocast`.
Replicas share the class, so each thread of `nn.DataParallel` enters the region itself; copies and pickles wrap the
copy. Forward hooks would do without the class, but a `KeyboardInterrupt` in forward would leave the region open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.nn import Module

from ampkit.region.autocast import autocast

__all__ = ["wrap_forward"]

M = TypeVar("M", bound=Module)


class _Wrapped(Module):
    """What the class of a wrapped module derives from beside the class it had."""

    _ampkit_wraps: tuple[type[Module], tuple[Any, ...], dict[str, Any]]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        cls, args, kwargs = self._ampkit_wraps
        make, arguments, *rest = super().__reduce_ex__(protocol)
        arguments = tuple(cls if value is type(self) else value for value in arguments)
        return (_make, (make, arguments), (rest[0] if rest else None, args, kwargs), *rest[1:])


class _Unfinished(Module):
    """What the class of a copy derives from until it has its state.

    The region's arguments come with the state, after the modules in it: their policy may name one of them.
    """

    def __setstate__(self, saved: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> None:
        state, args, kwargs = saved
        _, cls = type(self).__bases__
        self.__class__ = cls
        if state is not None:
            self.__setstate__(state)
        self.__class__ = _wrapped_class(cls, args, kwargs)      # pyright: ignore[reportAttributeAccessIssue]


def _make(make: Callable[..., M], arguments: tuple[Any, ...]) -> M:
    module = make(*arguments)
    unfinished: Any = type(type(module).__name__, (_Unfinished, type(module)), {})
    module.__class__ = unfinished
    return module


def wrap_forward(module: M, *args: Any, **kwargs: Any) -> M:
    """Run `module`'s forward, from now on and in every replica and copy, inside `autocast(*args, **kwargs)`.

    As decorating `forward` with `autocast`, for modules one cannot edit: threads of `nn.DataParallel` or
    `parallel_apply` each enter the region themselves. Returns `module`, whose class is now a subclass of the one it
    had. Raises `TypeError` for anything but a module, `RuntimeError` if it is wrapped already or has a forward of its
    own that its class does not know, and what `autocast` raises.
    """
    if not isinstance(module, Module):
        raise TypeError(f"wrap_forward takes an nn.Module, got {type(module).__name__}; decorate functions instead")
    cls = type(module)
    if isinstance(module, _Wrapped):
        raise RuntimeError(f"this {cls.__name__} is wrapped already; a second region would only repeat the first")
    if "forward" in vars(module):
        raise RuntimeError(
            f"this {cls.__name__} was given a forward of its own, which its class does not know; decorate that: "
            "module.forward = autocast(...)(module.forward)"
        )
    module.__class__ = _wrapped_class(cls, args, kwargs)
    return module


def _wrapped_class(cls: type[Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> type[Module]:
    body: dict[str, Any] = {
        "forward": autocast(*args, **kwargs)(cls.forward), "_ampkit_wraps": (cls, args, kwargs),
        "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__,
    }
    later = getattr(cls, "cls_to_become", None)     # the class that a lazy module takes at its first call
    if later is not None:
        body["cls_to_become"] = _wrapped_class(later, args, kwargs)
    return type(cls.__name__, (_Wrapped, cls), body)
