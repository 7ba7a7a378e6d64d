"""Shared by the scaler's tests: parameters with gradients, iterations, counts of host reads, bitwise comparison."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ampkit.optim
from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.op_samples import same

BOTH = pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler], ids=["ampkit", "torch"])
# The host skips the first; the others skip on the device.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ordinary": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "ampkit": lambda params: ampkit.optim.AdamW(params, lr=0.1),
}
READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default}


class count_reads(TorchDispatchMode):
    """List the operators run inside that hand a value to the host: each would wait for a GPU."""

    def __enter__(self) -> Any:
        super().__enter__()
        self.reads: list[str] = []
        return self.reads

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves_device = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") is not None
        if func in READS or leaves_device:
            self.reads.append(str(func))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """The operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def started(cls: Any = GradScaler, *arguments: Any, device: str = "cpu", **options: Any) -> Any:
    """A scaler that has scaled a loss, so its scale is on the device."""
    scaler = cls(device, *arguments, **options)
    scaler.scale(torch.ones((), device=device, requires_grad=True))
    return scaler


def one_parameter(value: float = 1.0, grad: float | None = None, **options: Any) -> Any:
    """A parameter and its SGD optimizer. The gradient, if there is one, counts as scaled."""
    param = torch.nn.Parameter(torch.tensor([value], **options))
    if grad is not None:
        param.grad = torch.tensor([grad], **options)
    return param, torch.optim.SGD([param], lr=1.0)


def with_grads(grads: Sequence[torch.Tensor]) -> list[Any]:
    """Parameters of ones that hold copies of these gradients."""
    params = [torch.nn.Parameter(torch.ones_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return params


def parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The parameters of all groups, in order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def iterate(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *grads: float | None) -> None:
    """Give the parameters, in order, gradients of one value each (which count as scaled) or None; step and update."""
    for param, grad in zip(parameters(optimizer), grads, strict=False):
        param.grad = None if grad is None else torch.full_like(param, grad)
    scaler.step(optimizer)
    scaler.update()


def clip(scaler: Any, optimizer: torch.optim.Optimizer, *limits: Any, by: str = "norm") -> Any:
    """Unscale and clip: one call of ampkit's scaler, two of torch's. Returns the norm."""
    name = f"clip_grad_{by}_"
    if isinstance(scaler, GradScaler):
        return getattr(scaler, name)(optimizer, *limits)
    scaler.unscale_(optimizer)
    return getattr(torch.nn.utils, name)(parameters(optimizer), *limits)


def alike(ours: Any, theirs: Any) -> bool:
    """Equal to the bit in nested containers; exceptions by their class."""
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        return type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return same(ours.detach(), theirs.detach())
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(alike(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    return ours == theirs
