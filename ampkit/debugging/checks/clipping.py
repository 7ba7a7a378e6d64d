"""Clipping of nothing: over an empty or exhausted iterator, or over parameters that have no gradients there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ampkit.debugging.checks.check import Add, Check
from ampkit.debugging.finding import Cause, Place
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.training_loop import calling_place
from ampkit.gradients.collect import parameters as parameters_of

_MIN_STEPS = 3  # steps with gradients, and calls without parameters, before a finding
_MIN_CALLS = 5  # calls without gradients: a network that trains every fifth time has some then


@dataclass
class _Line:
    """The calls of one line."""

    empty: bool = False  # the last call was given no parameter
    clipped: bool = False  # a call had a gradient
    nothing: int = 0  # calls since then that had none
    alternates: bool = False  # a call had a gradient after one that had none


class Clipping(Check):
    """Counts the gradients in each call of a function that clips. Needs no dispatch mode."""

    name = "clipping"
    needs_operators = False

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._lines: dict[Place, _Line] = {}
        self._steps = 0  # steps with gradients

    def step_starts(self, optimizer: Optimizer, closure: bool) -> None:
        self._steps += any(p.grad is not None for p in parameters_of(optimizer))

    def clip(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        clipped = next(iter((*args, *kwargs.values())))
        self._note([clipped] if isinstance(clipped, Tensor) else list(clipped))
        yield

    def scaler_clip(self, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._note(parameters_of(optimizer))
        yield

    def _note(self, parameters: Sequence[Tensor]) -> None:
        if parameters and not any(p.requires_grad for p in parameters):
            return  # frozen
        line = self._lines.setdefault(calling_place(), _Line())
        line.empty = not parameters
        if any(p.grad is not None for p in parameters):
            line.alternates |= line.nothing > 0
            line.clipped, line.nothing = True, 0
        else:
            line.nothing += 1

    def ended(self) -> None:
        for place, line in self._lines.items():
            least = _MIN_STEPS if line.empty else _MIN_CALLS
            if self._steps < _MIN_STEPS or line.nothing < least or line.alternates or (line.clipped > line.empty):
                continue
            why = "its parameters have no gradients at this line: it runs before backward, or clips other parameters"
            fix = "clip between backward and step, the parameters that the optimizer holds"
            if line.empty:
                why = "it is given no parameters: an iterator such as model.parameters() can be read once only"
                fix = "clip_grad_norm_(model.parameters(), ...) with a new iterator in each call, or list(parameters)"
            what = f"clipping has no effect: the last {line.nothing} calls clip nothing"
            cause = Cause("empty" if line.empty else "no gradients", why)
            self.found(place, "error", cause, what, fix, step=0, last=self.run.step - 1)
