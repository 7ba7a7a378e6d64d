"""What stands between a converted module and its callers: casts of inputs and outputs, and a region.

A module gets a subclass of its own class whose forward does the work, rather than hooks or a forward stored on the
instance: direct calls of `forward` are covered, replicas of `nn.DataParallel` run their own forward, an interrupt
leaves no region open, and the signature stays what it was.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import Module

from ampkit.containers import cast_tree
from ampkit.policy.policy import Policy
from ampkit.region.autocast import autocast
from ampkit.region.forward_wrapper import WrappedForward

M = TypeVar("M", bound=Module)

_thread = threading.local()


class Boundary(NamedTuple):
    """Casts around one module's calls; a dtype of None means no cast, or no region."""

    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    region: torch.dtype | None = None
    policy: Policy | None = None

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward(module, ...)` between the casts, in a region for the device that the module is on."""

        @functools.wraps(forward)
        def bounded(module: Module, *args: Any, **kwargs: Any) -> Any:
            if self.inputs is not None:
                args, kwargs = cast_tree(args, self.inputs), cast_tree(kwargs, self.inputs)
            if self.region is None or casts_are_disabled():
                output = forward(module, *args, **kwargs)
            else:
                with autocast(device_type_of(module), self.region, policy=self.policy):
                    output = forward(module, *args, **kwargs)
            return output if self.outputs is None else cast_tree(output, self.outputs)

        return bounded


class _Bounded(WrappedForward):
    """Modules with a boundary."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _Bounded._reduced(self, super().__reduce_ex__(protocol))


def put_boundary(module: M, boundary: Boundary) -> M:
    """Put `boundary` around every call of `module`; returns `module`, whose class is now a subclass.

    Raises:
        RuntimeError: the module has a boundary, or a forward of its own that its class does not know.
    """
    refuse_bounded(module)
    _Bounded.put_around(module, boundary)
    return module


def refuse_bounded(module: Module) -> None:
    """Raise `RuntimeError` for a module that has a boundary, or a forward that its class does not know."""
    if isinstance(module, _Bounded):
        raise RuntimeError(
            f"this {type(module).__name__} has been through ampkit.half or amp.initialize already, and a second "
            f"conversion would only stack its casts; build the model again, or keep the converted one"
        )
    if "forward" in vars(module):
        raise RuntimeError(
            f"this {type(module).__name__} was given a forward of its own, which its class does not know; convert "
            f"the model before anything that patches its forward"
        )


def device_type_of(module: Module) -> str:
    """The device type of a module's first parameter or buffer; the CPU's where it has neither."""
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            return tensor.device.type
    return "cpu"


def casts_are_disabled() -> bool:
    """Whether this thread is inside `casts_disabled`."""
    return getattr(_thread, "disabled", 0) > 0


@contextmanager
def casts_disabled() -> Iterator[None]:
    """Modules with a boundary enter no region in here; restored also when the body raises."""
    _thread.disabled = getattr(_thread, "disabled", 0) + 1
    try:
        yield
    finally:
        _thread.disabled -= 1
