"""Deterministic faults for tests: an inf or NaN in one gradient, at one step."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["inf", "-inf", "nan"]
_KINDS = ("inf", "-inf", "nan")


def spoil_grad(param: Tensor, kind: Kind = "inf", *, index: int = 0) -> None:
    """Write an inf or NaN into `param.grad` now; of a DTensor, into this rank's part.

    Args:
        param: a parameter that has a gradient.
        kind: "inf", "-inf" or "nan".
        index: which element, counted through the flattened gradient; of a sparse one, through its stored
            values.

    Raises:
        ValueError: no gradient, no such element, or an unknown kind.
    """
    value = _value(kind)
    grad: Any = param.grad
    if grad is None:
        raise ValueError("the parameter has no gradient to spoil; call backward() first")
    with torch.no_grad():
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        values = local._values() if local.layout is torch.sparse_coo else local
        if not -values.numel() <= index < values.numel():
            raise ValueError(f"index is {index}; the gradient has {values.numel()} elements here")
        flat = values.reshape(-1)
        flat[index] = value
        values.copy_(flat.view_as(values))


class PlantedFault:
    """A fault that waits for its step. Remove it early with `remove()` or by using it in a `with` statement.

    `backwards` counts the backward passes that have reached the parameter, `planted` says whether it has
    struck.
    """

    def __init__(self, param: Tensor, step: int, kind: Kind, index: int) -> None:
        self.backwards = 0
        self.planted = False
        self._step, self._value, self._index = step, _value(kind), index
        self._handle = param.register_hook(self._on_gradient)

    def _on_gradient(self, grad: Tensor) -> Tensor | None:
        self.backwards += 1
        if self.backwards != self._step:
            return None
        self.planted = True
        spoiled = grad.detach().clone(memory_format=torch.contiguous_format)  # gradients may be transposed
        spoiled.view(-1)[self._index] = self._value
        return spoiled

    def remove(self) -> None:
        """Take the fault back; harmless when it has struck."""
        self._handle.remove()

    def __enter__(self) -> PlantedFault:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def plant_nonfinite(param: Tensor, step: int = 1, kind: Kind = "inf", *, index: int = 0) -> PlantedFault:
    """Make the gradient of `param` hold an inf or NaN in its `step`-th backward pass, counted from 1.

    The fault is planted before the gradient is accumulated, so DDP reduces it over all ranks as a real one.
    FSDP2 parameters get their gradients without autograd hooks: use `spoil_grad` there, after `backward`.

    Args:
        param: a dense parameter that requires grad.
        step: which backward pass.
        kind: "inf", "-inf" or "nan".
        index: which element of the flattened gradient.

    Raises:
        ValueError: a step below 1, an unknown kind, or a parameter without gradients.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> fault = plant_nonfinite(weight, step=2, kind="nan")
    >>> for _ in range(2):
    ...     weight.grad = None
    ...     weight.sum().backward()
    >>> weight.grad
    tensor([nan, 1.])
    """
    if step < 1:
        raise ValueError(f"step is {step}; expected 1 for the first backward pass, or more")
    if not param.requires_grad:
        raise ValueError("the parameter does not require grad; expected one that backward() reaches")
    return PlantedFault(param, step, kind, index)


def _value(kind: str) -> float:
    if kind not in _KINDS:
        raise ValueError(f"unknown kind {kind!r}; expected one of {_KINDS}")
    return float(kind)
