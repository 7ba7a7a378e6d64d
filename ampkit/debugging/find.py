"""`find_nonfinite`: the same step again and again, to see the inputs, the cause, and whether a change helps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

from torch.nn import Module

from ampkit.debugging.detect import detect_nonfinite
from ampkit.debugging.policy_change import PolicyChange
from ampkit.debugging.report import Finding, NonFiniteReport, Suggestion
from ampkit.debugging.snapshot import Snapshot
from ampkit.policy.policy import Policy
from ampkit.region.autocast import autocast

__all__ = ["find_nonfinite"]

_MOST_ROUNDS = 8        # modules that are added to a policy one after the other


def find_nonfinite(
    step: Callable[[], Any], model: Module, *, state: Iterable[Any] = (), verify: bool = True
) -> NonFiniteReport:
    """Where a step's inf and NaN come from, why, and a change that was tried.

    `step` takes no arguments and does the same each time: forward, backward and optimizer, on one batch. It runs once
    with its operators' statistics left on the device; where that finds something, once more from the same state with
    every inf and NaN looked at where it appears; with `verify`, a few times more to try the change that is suggested
    and to drop what it does not need. Then everything is put back: parameters, gradients, optimizers, scalers, random
    number generators and the objects in `state`, which have `state_dict` and `load_state_dict`.

    A suggested policy is tried from outside, as the policy of an enclosing `ampkit.autocast`: a step with
    `torch.autocast`, or with a policy of its own, takes no notice of it, and the suggestion says that it is unverified.

    Raises what the step raises, after putting things back.
    """
    replay = _Replay(step, model, Snapshot(model, state))
    first = replay.run("deferred")
    if not first and not first.skipped:
        return first
    report = replay.run("now")
    if not report and first:
        report.findings = first.findings
        report.notes.append("not reproduced: the replay from the same state was finite")
        return report
    if verify and report:
        report.findings[0] = replay.with_suggestion(report.findings[0])
    return report


class _Replay:
    """Runs a step from one state as often as it takes."""

    def __init__(self, step: Callable[[], Any], model: Module, snapshot: Snapshot) -> None:
        self._step = step
        self._model = model
        self._snapshot = snapshot
        self._runs = 0

    def run(
        self, check: Literal["now", "deferred"], policy: Policy | None = None, scale: float | None = None
    ) -> NonFiniteReport:
        """What a run finds, from the state at the beginning to which it also returns."""
        self._runs += 1
        detect = detect_nonfinite(self._model, check, on_found="record")
        detect.recorder.on_scaler = self._snapshot.add
        around = nullcontext() if policy is None else autocast(policy.device_type, enabled=False, policy=policy)
        try:
            if scale is not None:
                for scaler in self._snapshot.scalers:
                    scaler.load_state_dict({**scaler.state_dict(), "scale": scale})
            with self._snapshot, detect as report, around:
                self._step()
        finally:
            self._snapshot.restore()
        return report

    def with_suggestion(self, finding: Finding) -> Finding:
        """A finding with its suggestion tried, and extended until the step is finite."""
        suggestion = finding.suggestion
        if suggestion is None or suggestion.verified:
            return finding
        self._runs = 0
        if suggestion.scale is not None:
            return replace(finding, suggestion=self._with_scale(suggestion, suggestion.scale))
        if suggestion.change is not None:
            return replace(finding, suggestion=self._with_policy(suggestion, suggestion.change))
        return finding

    def _with_scale(self, suggestion: Suggestion, scale: float) -> Suggestion:
        report = self.run("now", scale=scale)
        for left in (*report.findings, *report.skipped):
            return replace(suggestion, evidence=f"not verified: with it, {left.symptom}")
        return replace(suggestion, verified=True, evidence="verified: with it the step is finite, 1 run")

    def _with_policy(self, suggestion: Suggestion, change: PolicyChange) -> Suggestion:
        """Rule after rule until the step is finite; then without those that it does not need."""
        report = self.run("now", change.policy(self._model))
        for n_tries in range(1, _MOST_ROUNDS + 1):
            if not report:
                change = self._needed(change)
                runs = "1 run" if self._runs == 1 else f"{self._runs} runs"
                return Suggestion(change.code, True, f"verified: with it the step is finite, {runs}", change=change)
            extended = change.extended(report.findings[0].origin)
            if extended is None or n_tries == _MOST_ROUNDS:
                break
            change = extended
            report = self.run("now", change.policy(self._model))
        left = report.findings[0]
        return replace(suggestion, evidence=(
            f"not verified: with it and more, still {left.symptom}, from {left.origin}; a step with torch.autocast, or "
            "with a policy of its own, takes no notice of it"
        ))

    def _needed(self, change: PolicyChange) -> PolicyChange:
        for rule in change.rules:
            less = change.without(rule)
            if less.rules and not self.run("now", less.policy(self._model)):
                change = less
        return change
