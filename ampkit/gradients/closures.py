"""Optimizers that evaluate the loss themselves: `step(closure)` under loss scaling.

The user's closure is written as without scaling, apart from `scaler.scale(loss).backward()`; it returns the unscaled
loss. Each evaluation is unscaled and checked before the optimizer sees it. A non-finite evaluation leaves the
optimizer's `step` at once, and parameters and optimizer state are restored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampkit.gradients.collect import masters_of, parameters

Closure = Callable[[], Any]


class NonFiniteEvaluation(Exception):
    """Leaves an optimizer's `step` from inside its closure; never reaches the user."""


def extract(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Return the closure among the arguments of `step`, by keyword or as first positional argument."""
    if kwargs.get("closure") is not None:
        return kwargs["closure"]
    if args and callable(args[0]):
        return args[0]
    return None


def replace(closure: Closure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another closure in the place where `extract` found one."""
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": closure}
    return (closure, *args[1:]), kwargs


def is_finite(loss: Any) -> bool:
    """Whether a closure's return value is finite; what is no number passes. Syncs for a loss on a device."""
    if isinstance(loss, Tensor):
        return bool(torch.isfinite(loss.detach()).all())
    return not isinstance(loss, int | float) or math.isfinite(loss)


class Snapshot:
    """A copy of an optimizer's parameters and state, restored when an evaluation is not finite.

    Nothing is copied or written for optimizers of torch.optim, except LBFGS, and of ampkit.optim: they evaluate once,
    before they change anything.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._is_needed = not _evaluates_first(optimizer)
        if not self._is_needed:
            return
        masters = masters_of(optimizer)
        if masters is not None:     # weights may have been loaded into the model since its last step
            masters.follow_model_()
        self._params = [(param, param.detach().clone()) for param in parameters(optimizer)]
        self._state = {
            param: {name: _copied(value) for name, value in state.items()} for param, state in optimizer.state.items()
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Undo whatever the step has done so far."""
        if not self._is_needed:
            return
        for param, before in self._params:
            param.copy_(before)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        masters = masters_of(self._optimizer)
        if masters is not None:     # the model holds the values of the last evaluation
            masters.write_back_()


def _evaluates_first(optimizer: Any) -> bool:
    cls = type(optimizer)
    return cls.__module__.startswith(("torch.optim.", "ampkit.optim")) and cls is not torch.optim.LBFGS


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    # LBFGS extends and shortens its lists but never writes into the tensors that they hold
    return list(value) if isinstance(value, list) else value
