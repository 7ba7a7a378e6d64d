"""Verify a change on a script that stays as it is: run the script again in a fresh process, with the change applied.

A change that can be applied from outside is JSON on the command line of that process: lines that compute in float32, a
loss scale, a region that keeps no casts.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampkit.debugging.proposed_changes import LineChange, Lines, Region, advice, changes_for, line_of
from ampkit.debugging.report import ExaminationReport, Problem, Suggestion

_MORE_STEPS = 4  # so many steps after the one with the symptom
_MAX_RUNS = 4  # the most runs of the script
_SCALE = 2.0**12


@dataclass(frozen=True)
class LossScale:
    """Backward with a constant loss scale, whose gradients are unscaled at once: what a scaler does to gradients."""

    code = "scaler = ampkit.GradScaler(); scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update()"

    @contextmanager
    def around(self) -> Iterator[None]:
        """A context in which the script runs as if the code were there."""
        inner = torch.autograd.backward

        def scaled(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if not isinstance(tensors, Tensor) or grad_tensors is not None:
                inner(tensors, grad_tensors, *args, **kwargs)
                return
            leaves = list(_leaves(tensors))
            before = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            inner(tensors, torch.full_like(tensors, _SCALE), *args, **kwargs)
            with torch.no_grad():
                for leaf, old in zip(leaves, before, strict=True):
                    if leaf.grad is None:
                        leaf.grad = old
                    else:
                        leaf.grad.div_(_SCALE)
                        leaf.grad = leaf.grad if old is None else old.add_(leaf.grad)

        torch.autograd.backward = scaled
        try:
            yield
        finally:
            torch.autograd.backward = inner


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The parameters that a loss depends on."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes += [following for following, _ in node.next_functions]


@dataclass(frozen=True)
class NoCache:
    """Regions that cast a weight each time, and keep no cast."""

    code = "torch.autocast(..., cache_enabled=False)"

    @contextmanager
    def around(self) -> Iterator[None]:
        """A context in which the script runs as if the code were there."""
        inner, before = torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled = lambda enabled: inner(False)
        inner(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled = inner
            inner(before)


Outside = LineChange | LossScale | NoCache


def to_json(change: Outside) -> str:
    """A change as the argument of a command."""
    data: dict[str, Any] = {"kind": type(change).__name__}
    if isinstance(change, LineChange):
        data |= {"device": change.device, "region": change.region, "lines": change.lines}
    return json.dumps(data)


def from_json(text: str) -> AbstractContextManager[Any]:
    """The context that applies a change."""
    data = json.loads(text)
    if data["kind"] == "LineChange":
        return LineChange(data["device"], data["region"], tuple(Lines(*lines) for lines in data["lines"])).around()
    return {"LossScale": LossScale, "NoCache": NoCache}[data["kind"]]().around()


def _candidates(problem: Problem, region: Region) -> Iterator[Outside]:
    """The changes that may cure a problem and can be applied from outside, the likeliest first."""
    if problem.finding is not None:
        if problem.finding.cause.is_of_data:
            return  # float32 may hide what is wrong with the data
        for change in changes_for(problem.finding, region, None):
            if isinstance(change, LineChange):
                yield change
                extended = change.extended(problem.finding)
                if extended is not None:
                    yield extended
    elif "underflow" in (problem.what if problem.kind == "loop" else problem.kind) and problem.phase != "forward":
        yield LossScale()
    elif problem.kind == "stale cast":
        yield NoCache()
    elif problem.kind in ("absorbed", "imprecise", "rounded", "underflow"):
        place = Lines(problem.file, problem.line, problem.line)
        made = None if problem.made is None else line_of(problem.made)
        if made is not None:
            yield LineChange("cpu", region, (made,))
        if made is None or made != place:
            yield LineChange("cpu", region, tuple(each for each in (made, place) if each is not None))


def verify(report: ExaminationReport, region: Region, command: Sequence[str], seconds: float) -> None:
    """Try changes for the first problems of a report, and note those that cure.

    Args:
        report: what a run found; the suggestions of its problems are replaced.
        region: the kind of region that the script's modules ran in.
        command: the script and its arguments.
        seconds: the most seconds for each run.
    """
    runs = 0
    for problem in report.ranked():
        tried: list[str] = []
        if problem.grade == "note":
            return
        for change in _candidates(problem, region):
            if runs == _MAX_RUNS:
                report.unseen.append(f"more changes than the {runs} that were tried")
                return
            runs += 1
            helps, evidence = _run(problem, change, command, seconds)
            if helps is None:  # it is not known whether the change helps
                report.unseen.append(f"whether a change helps: {evidence}")
                break
            if helps:
                found = Suggestion(change.code, "change", True, f"verified: {evidence}", tuple(tried))
                report.suggestions[problem.key] = found
                break
            tried.append(f"{change.code} ({evidence})")
        else:
            if tried:
                left = problem.suggestion if problem.finding is None else advice(problem.finding)
                report.suggestions[problem.key] = replace(left or Suggestion(""), tried=tuple(tried))


def _run(problem: Problem, change: Outside, command: Sequence[str], seconds: float) -> tuple[bool | None, str]:
    """Whether the script runs without a problem with a change, and the evidence; None where it could not run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        steps = max(problem.last if problem.finding is None else problem.step, problem.step) + _MORE_STEPS
        options = [
            "--no-verify",
            "--json",
            str(file),
            "--steps",
            str(steps),
            "--apply",
            to_json(change),
            "--look-at",
            "-1",
        ]
        if problem.kind == "imprecise":
            options[-1] = str(problem.step)
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
            return None, f"the script did not end within {seconds:.0f} s, or was killed"
    if after["incomplete"]:
        return False, after["incomplete"]
    if after["steps"] <= problem.step:
        return False, "the script ended too early"
    for left in after["findings"]:
        if left["grade"] != "note" and (left["look"] == problem.look or left["rank"] == 1):
            return False, f"still there: {left['what']}"
    first, last = after["loss"]
    if first is None:
        return True, f"{after['steps']} steps without it"
    if isinstance(last, str) or (math.isfinite(first) and abs(last) > 1 + 100 * abs(first)):
        return False, "the loss diverges"
    return True, f"{after['steps']} steps without it, the loss goes from {first:.4g} to {last:.4g}"


def applied(text: str | None) -> AbstractContextManager[Any]:
    """The context of the change that `--apply` has; an empty one without."""
    return ExitStack() if text is None else from_json(text)
