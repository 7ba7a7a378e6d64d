"""A training that diverges: the loss or the weights grow over steps until they overflow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ampkit.debugging.checks.check import Add, Check, largest
from ampkit.debugging.finding import Cause, Grade, Place
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.training_loop import calling_place
from ampkit.gradients.collect import parameters as parameters_of

_LOSS_GROWTH, _WEIGHT_GROWTH = 1e3, 10.0  # of the loss, and of the largest weight


class _Step(NamedTuple):
    """The state of a loop before an optimizer's step."""

    rate: float
    weight: float  # the largest
    gradient: float


class Divergence(Check):
    """Notes weights and gradients before each step, and searches for growth if a loss became inf or NaN."""

    name = "divergence"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._steps: dict[int, _Step] = {}
        self._place = Place()
        self._clips = False

    def step_starts(self, optimizer: Any, closure: bool) -> None:
        parameters = parameters_of(optimizer)
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        sizes = map(largest, (parameters, (p.grad for p in parameters)))
        step = _Step(max(rates, default=0.0), *(0.0 if size is None else float(size.max()) for size in sizes))
        before = self._steps.get(self.run.step, step)
        self._steps[self.run.step] = _Step(*map(max, before, step))
        self._place = self._place if self._place.file else calling_place()

    def clip(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Note that gradients are clipped. Called by the training loop."""
        self._clips = True
        yield

    def ended(self) -> None:
        end = min((step for losses in self.run.losses.values() for step in _nonfinite(losses)), default=None)
        if end is None or len(self._steps) < 2:
            return
        weights = {number: step.weight for number, step in self._steps.items()}
        losses = [("the loss", values, _LOSS_GROWTH) for values in self.run.losses.values()]
        for what, values, factor in (*losses, ("the largest weight", weights, _WEIGHT_GROWTH)):
            steps = growth(values, end, factor)
            if steps is not None:
                self._add("error", what, values, *steps)
                return
        for _, values, _ in losses:  # in one step: a run with smaller updates may show that they are the cause
            if end - 1 in values and not math.isfinite(values.get(end, 0.0)):
                self._add("note", "the loss", values, end - 1, end)
                return

    def _add(self, grade: Grade, what: str, values: dict[int, float], first: int, last: int) -> None:
        start, step = self._steps[min(self._steps)], self._steps.get(first) or self._steps[min(self._steps)]
        why = f"{what} grows from {values[first]:.3g} in step {first} to {values[last]:.3g} in step {last}"
        why += f", with a learning rate of {step.rate:.3g}"
        if step.rate > start.rate:
            why += f" ({start.rate:.3g} in the first step)"
        why += f" and gradients up to {step.gradient:.3g}" + ("" if self._clips else ", which are not clipped")
        advice = "clip_grad_norm_(model.parameters(), 1.0) before the step" if not self._clips else "a warm-up"
        what_happens = "the training diverges" if grade == "error" else "the loss overflows after an update"
        fix = f"a smaller learning rate, such as {step.rate / 10:.3g}, or {advice}"
        cause = Cause("divergence", why, step.gradient)
        self.found(self._place, grade, cause, what_happens, fix, step=first, last=self.run.step - 1)


def _nonfinite(losses: dict[int, float]) -> list[int]:
    return [step for step, loss in losses.items() if not math.isfinite(loss)]


def growth(values: dict[int, float], end: int, factor: float) -> tuple[int, int] | None:
    """Return the steps between which finite values grow until `end`; None if they do not grow by `factor`."""
    steps = [step for step, value in values.items() if step <= end and math.isfinite(value)]
    if not steps:
        return None
    first = last = len(steps) - 1
    while first and abs(values[steps[first - 1]]) <= abs(values[steps[first]]):
        first -= 1
    while first < last and abs(values[steps[first + 1]]) < 2 * abs(values[steps[first]]):
        first += 1  # it has not begun to grow
    is_large = abs(values[steps[last]]) >= factor * max(abs(values[steps[first]]), 1e-3)
    return (steps[first], steps[last]) if is_large else None
