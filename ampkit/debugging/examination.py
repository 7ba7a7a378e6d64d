"""`examine`: run all checks on a training run and rank the findings.

`Examination` is the run's only dispatch mode, and enters none if no check needs it. Checks observe the operators,
inside and between steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor
from torch.nn import Module

from ampkit.debugging.changes import advice, recommendation
from ampkit.debugging.checks import CHECKS
from ampkit.debugging.checks.check import Check, overridden
from ampkit.debugging.finding import Finding, Fix, NonFiniteError, Report
from ampkit.debugging.observe.call import Call
from ampkit.debugging.observe.observer import UNOBSERVED, Observer
from ampkit.debugging.observe.ranks import rank
from ampkit.debugging.snapshot import TrainingSnapshot
from ampkit.debugging.trials import step_attempt
from ampkit.debugging.verify import verify

_MIN_STEPS = 4  # of each run with a change
_MAX_RUNS = 24  # with changes


class Examination:
    """Context that runs the checks on training steps, and on everything between them.

    Results and random numbers are bitwise identical. With a check that needs operators, compiled functions run eagerly
    and each operator that is checked synchronizes with the device. After the first steps, operators are checked in some
    steps only, unless `on_nonfinite` is "raise". With `checks=[LoopOrder]` it enters no dispatch mode and costs some
    Python calls per step, so it can be used in real training.

    Args:
        model: module whose submodules are named by their paths; None takes the outermost modules that run.
        checks: the classes of the checks, from `ampkit.debugging.checks`; all of them by default.
        on_nonfinite: "raise" raises `NonFiniteError` at the end of a step with inf or NaN; "record" fills the report.
        from_step: number of the first iteration whose operators are observed.

    Raises:
        NonFiniteError: at the end of a step, if `on_nonfinite` is "raise".
        TypeError: if `model` is not a module.
        ValueError: if `on_nonfinite` is another value.

    Entering returns the `Report`, which is complete after the context.

    Example::

        with debugging.Examination(model) as report:
            train(model, loader)
        print(report)
    """

    def __init__(
        self,
        model: Module | None = None,
        *,
        checks: Sequence[type[Check]] = CHECKS,
        on_nonfinite: Literal["record", "raise"] = "record",
        from_step: int = 0,
    ) -> None:
        if on_nonfinite not in ("record", "raise"):
            raise ValueError(f"on_nonfinite is {on_nonfinite!r}; expected 'record' or 'raise'")
        needs_operators = any(check.needs_operators for check in checks)
        self.run = Observer(model, needs_operators=needs_operators, from_step=from_step)
        self.report = Report(rank=rank(), losses=self.run.losses)
        self.on_step: Callable[[], None] = lambda: None  # called when a step has ended
        self.on_operator: Callable[[], None] = lambda: None  # called now and then, for progress
        self._checks = [check(self.run, self._add) for check in checks]
        self._raises = on_nonfinite == "raise"
        if self._raises:
            self.run.full_until = math.inf
        self._new_nonfinite = False
        self._open = ExitStack()

    def __enter__(self) -> Report:
        run = self.run
        run.operator_ran = [*overridden(self._checks, "operator_ran"), self._progress]
        run.on_step_starts, run.on_step_ended = self._step_starts, self._end_step
        run.on_step_counted, run.on_pause = self._step_counted, self._pause
        run.loop.listeners, run.loop.backward_starts = list(self._checks), self._backward_starts
        with ExitStack() as stack:
            stack.enter_context(run)
            for check in self._checks:
                check.opened(stack)
            self._open = stack.pop_all()
        return self.report

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._open.close()
        report, run = self.report, self.run
        if error is not None and not isinstance(error, NonFiniteError):
            report.incomplete = f"the steps ended with {type(error).__name__}"
        self._count()
        if not isinstance(error, NonFiniteError):
            self._end_step(None, complete=error is None)  # the user's own error remains the context of a NonFiniteError
        for check in self._checks:
            check.ended()
            report.not_checked += check.not_checked()
        self._note_skips()
        self._note_consequences()
        if run.unobserved:
            report.not_checked.append(
                f"the operators of {run.unobserved} of {report.steps} steps, after the first ones"
            )
            for finding in report.nonfinite:
                if finding.kind == "arrived" and finding.grade == "error":
                    first = max(0, finding.step - UNOBSERVED)
                    finding.fix = Fix(f"--from-step {first}: the operators of some steps before were not checked")
        if run.missed is not None:
            text = "the loss became inf or NaN in step {0}, whose operators were not checked: --from-step {0}"
            report.not_checked.append(text.format(run.missed))
        if not run.loop.optimizers and not report.steps > 1:
            report.not_checked.append("changes between steps: no optimizer stepped, so the run counts as one step")

    def _backward_starts(self, roots: list[Tensor], scaled: bool) -> None:
        self.run.backward_starts(roots, scaled)
        for check in self._checks:
            check.backward_starts(roots, scaled)

    def _pause(self) -> None:
        for check in self._checks:
            check.paused()

    def _progress(self, call: Call) -> None:
        if call.index % 256 == 0:
            self.on_operator()

    def _add(self, finding: Finding, *, skipped: bool = False) -> None:
        """Add a finding of a check, with an untested fix."""
        finding.fix = recommendation(finding, self.run.modules)
        if not self.report.add(finding, skipped=skipped):
            return
        self._new_nonfinite |= not skipped and finding.check in ("nonfinite", "data") and finding.grade == "error"

    # --- steps

    def _step_starts(self, optimizer: Any, closure: bool) -> None:
        for check in self._checks:
            if self.run.begun or not check.needs_operators:
                check.step_starts(optimizer, closure)

    def _step_counted(self) -> None:
        """Begin the next step: `run` has counted the last one."""
        self._count()
        self.on_step()

    def _end_step(self, optimizer: Any, *, complete: bool = True) -> None:
        self._new_nonfinite = False
        for check in self._checks:
            if self.run.begun or not check.needs_operators:
                check.step_ended(optimizer, complete=complete)
        if self._new_nonfinite and self._raises:
            self._count()
            raise NonFiniteError(self.report)

    def _count(self) -> None:
        report, run = self.report, self.run
        report.compiled = run.compiled
        report.operators, report.skips, report.last_skip = run.count, run.loop.skips, run.loop.last_skip
        report.steps = max(0, run.step - run.first_step) + (run.computed and run.begun)

    def _note_skips(self) -> None:
        """Report the cause if a scaler skips many steps, more than while its scale settles."""
        report = self.report
        if not report.skips_many:
            return
        text = f"the scaler skips {report.skips} of {self.run.step} steps"
        underflows = [each for each in report.findings if each.kind == "underflow" and each.check != "loop order"]
        for finding in underflows:
            finding.grade = "precision loss"
            finding.cause = replace(finding.cause, text=f"{finding.cause.text}; {text}")
        if underflows or report.nonfinite or not report.skipped:
            return
        most = max(report.skipped, key=lambda each: each.times)
        self._add(replace(most, grade="precision loss", what=f"{text}: {most.what}", fix=Fix(advice(most))))

    def _note_consequences(self) -> None:
        """Make a note of each overflow in steps after an error that changes the training, or after it diverged."""
        checks = ("state in place", "scaled numbers", "divergence")
        changes = [each for each in self.report.findings if each.check in checks]
        for finding in self.report.nonfinite:
            before = next((each for each in changes if each.grade == "error" and each.step < finding.step), None)
            if before is not None and (before.check == "divergence" or finding.kind in ("overflow", "intermediate")):
                finding.grade = "note"
                text = f"{finding.cause.text}; it may follow from the error at {before.place.file}:{before.place.line}"
                finding.cause = replace(finding.cause, text=text)


def examine(step: Callable[[], Any], model: Module, *, steps: int = 4, state: Iterable[Any] = ()) -> Report:
    """Run a step a few times and return one ranked list of problems: place, cause and a fix that was tried.

    The step runs again from the same state with each fix that is tried. Afterwards everything is as before: parameters,
    buffers, gradients, optimizers, scalers, random number generators and the objects in `state`.

    Synchronizes with the device at each operator.

    Args:
        step: function without arguments: forward, backward and optimizer.
        model: module whose state is restored, and whose submodules are named by their paths.
        steps: number of times that the step runs.
        state: further objects that the step changes, with `state_dict` and `load_state_dict`, such as a scaler.

    Returns:
        The report; it is truthy with an error or a precision loss, and prints as text.

    Raises:
        TypeError: if an object in `state` has no `state_dict` and `load_state_dict`, or `model` is not a module.
        Exception: an error of the step, after everything is restored.

    Example::

        report = debugging.examine(step, model, state=[scaler])
        print(report)
    """
    snapshot = TrainingSnapshot(model, state)
    examination = Examination(model)
    examination.run.on_state = snapshot.add
    with snapshot, examination as report:
        for _ in range(steps):
            step()
    attempt = step_attempt(step, model, snapshot, max(steps, _MIN_STEPS))
    base = attempt(None, 0, ()) if report.findings or examination.run.low else {}
    if not isinstance(base, str):
        verify(report, examination.run, attempt, base, max_runs=_MAX_RUNS)
    return report
