"""`find_nonfinite`: the same step again and again, to see the inputs, the cause, and whether a change helps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.debugging.causes import Cause, poles, rounded_number
from ampkit.debugging.detect import detect_nonfinite
from ampkit.debugging.operator_calls import OperatorCall
from ampkit.debugging.operator_facts import tensors_in
from ampkit.debugging.precision import PrecisionComparison
from ampkit.debugging.proposed_changes import Change, Region, advice, changes_for, suggestion
from ampkit.debugging.report import Finding, NonFiniteError, NonFiniteReport, OperatorError, Suggestion
from ampkit.debugging.snapshot import Snapshot
from ampkit.torch_internals.operator_tracing import OpOverload

_MOST_RULES = 8         # modules or lines that are added to a change one after the other
_LASTING = 4            # steps in a row that a change must keep finite
_MOST_STEPS = 30        # until then: a loss scale settles first


def find_nonfinite(step: Callable[[], Any], model: Module, *, state: Iterable[Any] = ()) -> NonFiniteReport:
    """Where a step's inf and NaN come from, why, and a change that was tried.

    `step` takes no arguments and does the same each time: forward, backward and optimizer, on one batch. It runs once;
    where an operator met a 0 that it cannot take, once more beside itself in a wider dtype, to tell a 0 that was
    rounded from one that is exact. Then changes are tried: a policy for steps in ampkit's regions, lines in float32 for
    all. A change is verified when four steps in a row with it are finite and update the parameters, and the loss does
    not grow a hundredfold; a change that failed is not suggested. In the end everything is put back: parameters,
    buffers, gradients, optimizers, scalers, random number generators and the objects in `state`, which have
    `state_dict` and `load_state_dict`.

    A step that uses `torch.compile` runs eagerly here. Where it is finite as it is, compiled, that is the answer: the
    report has a note in place of findings.

    Raises what the step raises, after putting things back.
    """
    replay = _Replay(step, model, Snapshot(model, state))
    report = replay.run()
    if not report.findings:
        return report
    if report.compiled and replay.is_finite_as_it_is():
        report.note = f"as it is, compiled, the step is finite; run eagerly: {report.findings[0]}"
        report.findings = []
        return report
    finding = report.findings[0] = replay.with_cause(report.findings[0])
    if report.loop and finding.scale is not None:
        finding.suggestion = Suggestion(
            "put the loop right first, as said above", evidence="it mishandles scaled gradients"
        )
    else:
        changes = changes_for(finding, replay.region, model)
        finding.suggestion = suggestion(changes, advice(finding), replay.attempt)
    return report


@dataclass
class _Replay:
    """Runs a step from one state as often as it takes."""

    _step: Callable[[], Any]
    _model: Module
    _snapshot: Snapshot
    region: Region = "none"

    def run(self) -> NonFiniteReport:
        """What a run finds."""
        detect = detect_nonfinite(self._model, on_found="record")
        detect.on_state = self._snapshot.add
        with self._snapshot, detect as report:
            self._step()
        self.region = detect.modules.region
        return report

    def is_finite_as_it_is(self) -> bool:
        """Whether what the step returns and leaves behind is finite without any tool."""
        with self._snapshot:
            tensors = [*tensors_in(self._step()), *self._model.parameters()]
            tensors += [one.grad for one in self._model.parameters() if one.grad is not None]
            return all(bool(torch.isfinite(one).all()) for one in tensors)

    def with_cause(self, finding: Finding) -> Finding:
        """A finding whose 0, 1 or inf is followed back to the operator that rounded it, if one did."""
        if finding.cause.kind not in ("undefined", "from inf") or not finding.inputs:
            return finding
        run = _OriginRun(self._model, finding)
        with self._snapshot, run:
            self._step()
        made = run.made()
        return finding if made is None else replace(finding, made=made[0], cause=Cause("rounded", made[1]))

    def attempt(self, change: Change) -> tuple[Change, bool, str]:
        """Try a change, rule after rule, until steps stay finite or nothing is left to add."""
        helps, evidence, left = self._lasts(change)
        for _ in range(_MOST_RULES - 1):
            more = None if left is None else change.extended(self.with_cause(left))
            if more is None:
                break
            change = more
            helps, evidence, left = self._lasts(change)
        return change, helps, evidence

    def _lasts(self, change: Change) -> tuple[bool, str, Finding | None]:
        """Whether steps with a change stay finite and update parameters, how one sees that, and what is not finite."""
        detect = detect_nonfinite(self._model, on_found="raise")
        steps = lasting = 0
        try:
            with self._snapshot, change.around(), detect:
                while lasting < _LASTING and steps < _MOST_STEPS:
                    before = [one.detach().clone() for one in self._model.parameters()]
                    self._step()
                    steps += 1
                    if not self._snapshot.optimizers:
                        self._snapshot.restore_gradients()      # nothing else clears what would add up
                    moved = not all(map(torch.equal, before, self._model.parameters()))
                    lasting = lasting + 1 if moved or not self._snapshot.optimizers else 0
        except NonFiniteError as error:
            return False, "still not finite", error.report.findings[0]
        except RuntimeError as error:       # dtypes that do not go together
            return False, str(error).partition("\n")[0][:100], None
        losses, updated = detect.losses, bool(self._snapshot.optimizers)
        if lasting < _LASTING:
            return False, "finite, but no parameter moves", None
        if not all(map(math.isfinite, losses)) or (losses and abs(losses[-1]) > 1 + 100 * abs(losses[0])):
            return False, "finite, but the loss runs away", None
        course = f", the loss goes from {losses[0]:.4g} to {losses[-1]:.4g}" if len(losses) > 1 else ""
        return True, f"{steps} steps with it are finite{course if updated else ' (it has no optimizer)'}", None


class _OriginRun(PrecisionComparison):
    """A step beside itself in float64, to see what the inputs of an operator that failed were made of."""

    def __init__(self, model: Module, finding: Finding) -> None:
        super().__init__(model, torch.float64)
        self._index = finding.origin.index
        self._poles = poles(finding.origin.op, finding.origin.backward_of)
        self._maker = -1
        self._numbers: dict[int, tuple[tuple[float, ...], torch.dtype]] = {}
        self.value = 0.0        # the input, which is another one in float64

    def observe(self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call.index == self._index:
            for one in filter(self.memory.has_copy, call.given):
                error, value = self.memory.error(one), self._rounded(one, self.memory.read(one))
                if value is not None:
                    self._maker = max(self._maker, error.maker if error.lost < 0 or value else error.lost)
                    self.value = value
        result = super().observe(call, func, args, kwargs)
        if call.numbers and isinstance(result, Tensor):
            self._numbers[call.index] = call.numbers, result.dtype
        return result

    def made(self) -> tuple[OperatorError, str] | None:
        """The call that rounded an input to 0, or to an end of what the operator takes, and how."""
        error = next((one for one in self.report.operators if one.index == self._maker), None)
        if error is None or not (error.lost or error.dtype in ("float16", "bfloat16")):
            return None     # what float32 rounds, without underflow, is exact enough
        how = "it underflows" if error.lost and self.value == 0 else "what it is made of is rounded"
        text = f"{self.value:g} in {error.dtype}, and not in exact arithmetic: {how}"
        return error, rounded_number(*self._numbers.get(error.index, ((), torch.float32))) or text

    def _rounded(self, tensor: Tensor, reference: Tensor) -> float | None:
        """Of the values that the operator cannot take, one that is in a tensor and another one in the reference."""
        found = (value for value in self._poles if bool(((tensor == value) & (reference != value)).any()))
        return next(found, None) if tensor.is_floating_point() else None
