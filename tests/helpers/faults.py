"""Deterministic faults: an inf or NaN in one gradient, at one step."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["inf", "-inf", "nan"]


def spoil_grad(param: Tensor, kind: Kind = "inf", *, index: int = 0) -> None:
    """Write an inf or NaN into `param.grad` now; of a DTensor, into this rank's shard; of a sparse one, a value."""
    grad: Any = param.grad
    with torch.no_grad():
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        values = local._values() if local.layout is torch.sparse_coo else local
        flat = values.reshape(-1)
        flat[index] = float(kind)
        values.copy_(flat.view_as(values))


class PlantedFault:
    """Makes the `step`-th gradient that reaches `param` hold an inf or NaN. `remove()` it early or use `with`."""

    def __init__(self, param: Tensor, step: int, kind: Kind, index: int) -> None:
        self.backwards = 0
        self.planted = False
        self._step, self._value, self._index = step, float(kind), index
        self._handle = param.register_hook(self._on_gradient)

    def _on_gradient(self, grad: Tensor) -> Tensor | None:
        self.backwards += 1
        if self.backwards != self._step:
            return None
        self.planted = True
        spoiled = grad.detach().clone(memory_format=torch.contiguous_format)  # gradients may be transposed
        spoiled.view(-1)[self._index] = self._value
        return spoiled

    def __enter__(self) -> PlantedFault:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


def plant_nonfinite(param: Tensor, step: int = 1, kind: Kind = "inf", *, index: int = 0) -> PlantedFault:
    """Plant a fault in the `step`-th backward pass from now, before the gradient is accumulated: DDP reduces it.

    FSDP2 parameters get their gradients without autograd hooks: use `spoil_grad` there, after `backward`.
    """
    return PlantedFault(param, step, kind, index)
