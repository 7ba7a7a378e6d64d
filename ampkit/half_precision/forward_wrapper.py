"""Wraps the forward of a module by giving the module a subclass of its class.

Replicas share the class, so each thread of `nn.DataParallel` runs the wrapped forward itself; copies and pickles are
wrapped too. Forward hooks would need no subclass, but miss direct calls of `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.nn import Module

__all__ = ["WrappedForward", "Wrapper"]

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
