"""`find_nonfinite`: the same step again and again, to see the inputs, the cause, and whether a change helps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module

from ampkit.debugging.causes import Cause, dtype_name, number_that_is_zero
from ampkit.debugging.changes import Change
from ampkit.debugging.detect import detect_nonfinite, operation_of
from ampkit.debugging.operator_calls import OperatorCall
from ampkit.debugging.operator_facts import tensors_in
from ampkit.debugging.report import Finding, NonFiniteError, NonFiniteReport, Suggestion
from ampkit.debugging.shadow import Measured, ShadowRun
from ampkit.debugging.snapshot import Snapshot
from ampkit.debugging.suggestions import advice, changes_for
from ampkit.torch_internals.operator_tracing import OpOverload

__all__ = ["find_nonfinite"]

_MOST_RULES = 8         # modules or lines that are added to a change one after the other
_LASTING = 4            # steps in a row that a change must keep finite
_MOST_STEPS = 30        # until then: a loss scale settles first


def find_nonfinite(
    step: Callable[[], Any], model: Module, *, state: Iterable[Any] = (), verify: bool = True
) -> NonFiniteReport:
    """Where a step's inf and NaN come from, why, and a change that was tried.

    `step` takes no arguments and does the same each time: forward, backward and optimizer, on one batch. It runs once;
    where an operator met a 0 that it cannot take, once more beside itself in a wider dtype, to tell a 0 that was
    rounded from one that is exact. With `verify`, changes are tried: a policy for steps in ampkit's regions, lines in
    float32 for others, another loss scale. A change is verified when four steps in a row with it are finite and update
    the parameters, and the loss does not grow a hundredfold; a change that failed is not suggested. Then everything is
    put back: parameters, buffers, gradients, optimizers, scalers, random number generators and the objects in `state`,
    which have `state_dict` and `load_state_dict`.

    A step that uses `torch.compile` runs eagerly here. Where it is finite as it is, compiled, that is the answer: the
    report has a note in place of findings.

    Raises what the step raises, after putting things back.
    """
    replay = _Replay(step, model, Snapshot(model, state))
    report = replay.run()
    if report and report.compiled and replay.is_finite_as_it_is():
        report.notes.append(f"as it is, compiled, the step is finite; run eagerly: {report.findings[0]}")
        report.findings = []
    if report:
        report.findings[0] = replay.with_cause(report.findings[0])
        if verify:
            report.findings[0] = replay.with_suggestion(report.findings[0], loop_is_wrong=bool(report.loop))
    return report


class _Replay:
    """Runs a step from one state as often as it takes."""

    def __init__(self, step: Callable[[], Any], model: Module, snapshot: Snapshot) -> None:
        self._step = step
        self._model = model
        self._snapshot = snapshot
        self._region: Any = "none"
        self._runs = 0

    def run(self) -> NonFiniteReport:
        """What a run finds, from the state at the beginning to which it also returns."""
        detect = detect_nonfinite(self._model, on_found="record")
        detect.recorder.on_scaler = self._snapshot.add
        try:
            with self._snapshot, detect as report:
                self._step()
        finally:
            self._snapshot.restore()
        self._region = detect.recorder.modules.region
        return report

    def is_finite_as_it_is(self) -> bool:
        """Whether what the step returns and leaves behind is finite without any tool."""
        try:
            with self._snapshot:
                result = self._step()
            tensors = [*tensors_in(result), *self._model.parameters()]
            tensors += [one.grad for one in self._model.parameters() if one.grad is not None]
            return all(bool(torch.isfinite(one).all()) for one in tensors)
        finally:
            self._snapshot.restore()

    def with_cause(self, finding: Finding) -> Finding:
        """A finding whose 0 or inf is followed back to the operator that rounded it, if one did."""
        if finding.cause.kind not in ("undefined", "from inf") or "float64" not in finding.cause.text:
            return finding
        run = _OriginRun(self._model, finding)
        try:
            with self._snapshot, run:
                self._step()
        finally:
            self._snapshot.restore()
        made = run.made()
        if made is None:
            return finding
        text = number_that_is_zero(made.call.numbers, made.dtype)
        if text is None:
            how = "it underflows" if made.local.lost else "what it is made of is rounded"
            text = f"0 in {dtype_name(made.dtype)}, and not in exact arithmetic: {how}"
        return replace(finding, cause=Cause("rounded", text), made=operation_of(made.call, made.place))

    def with_suggestion(self, finding: Finding, *, loop_is_wrong: bool) -> Finding:
        """A finding with what was tried for it: the first change that lasts, or advice."""
        if loop_is_wrong and finding.scale is not None:
            first = "put the loop right first, as said above"
            return replace(finding, suggestion=Suggestion(first, evidence="it mishandles scaled gradients"))
        self._runs = 0
        tried = []
        for change in changes_for(finding, self._region, self._model):
            evidence, change = self._extended(change)
            if not evidence:
                tried.append(change.code)
                continue
            change, evidence = self._needed(change, evidence)
            runs = "1 run" if self._runs == 1 else f"{self._runs} runs"
            suggestion = Suggestion(change.code, "change", True, f"verified: {evidence}; {runs}", tuple(tried))
            return replace(finding, suggestion=suggestion)
        return replace(finding, suggestion=replace(advice(finding), tried=tuple(tried)))

    def _extended(self, change: Change) -> tuple[str, Change]:
        """A change, rule after rule, until steps stay finite; with the evidence, or "" if they do not."""
        for _ in range(_MOST_RULES):
            evidence, left = self._lasts(change)
            extended = None if evidence or left is None else change.extended(self.with_cause(left))
            if extended is None:
                return evidence, change
            change = extended
        return "", change

    def _needed(self, change: Change, evidence: str) -> tuple[Change, str]:
        """Without the rules that it does not need."""
        for less in change.smaller():
            found, _ = self._lasts(less)
            if found:
                return self._needed(less, found)
        return change, evidence

    def _lasts(self, change: Change) -> tuple[str, Finding | None]:
        """Whether steps with a change stay finite and update parameters: the evidence, or "" and a finding."""
        self._runs += 1
        detect = detect_nonfinite(self._model, on_found="raise")
        steps = lasting = 0
        try:
            with self._snapshot, change.around(detect.recorder, self._snapshot), detect:
                while lasting < _LASTING and steps < _MOST_STEPS:
                    before = [one.detach().clone() for one in self._model.parameters()]
                    self._step()
                    steps += 1
                    if not self._snapshot.optimizers:
                        self._snapshot.restore_gradients()      # nothing else clears what would add up
                    moved = not all(map(torch.equal, before, self._model.parameters()))
                    lasting = lasting + 1 if moved or not self._snapshot.optimizers else 0
        except NonFiniteError as error:
            return "", error.report.findings[0]
        except RuntimeError:
            return "", None     # dtypes that do not go together
        finally:
            self._snapshot.restore()
        losses = detect.recorder.losses
        if lasting < _LASTING or not all(map(math.isfinite, losses)):
            return "", None
        if losses and abs(losses[-1]) > 1 + 100 * abs(losses[0]):
            return "", None     # it diverges
        return f"{steps} steps with it are finite{_course(losses, bool(self._snapshot.optimizers))}", None


def _course(losses: list[float], updated: bool) -> str:
    if not updated:
        return " (it has no optimizer)"
    return f", the loss goes from {losses[0]:.4g} to {losses[-1]:.4g}" if len(losses) > 1 else ""


class _OriginRun(ShadowRun):
    """A step beside itself in a wider dtype, to see what the inputs of an operator that failed were made of."""

    def __init__(self, model: Module, finding: Finding) -> None:
        wide = torch.float64 if finding.origin.dtype == "float32" else torch.float32
        super().__init__(model, wide, lambda run: None)
        self._index = finding.origin.index
        self._made = -1

    def observe(self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call.index == self._index:
            errors = [
                self.memory.error(one) for one in tensors_in((args, kwargs))
                if self.memory.has_copy(one) and bool(((one == 0) & (self.memory.read(one) != 0)).any())
            ]
            self._made = max((one.lost if one.lost >= 0 else one.maker for one in errors), default=-1)
        return super().observe(call, func, args, kwargs)

    def made(self) -> Measured | None:
        """The call that rounded an input to 0."""
        return next((one for one in self.measured if one.call.index == self._made), None)
