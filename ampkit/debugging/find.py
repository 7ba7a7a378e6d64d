"""`find_nonfinite`: runs a step repeatedly from the same state, to find the cause of inf or NaN and try changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Module

from ampkit.debugging.call_sites import ModuleCalls
from ampkit.debugging.detect import detect_nonfinite
from ampkit.debugging.operator_facts import tensors_in
from ampkit.debugging.proposed_changes import Change, advice, changes_for, suggestion
from ampkit.debugging.report import Finding, NonFiniteError, NonFiniteReport, Suggestion
from ampkit.debugging.snapshot import TrainingSnapshot

_MAX_RULES = 8  # the most modules or lines of one change, which are added one by one
_VERIFIED_STEPS = 4  # so many steps in a row must be finite with a change
_MAX_STEPS = 30  # the most steps to wait for these, while a loss scale settles


def find_nonfinite(step: Callable[[], Any], model: Module, *, state: Iterable[Any] = ()) -> NonFiniteReport:
    """Find the operators where a step's inf and NaN begin and their causes, and try changes.

    The step runs once under `detect_nonfinite`. Then changes are tried: a policy
    for steps in ampkit's regions, lines in float32 for all steps. A change is verified if four steps in a row with it
    are finite and update the parameters, and the loss does not grow a hundredfold. A change that failed is not
    suggested.

    Afterwards everything is as before: parameters, buffers, gradients, optimizers, scalers, random number generators
    and the objects in `state`. A step that uses `torch.compile` runs eagerly here; if it is finite when compiled, the
    report has a note and no findings.

    Synchronizes with the device at each operator.

    Args:
        step: function without arguments that does the same each time: forward, backward and optimizer, on one batch.
        model: module whose state is restored, and whose submodules are named by their paths.
        state: further objects that the step changes, with `state_dict` and `load_state_dict`, such as a scaler.

    Returns:
        The report; `findings[0].suggestion` has the change.

    Raises:
        TypeError: if an object in `state` has no `state_dict` and `load_state_dict`, or `model` is no module.
        Exception: what the step raises, after everything is restored.

    Example::

        report = debugging.find_nonfinite(step, model, state=[scaler])
        print(report)
    """
    snapshot = TrainingSnapshot(model, state)
    detect = detect_nonfinite(model, on_found="record")
    detect.on_state = snapshot.add
    with snapshot, detect as report:
        step()
    if report.findings and report.compiled and _is_finite_compiled(step, model, snapshot):
        report.note = f"the compiled step is finite; run eagerly: {report.findings[0]}"
        report.findings = []
    if report.findings:
        try_changes(report, step, model, snapshot, detect.modules)
    return report


def _is_finite_compiled(step: Callable[[], Any], model: Module, snapshot: TrainingSnapshot) -> bool:
    """Whether the step's results, parameters and gradients are finite without a tool, thus compiled."""
    with snapshot:
        tensors = [*tensors_in(step()), *model.parameters()]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def try_changes(
    report: NonFiniteReport, step: Callable[[], Any], model: Module, snapshot: TrainingSnapshot, modules: ModuleCalls
) -> None:
    """Try changes for the first finding of a report of a step, from the state in `snapshot`.

    A change is extended by further modules or lines while steps are not finite with it.
    """

    def attempt(change: Change) -> tuple[Change, bool, str]:
        helps, evidence, left = _verify(change, step, model, snapshot)
        for _ in range(_MAX_RULES - 1):
            extended = None if left is None else change.extended(left)
            if extended is None:
                break
            change = extended
            helps, evidence, left = _verify(change, step, model, snapshot)
        return change, helps, evidence

    finding = report.findings[0]
    if report.loop and finding.scale is not None:
        finding.suggestion = Suggestion("correct the loop first, see above", evidence="it mishandles scaled gradients")
        return
    changes = changes_for(finding, modules.region, model, modules.policy)
    finding.suggestion = suggestion(changes, advice(finding), attempt)


def _verify(
    change: Change, step: Callable[[], Any], model: Module, snapshot: TrainingSnapshot
) -> tuple[bool, str, Finding | None]:
    """Whether steps with a change are finite and update parameters, the evidence, and the finding that is left."""
    detect = detect_nonfinite(model, on_found="raise")
    steps = in_a_row = 0
    try:
        with snapshot, change.around(), detect:
            while in_a_row < _VERIFIED_STEPS and steps < _MAX_STEPS:
                before = [p.detach().clone() for p in model.parameters()]
                step()
                steps += 1
                if not snapshot.optimizers:
                    snapshot.restore_gradients()  # else they would accumulate
                updated = not all(map(torch.equal, before, model.parameters()))
                in_a_row = in_a_row + 1 if updated or not snapshot.optimizers else 0
    except NonFiniteError as error:
        return False, "still not finite", error.report.findings[0]
    except RuntimeError as error:  # an operator refuses the mix of dtypes
        return False, str(error).partition("\n")[0][:100], None
    losses = detect.losses
    if in_a_row < _VERIFIED_STEPS:
        return False, "finite, but no parameter changes", None
    if not all(map(math.isfinite, losses)) or (losses and abs(losses[-1]) > 1 + 100 * abs(losses[0])):
        return False, "finite, but the loss diverges", None
    evidence = f"{steps} steps with it are finite"
    if not snapshot.optimizers:
        evidence += " (the step has no optimizer)"
    elif len(losses) > 1:
        evidence += f", the loss goes from {losses[0]:.4g} to {losses[-1]:.4g}"
    return True, evidence, None
