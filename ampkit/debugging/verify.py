"""Verifies fixes: runs a step or a script again with a change, and looks whether the finding is gone.

A script runs again in a fresh process. A change that can be applied from outside is JSON on the command line of that
process: lines that compute in float32, a loss scale, a region that keeps no casts.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from ampkit.debugging.changes import Change, LineChange, Lines, LossScale, NoCache, PolicyChange, advice, changes_for
from ampkit.debugging.finding import Finding, Fix, NonFiniteError, Report
from ampkit.debugging.observe.call_sites import ModuleCalls
from ampkit.debugging.snapshot import TrainingSnapshot

_MORE_STEPS = 4  # steps of a script after the one with the symptom
_MAX_SCRIPT_RUNS = 4
_MAX_STEP_RUNS = 24
_MAX_LINES = 8  # the most modules or lines of one change, which are added one by one
_VERIFIED_STEPS = 4  # steps in a row that must be finite with a change
_MAX_STEPS = 30  # the most steps to wait for these, while a loss scale settles

Losses = dict[tuple[str, int], dict[int, float]]  # by line of backward, and by step


class _Outcome(NamedTuple):
    """The outcome of a run with a change."""

    helps: bool | None  # None if the run came to no result
    text: str
    remaining: Finding | None = None  # of inf or NaN


def _verify(
    report: Report,
    modules: ModuleCalls,
    attempt: Callable[[Finding, Change], _Outcome],
    max_runs: int,
    max_extensions: int,
    *,
    is_script: bool = False,
) -> None:
    """Try changes for the findings of a report, and note those that help. A change is extended while it does not."""
    runs = 0
    for finding in report.ranked():
        if finding.grade == "note" and (is_script or finding.check != "precision"):
            continue
        if is_script and finding.cause.is_of_data:
            continue  # float32 may hide an error of the data
        if finding.check == "nonfinite" and finding.scale is not None and _mishandles_scale(report):
            finding.fix = Fix("correct the loop first: it mishandles scaled gradients")
            continue
        tried: list[str] = []
        for change in changes_for(finding, modules.region, modules.model, modules.policy):
            current, outcome = change, _Outcome(False, "")
            for extension in range(max_extensions + 1):
                if runs == max_runs:
                    report.not_checked.append(f"more fixes than the {runs} that were tried")
                    return
                runs += 1
                outcome = attempt(finding, current)
                if outcome.helps is not False or extension == max_extensions:
                    break
                extended = _extended(current, outcome.remaining or finding)
                if extended is None:
                    break
                current = extended
            if outcome.helps:
                finding.fix = Fix(current.code, True, outcome.text, tuple(tried))
                break
            if outcome.helps is None:
                report.not_checked.append(f"whether a fix helps: {outcome.text}")
                break
            tried.append(f"{current.code} ({outcome.text})")
        else:
            if tried:
                code = advice(finding) if finding.check in ("nonfinite", "data") else finding.fix.code
                finding.fix = Fix(code, tried=tuple(tried))


def _mishandles_scale(report: Report) -> bool:
    return any(each.check == "loop order" and each.grade == "error" for each in report.findings)


def _extended(change: Change, remaining: Finding) -> Change | None:
    return change.extended(remaining) if isinstance(change, (LineChange, PolicyChange)) else None


def _result(steps: int, before: Losses, after: Losses) -> _Outcome:
    """Return the outcome of a run without the finding, with the loss of one line in the last step of both runs."""
    for site, losses in after.items():
        first, last = next(iter(losses.values())), next(reversed(losses.values()))
        if not math.isfinite(last) or (math.isfinite(first) and abs(last) > 1 + 100 * abs(first)):
            return _Outcome(False, f"the loss of {site[0]}:{site[1]} diverges")
    text = f"did not recur in {steps} step{'s' if steps > 1 else ''}"
    sites = sorted(after, key=lambda site: all(map(math.isfinite, before.get(site, {}).values())))
    for site in sites:  # that of a loss which was not finite first
        losses = after[site]
        common = max(before.get(site, {}).keys() & losses.keys(), default=None)
        if common is not None:
            place = f"{site[0]}:{site[1]}" if len(after) > 1 else ""
            where = " ".join(filter(None, (place and f"of {place}", f"in step {common}")))
            return _Outcome(True, f"{text}; loss {where}: {before[site][common]:.4g} -> {losses[common]:.4g}")
    return _Outcome(True, text)


# --- a step


def verify_step(
    report: Report,
    modules: ModuleCalls,
    step: Callable[[], Any],
    model: Module,
    snapshot: TrainingSnapshot,
    examination: Callable[..., Any],
) -> None:
    """Try changes for the findings of a step, each from the state in `snapshot`, in an `examination`."""
    before = {site: dict(losses) for site, losses in report.losses.items()}

    def attempt(finding: Finding, change: Change) -> _Outcome:
        trial = examination(model, on_nonfinite="raise")
        trial.chosen_step = 0 if finding.check == "precision" else -1
        steps = in_a_row = 0
        try:
            with snapshot, change.around(), trial as after:
                while in_a_row < _VERIFIED_STEPS and steps < _MAX_STEPS:
                    values = [p.detach().clone() for p in model.parameters()]
                    step()
                    steps += 1
                    if not snapshot.optimizers:
                        snapshot.restore_gradients()  # else they would accumulate
                    updated = not all(map(torch.equal, values, model.parameters()))
                    in_a_row = in_a_row + 1 if updated or not snapshot.optimizers else 0
        except NonFiniteError as error:
            return _Outcome(False, "still not finite", error.report.nonfinite[0])
        except RuntimeError as error:  # an operator refuses the mix of dtypes
            return _Outcome(False, str(error).partition("\n")[0][:100])
        if in_a_row < _VERIFIED_STEPS:
            return _Outcome(False, "finite, but no parameter changes")
        if any(each.grade in (finding.grade, "error") and each.check == finding.check for each in after.findings):
            return _Outcome(False, "it recurs")
        outcome = _result(steps, before, after.losses)
        return outcome if snapshot.optimizers else outcome._replace(text=f"{outcome.text} (the step has no optimizer)")

    _verify(report, modules, attempt, _MAX_STEP_RUNS, _MAX_LINES - 1)


# --- a script


def verify_script(report: Report, modules: ModuleCalls, command: Sequence[str], seconds: float) -> None:
    """Try changes for the first findings of a report of a script, each in a run of at most `seconds`.

    Args:
        report: the findings of a run; their fixes are replaced.
        modules: the modules that ran.
        command: the script and its arguments.
        seconds: the most seconds for each run.
    """

    def attempt(finding: Finding, change: Change) -> _Outcome:
        return _run_script(report, finding, change, command, seconds)

    _verify(report, modules, attempt, _MAX_SCRIPT_RUNS, 1, is_script=True)


def _run_script(report: Report, finding: Finding, change: Change, command: Sequence[str], seconds: float) -> _Outcome:
    last = finding.step if finding.check in ("nonfinite", "data") else finding.last
    steps = max(last, finding.step) + _MORE_STEPS
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        options = ["--no-verify", "--json", str(file), "--steps", str(steps), "--apply", to_json(change)]
        options += ["--chosen-step", "-1"]
        try:
            subprocess.run(
                [sys.executable, "-m", "ampkit", "debug", *options, *command],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                check=False,
            )
            after = json.loads(file.read_text(encoding="utf-8"))
        except (subprocess.TimeoutExpired, OSError, ValueError):
            return _Outcome(None, f"the script did not end within {seconds:.0f} s, or was killed")
    if after["incomplete"]:
        return _Outcome(False, after["incomplete"])
    if after["steps"] <= finding.step:
        return _Outcome(False, "the script ended too early")
    for each in after["findings"]:
        if each["grade"] != "note" and (each["check"] == finding.check or each["rank"] == 1):
            return _Outcome(False, f"still there: {each['what']}")
    losses = {
        (each["file"], each["line"]): dict(zip(each["steps"], map(float, each["losses"]), strict=True))
        for each in after["losses"]
    }
    return _result(after["steps"], report.losses, losses)


def to_json(change: Change) -> str:
    """Return a change as the argument of a command."""
    data: dict[str, Any] = {"kind": type(change).__name__}
    if isinstance(change, LineChange):
        data |= {"device": change.device, "region": change.region, "lines": change.lines}
    return json.dumps(data)


def applied(text: str | None) -> AbstractContextManager[Any]:
    """Return the context that applies a change; an empty one without."""
    if text is None:
        return nullcontext()
    data = json.loads(text)
    if data["kind"] == "LineChange":
        return LineChange(data["device"], data["region"], tuple(Lines(*lines) for lines in data["lines"])).around()
    return {"LossScale": LossScale, "NoCache": NoCache}[data["kind"]]().around()
