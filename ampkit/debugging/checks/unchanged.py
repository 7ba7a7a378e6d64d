"""Steps of an optimizer that change nothing: the learning rate is 0, or too small, or `step` writes other tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampkit.debugging.checks.check import Add, Check, is_plain, largest, sample
from ampkit.debugging.finding import Cause, Place
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.training_loop import calling_place

_MIN_STEPS = 3  # steps that write nothing before a finding
_MIN_ROUNDED = 10  # steps whose update is rounded away
_ELEMENTS = 1024  # that are compared, of each parameter
_SMALL = 1e-3  # a gradient that is smaller than this part of the largest one may be rounding
_CONVERGED = 1e-2  # one that is smaller than this part of its first value may have converged


@dataclass
class _Parameter:
    """The steps of a parameter since the last one that changed it."""

    first: float  # largest magnitude of its gradient in its first step
    last: float = 0.0
    steps: int = 0
    written: bool = False  # one of them wrote it
    changed: bool = False  # a step before them changed it

    @property
    def is_stuck(self) -> bool:
        """Whether it should have changed."""
        has_converged = self.changed and self.last < _CONVERGED * self.first
        return self.steps >= (_MIN_ROUNDED if self.written else _MIN_STEPS) and not has_converged


class Unchanged(Check):
    """Compares some elements of each float32 parameter before and after a step. Needs no dispatch mode.

    `Updates` finds updates of 16-bit parameters that are rounded away.
    """

    name = "unchanged"
    needs_operators = False

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._before: dict[Optimizer, dict[Tensor, tuple[Tensor, int]]] = {}
        self._parameters: dict[Optimizer, dict[Tensor, _Parameter]] = {}
        self._scheduled: dict[Optimizer, Place] = {}  # the last call of a scheduler that changed the learning rate
        self._stopped: dict[Optimizer, int] = {}  # steps with a learning rate of 0 since the last with another

    def scheduler_step(self, scheduler: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        optimizer: Any = getattr(scheduler, "optimizer", None)
        before = _rates(optimizer)
        yield
        if _rates(optimizer) != before:
            self._scheduled[optimizer] = calling_place()

    def step_starts(self, optimizer: Optimizer, closure: bool) -> None:
        self.place_of(optimizer)
        self._stopped[optimizer] = 0 if any(_rates(optimizer)) else self._stopped.get(optimizer, 0) + 1
        self._before[optimizer] = {
            p: (sample(p, _ELEMENTS).clone(), p._version)
            for group, rate in zip(optimizer.param_groups, _rates(optimizer), strict=True)
            if rate and not closure
            for p in group["params"]
            if p.dtype in (torch.float32, torch.float64) and is_plain(p) and is_plain(p.grad)
        }

    def step_ended(self, optimizer: Optimizer | None, *, complete: bool = True) -> None:
        before = self._before.pop(optimizer, {}) if optimizer is not None else {}
        if optimizer is None or not complete:
            return
        before = {p: values for p, values in before.items() if is_plain(p.grad)}
        magnitudes = largest(p.grad for p in before)
        if magnitudes is None or not bool(magnitudes.isfinite().all()):
            return  # a step with inf or NaN may be skipped on the device
        parameters, least = self._parameters.setdefault(optimizer, {}), _SMALL * float(magnitudes.max())
        for (p, (values, version)), magnitude in zip(before.items(), magnitudes.tolist(), strict=True):
            state = parameters.setdefault(p, _Parameter(magnitude))
            if not torch.equal(values, sample(p, _ELEMENTS)):
                state.changed, state.written, state.steps = True, False, 0
            elif magnitude > least:
                state.last, state.steps = magnitude, state.steps + 1
                state.written |= p._version != version

    def ended(self) -> None:
        for optimizer, steps in self._stopped.items():
            if steps >= _MIN_STEPS:
                why, fix = "the optimizer is made with it", "a learning rate above 0"
                if optimizer in self._scheduled:
                    why = "the scheduler sets it there"
                    fix = "a scheduler that reaches 0 after the last step (T_max, total_iters, num_training_steps)"
                what = f"the learning rate is 0 in the last {steps} steps, which change nothing"
                self._add(optimizer, Cause("learning rate 0", why), what, fix)
        for optimizer, parameters in self._parameters.items():
            for written in (False, True):
                stuck = {p: s for p, s in parameters.items() if s.is_stuck and s.written == written}
                if stuck:
                    self._add_stuck(optimizer, stuck, written)

    def _add_stuck(self, optimizer: Optimizer, stuck: dict[Tensor, _Parameter], written: bool) -> None:
        p, state = next(iter(stuck.items()))
        names = self.run.names_of(stuck)
        rate = max(_rates(optimizer))
        numbers = f"the gradient is up to {state.last:.3g}, the learning rate {rate:.3g}"
        cause = Cause("not written", f"`step` does not write it: {numbers}")
        fix = "a `step` that writes the parameters in param_groups in place"
        if written:
            size = float(p.detach().abs().max())
            why = f"each update is less than half a unit in the last place of values up to {size:.3g}"
            cause, fix = Cause("update rounded away", f"{why}: {numbers}"), "a larger learning rate, or gradients"
        self._add(optimizer, cause, f"the optimizer's last {state.steps} steps do not change {names}", fix)

    def _add(self, optimizer: Optimizer, cause: Cause, what: str, fix: str) -> None:
        place = self.place_of(optimizer)
        initial = max(float(group.get("initial_lr", 0.0)) for group in optimizer.param_groups)
        if max(_rates(optimizer)) <= _SMALL * initial:
            place = self._scheduled.get(optimizer, place)
        self.found(place, "error", cause, what, fix, step=0, last=self.run.step - 1)


def _rates(optimizer: Any) -> list[float]:
    """Return the learning rate of each group; 1.0 for an optimizer that has none."""
    return [float(group.get("lr", 1.0)) for group in getattr(optimizer, "param_groups", ())]
