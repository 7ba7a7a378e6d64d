"""Steps with closures under loss scaling, for optimizers that evaluate the loss themselves: `step(closure)`.

The user's closure calls `scaler.scale(loss).backward()` and returns the unscaled loss. Each evaluation is unscaled and
checked before the optimizer gets it. A non-finite evaluation ends the optimizer's `step` at once, and parameters and
optimizer state are restored.
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
    """Raised in a closure to end the optimizer's `step`; never reaches the user."""


def extract(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """The closure among the arguments of `step`, by keyword or first; None if there is none."""
    if kwargs.get("closure") is not None:
        return kwargs["closure"]
    if args and callable(args[0]):
        return args[0]
    return None


def replace(closure: Closure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, with another closure in place of the one that `extract` finds."""
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": closure}
    return (closure, *args[1:]), kwargs


def is_finite(loss: Any) -> bool:
    """Whether a loss is finite; True if it is no number. Synchronizes for a loss on a device."""
    if isinstance(loss, Tensor):
        return bool(torch.isfinite(loss.detach()).all())
    return not isinstance(loss, int | float) or math.isfinite(loss)


class Snapshot:
    """A copy of an optimizer's parameters and state, to restore them after a non-finite evaluation.

    Optimizers of torch.optim, except LBFGS, and of ampkit.optim evaluate the closure once, before they change
    anything. For these nothing is copied or written.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._is_needed = not _evaluates_first(optimizer)
        if not self._is_needed:
            return
        masters = masters_of(optimizer)
        if masters is not None:  # weights may have been loaded into the model since the last step
            masters.follow_model_()
        self._params = [(param, param.detach().clone()) for param in parameters(optimizer)]
        self._state = {
            param: {name: _copied(value) for name, value in state.items()} for param, state in optimizer.state.items()
        }

    @torch.no_grad()
    def restore(self) -> None:
        """Undo the changes of the step so far."""
        if not self._is_needed:
            return
        for param, before in self._params:
            param.copy_(before)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        masters = masters_of(self._optimizer)
        if masters is not None:  # the model holds the values of the last evaluation
            masters.write_back_()


def _evaluates_first(optimizer: Any) -> bool:
    """Whether `step` evaluates its closure once, before it changes anything."""
    cls = type(optimizer)
    return cls.__module__.startswith(("torch.optim.", "ampkit.optim")) and cls is not torch.optim.LBFGS


def _copied(value: Any) -> Any:
    """A copy of an entry of an optimizer's state."""
    if isinstance(value, Tensor):
        return value.clone()
    # LBFGS extends and shortens its lists, but never writes to the tensors in them.
    return list(value) if isinstance(value, list) else value
