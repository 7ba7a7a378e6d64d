"""Casts of inputs and outputs, and an autocast region, around a converted module or one in float32 inside it.

The module's class becomes a subclass with another forward. Unlike hooks or a forward stored on the instance, this
covers direct calls of `forward`, lets replicas of `nn.DataParallel` run their own forward, leaves no region open after
an interrupt, and keeps the signature. Copies and pickles are made with the original class, and wrapped again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import Module

from ampkit.containers import cast_tree
from ampkit.policy.module_paths import is_scripted
from ampkit.policy.policy import Policy
from ampkit.region.autocast import autocast

M = TypeVar("M", bound=Module)


class Boundary(NamedTuple):
    """Casts around the calls of a module; a dtype of None means no cast.

    `region`: a 16-bit type opens a region of this dtype with `policy`, float32 turns autocast off, None does nothing.
    `is_inner`: for a module inside a converted model, not for the model itself. `note` is added to errors of dtypes.
    """

    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    region: torch.dtype | None = None
    policy: Policy | None = None
    is_inner: bool = False
    note: str = ""

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `forward(module, ...)` in the casts and a region for the module's device."""

        @functools.wraps(forward)
        def bounded(module: Module, *args: Any, **kwargs: Any) -> Any:
            if self.inputs is not None:
                args, kwargs = cast_tree(args, self.inputs), cast_tree(kwargs, self.inputs)
            try:
                with self._context(module):
                    output = forward(module, *args, **kwargs)
            except RuntimeError as error:
                if self.note and "type" in str(error):
                    error.add_note(self.note)
                raise
            return output if self.outputs is None else cast_tree(output, self.outputs)

        return bounded

    def _context(self, module: Module) -> AbstractContextManager[Any]:
        if self.region is None:
            return nullcontext()
        device_type = device_type_of(module)
        if self.region is not torch.float32:
            return autocast(device_type, self.region, policy=self.policy)
        return autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


class _Bounded(Module):
    """Base of the classes of modules with boundaries, before the class that the module had."""

    _ampkit_class: type[Module]  # the class without boundaries
    _ampkit_boundaries: tuple[Boundary, ...]  # from the inside out

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return a recipe of the module: its class without boundaries, then `_put_again`."""
        make, arguments, *rest = super().__reduce_ex__(protocol)  # type: ignore[misc]
        arguments = tuple(self._ampkit_class if argument is type(self) else argument for argument in arguments)
        return (_put_again, (self._ampkit_boundaries, make, arguments), *rest)


def put_boundary(module: M, boundary: Boundary) -> M:
    """Put `boundary` around every call of `module` and of its copies, by replacing its class; return `module`."""
    object.__setattr__(module, "__class__", _with_boundary(type(module), boundary))
    return module


def _with_boundary(inner: type[Module], boundary: Boundary) -> type[Module]:
    body: dict[str, Any] = {
        "forward": boundary.around(inner.forward),
        "_ampkit_class": getattr(inner, "_ampkit_class", inner),
        "_ampkit_boundaries": (*getattr(inner, "_ampkit_boundaries", ()), boundary),
        "__module__": inner.__module__,
        "__qualname__": inner.__qualname__,
        "__doc__": inner.__doc__,
    }
    return type(inner.__name__, (inner,) if issubclass(inner, _Bounded) else (_Bounded, inner), body)


def _put_again(boundaries: tuple[Boundary, ...], make: Callable[..., M], arguments: tuple[Any, ...]) -> M:
    """Make a module that is copied or unpickled, still without its state, and put the boundaries around it."""
    module = make(*arguments)
    for boundary in boundaries:
        put_boundary(module, boundary)
    return module


def refuse_bounded(module: Module) -> None:
    """Raise `RuntimeError` for a converted model, or as `refuse_patched`."""
    if isinstance(module, _Bounded) and not all(boundary.is_inner for boundary in module._ampkit_boundaries):
        raise RuntimeError(
            f"this {type(module).__name__} has been converted by ampkit.half or amp.initialize already, and a "
            f"second conversion would cast twice; build the model again, or use the converted one"
        )
    refuse_patched(module)


def refuse_patched(module: Module) -> None:
    """Raise `RuntimeError` for a module whose forward a subclass cannot replace: scripted, or set on the instance."""
    if is_scripted(module):
        raise RuntimeError(
            "this module is scripted or traced: TorchScript runs its forward, around which nothing can be cast; "
            "convert the model before torch.jit.script, or convert an nn.Module that calls this one"
        )
    if "forward" in vars(module):
        raise RuntimeError(
            f"the forward of this {type(module).__name__} was replaced on the instance; convert the model before "
            f"anything that patches its forward"
        )


def device_type_of(module: Module) -> str:
    """Return the device type of a module's first parameter, or of its first buffer, or "cpu"."""
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            return tensor.device.type
    return "cpu"
