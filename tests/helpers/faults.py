"""Deterministic faults: an inf or NaN in one gradient, at one step."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

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


def plant_nonfinite(param: Tensor, step: int = 1, kind: Kind = "inf", *, index: int = 0) -> RemovableHandle:
    """Have the `step`-th gradient from now that reaches `param` hold an inf or NaN, before DDP reduces it.

    `remove()` the handle early or use `with`. FSDP2 parameters get their gradients without autograd hooks: use
    `spoil_grad` there, after `backward`.
    """
    backwards = itertools.count(1)

    def on_gradient(grad: Tensor) -> Tensor | None:
        if next(backwards) != step:
            return None
        spoiled = grad.detach().clone(memory_format=torch.contiguous_format)  # gradients may be transposed
        spoiled.view(-1)[index] = float(kind)
        return spoiled

    return param.register_hook(on_gradient)
