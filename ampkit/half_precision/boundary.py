"""What stands between a converted module and its callers: casts of inputs and outputs, and a region or none.

A module gets a subclass of its own class whose forward does the work, rather than hooks or a forward stored on the
instance: direct calls of `forward` are covered, replicas of `nn.DataParallel` run their own forward, an interrupt
leaves no region open, and the signature stays what it was.
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
from ampkit.region.forward_wrapper import WrappedForward
from ampkit.torch_internals.modules import BatchNorm

M = TypeVar("M", bound=Module)


class Boundary(NamedTuple):
    """Casts around one module's calls; a dtype of None means no cast.

    `region` is what operators compute in: a 16-bit type opens a region with `policy`, float32 turns autocast off, None
    leaves it as the caller has it.
    """

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
            with self._context(module):
                output = forward(module, *args, **kwargs)
            return output if self.outputs is None else cast_tree(output, self.outputs)

        return bounded

    def _context(self, module: Module) -> AbstractContextManager[Any]:
        if self.region is None:
            return nullcontext()
        device_type = device_type_of(module)
        if self.region is not torch.float32:
            return autocast(device_type, self.region, policy=self.policy)
        return autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


class _Bounded(WrappedForward):
    """Modules with a boundary."""


def put_boundary(module: M, boundary: Boundary) -> M:
    """Put `boundary` around every call of `module`; returns `module`, whose class is now a subclass.

    Raises:
        RuntimeError: the module has a boundary, or a forward of its own that its class does not know.
    """
    refuse_bounded(module)
    _Bounded.put_around(module, boundary)
    return module


class _Kept(WrappedForward):
    """float32 modules inside a 16-bit model."""


def keep_in_float32(module: Module, dtype: torch.dtype) -> None:
    """Have `module` compute in float32, autocast off, and return `dtype`.

    Its inputs are cast up, but for batch norms, whose kernels take 16-bit inputs beside float32 weights.
    """
    inputs = None if isinstance(module, BatchNorm) else torch.float32
    _Kept.put_around(module, Boundary(inputs, dtype, torch.float32))


def refuse_bounded(module: Module) -> None:
    """Raise `RuntimeError` for a module that has a boundary, or a forward that its class does not know."""
    if isinstance(module, _Bounded):
        raise RuntimeError(
            f"this {type(module).__name__} has been through ampkit.half or amp.initialize already, and a second "
            f"conversion would only stack its casts; build the model again, or keep the converted one"
        )
    refuse_patched(module)


def refuse_patched(module: Module) -> None:
    """Raise `RuntimeError` for a module with a forward that its class does not know, and that no subclass replaces."""
    if is_scripted(module):
        raise RuntimeError(
            "this module is scripted or traced: TorchScript runs its forward, and nothing can be put around that; "
            "convert the model before torch.jit.script, or convert an nn.Module that calls this one"
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
