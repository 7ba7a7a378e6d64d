"""The interface of the checks, each a class with methods for the events of a run, and functions that several need.

A check adds findings to the report when it finds them, or at the end of the run. It proposes no fix that depends on the
run's regions or policy: `examination` adds those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ampkit.debugging.finding import Cause, Finding, Fix, Grade, Place
from ampkit.debugging.observe.call import Call, Phase
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_properties import OperatorProperties
from ampkit.debugging.observe.storage_map import StorageMap
from ampkit.debugging.observe.training_loop import calling_place
from ampkit.debugging.torch_private import is_opaque

Add = Callable[..., None]
"""`add(finding)`; `add(finding, skipped=True)` if a scaler skips the step because of it."""
_CHECKED_CALLS = 3


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
        self._calls: dict[Any, int] = {}

    def is_chosen(self, line: Any) -> bool:
        """Count a call of a line, and return whether it is checked: the first few are, and then one of 64."""
        calls = self._calls[line] = self._calls.get(line, 0) + 1
        return calls <= _CHECKED_CALLS or calls % 64 == 0

    def found(self, at: Call | Place, grade: Grade, cause: Cause, what: str, fix: str, **fields: Any) -> None:
        """Add a finding of this step."""
        place = self.run.place(at) if isinstance(at, Call) else at
        values: dict[str, Any] = {"place": place, "fix": Fix(fix), "step": self.run.step, **fields}
        self.add(Finding(grade=grade, check=self.name, cause=cause, what=what, **values))

    def place_of(self, optimizer: Optimizer) -> Place:
        """Return the line that made an optimizer, or of its first step if it was made before the run."""
        made = self.run.loop.made
        if optimizer not in made:
            made[optimizer] = 0.0, calling_place()
        return made[optimizer][1]

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


def is_plain(tensor: Any) -> TypeGuard[Tensor]:
    """Return whether it is a whole tensor that can be read, not None, sharded, sparse or empty."""
    return type(tensor) in (Tensor, Parameter) and not is_opaque(tensor) and tensor.numel() > 0


def sample(tensor: Tensor, most: int) -> Tensor:
    """Return at most `most` elements of a tensor, evenly spaced; the tensor itself if it has no more."""
    count = tensor.numel()
    return tensor.detach() if count <= most else tensor.detach().reshape(-1)[:: math.ceil(count / most)]


@torch.no_grad()
def largest(tensors: Iterable[Any]) -> Tensor | None:
    """Return the largest magnitude in each plain tensor, on the device of the first; None without one."""
    largest = [each.abs().amax().float() for each in tensors if is_plain(each)]
    return torch.stack([each.to(largest[0].device) for each in largest]) if largest else None
