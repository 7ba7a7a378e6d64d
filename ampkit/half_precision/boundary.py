"""Casts of inputs and outputs, and an autocast region, around a converted module or one kept in float32.

The module's class becomes a subclass with another forward. Unlike hooks or a forward stored on the instance, this
covers direct calls of `forward`, lets replicas of `nn.DataParallel` run their own forward, leaves no region open after
an interrupt, and keeps the signature.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import Module

from ampkit.containers import cast_tree
from ampkit.half_precision.forward_wrapper import WrappedForward
from ampkit.policy.module_paths import is_scripted
from ampkit.policy.policy import Policy
from ampkit.region.autocast import autocast
from ampkit.torch_private import BatchNorm

M = TypeVar("M", bound=Module)


class Boundary(NamedTuple):
    """Casts around the calls of a module; a dtype of None means no cast.

    `region`: a 16-bit type opens a region of this dtype with `policy`, float32 turns autocast off, None does nothing.
    """

    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    region: torch.dtype | None = None
    policy: Policy | None = None

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `forward(module, ...)` in the casts and a region for the module's device."""

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
    """Base class of models with a boundary."""


def put_boundary(module: M, boundary: Boundary) -> M:
    """Put `boundary` around every call of `module`, by replacing its class; returns `module`.

    Raises:
        RuntimeError: the module has a boundary, or its forward was replaced on the instance.
    """
    refuse_bounded(module)
    _Bounded.put_around(module, boundary)
    return module


class _Kept(WrappedForward):
    """Base class of modules kept in float32 inside a 16-bit model."""


def keep_in_float32(module: Module, dtype: torch.dtype) -> None:
    """Make `module` compute in float32, with autocast off, and return `dtype`.

    Its inputs are cast up, except those of batch norms, whose kernels take 16-bit inputs beside float32 weights.
    """
    inputs = None if isinstance(module, BatchNorm) else torch.float32
    _Kept.put_around(module, Boundary(inputs, dtype, torch.float32))


def refuse_bounded(module: Module) -> None:
    """Raise `RuntimeError` for a module that has a boundary, is scripted, or has its forward replaced."""
    if isinstance(module, _Bounded):
        raise RuntimeError(
            f"this {type(module).__name__} has been through ampkit.half or amp.initialize already; a second "
            f"conversion would cast twice; build the model again, or keep the converted one"
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
    """The device type of a module's first parameter, else of its first buffer, else "cpu"."""
    for tensors in (module.parameters(), module.buffers()):
        for tensor in tensors:
            return tensor.device.type
    return "cpu"
