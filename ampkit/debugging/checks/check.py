"""The interface of the checks: each is a class with methods for the events of a run that it needs.

A check adds findings to the report when it finds them, or at the end of the run. It proposes no fix that depends on the
run's regions or policy: `examination` adds those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

from ampkit.debugging.finding import Cause, Finding, Fix, Grade, Place
from ampkit.debugging.observe.call import Call, Phase
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_properties import OperatorProperties
from ampkit.debugging.observe.storage_map import StorageMap

Add = Callable[..., None]
"""`add(finding)`; `add(finding, skipped=True)` if a scaler skips the step because of it."""

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class Check:
    """One kind of problem. Override the methods that the check needs; it may also have generators for
    `training_loop.EVENTS`.

    Args:
        run: the observed run.
        add: adds a finding to the report.
    """

    name: ClassVar[str]  # `check` of its findings
    needs_operators: ClassVar[bool] = True  # it observes operators, which takes a dispatch mode

    def __init__(self, run: Observer, add: Add) -> None:
        self.run, self.add = run, add

    def found(self, at: Call | Place, grade: Grade, cause: Cause, what: str, fix: str, **fields: Any) -> None:
        """Add a finding of this step."""
        place = self.run.place(at) if isinstance(at, Call) else at
        values: dict[str, Any] = {"place": place, "fix": Fix(fix), "step": self.run.step, **fields}
        self.add(Finding(grade=grade, check=self.name, cause=cause, what=what, **values))

    def opened(self, stack: ExitStack) -> None:
        """Register hooks, which `stack` removes."""

    def observes(self, op: OperatorProperties, phase: Phase) -> bool:
        """Return whether the check needs an operator in a phase. Called once for each."""
        return True

    def operator_ran(self, call: Call) -> None:
        """Check an operator that has just run."""

    def paused(self) -> None:
        """Drop the tensors that it follows: operators are not observed from now on."""
        for value in vars(self).values():
            if isinstance(value, StorageMap):
                value.clear()

    def backward_starts(self, roots: Sequence[Tensor], scaled: bool) -> None:
        """Check a backward that is about to run from these tensors; `scaled`: a scaler scaled the loss."""

    def step_starts(self, optimizer: Optimizer, closure: bool) -> None:
        """Check an optimizer that is about to step."""

    def step_ended(self, optimizer: Optimizer | None, *, complete: bool = True) -> None:
        """Check a step that has ended; without an optimizer a scaler skipped it, or the run has ended.

        `complete` is False if an exception ended it.
        """

    def ended(self) -> None:
        """Add the findings about the whole run, which has ended."""

    def not_checked(self) -> list[str]:
        """Describe the parts that could not be checked, and why."""
        return []


def overridden(checks: Sequence[Check], name: str) -> list[Any]:
    """Return the methods of this name of the checks that have one of their own."""
    return [getattr(each, name) for each in checks if getattr(type(each), name) is not getattr(Check, name)]
