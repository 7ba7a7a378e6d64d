"""`ampkit debug rehearse`: the trainings of a rehearsal as runs of a script, each in a process of its own.

The script stays as it is. In each process its regions are replaced, its first optimizer step changes the weights by a
thousandth, and the losses are those that `backward` starts with, without the loss scale.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampkit.debugging.loop import check_loop
from ampkit.debugging.precision import PrecisionComparison
from ampkit.debugging.rehearse import Precision, StepFacts, move, ranked
from ampkit.policy.module_paths import named_paths
from ampkit.policy.policy import Policy
from ampkit.policy.rules import Rule
from ampkit.region.arguments import RegionSpec

RULES = {rule.value.removeprefix("float8_"): rule for rule in Rule if rule.value.startswith("float8_")}
AGAINST = tuple(f"fp8_{name}" for name in RULES)


@dataclass
class Task:
    """What one process does: a training for its losses, or one step for its facts or for a ranking."""

    kind: str  # "losses", "facts" or "ranking"
    out: str  # the file for the result
    against: str | None  # of `AGAINST`
    cheap: bool
    kept: list[str]
    seed: int | None
    steps: int  # optimizer steps of a training
    n_backward: int | None = None  # calls of backward of a training, once known: skipped steps do not change it


class ScriptTrainings:
    """Trainings as runs of a script in fresh processes."""

    def __init__(self, script: str, arguments: Sequence[str], against: str | None, n_steps: int) -> None:
        self.steps = 0
        self._command = [script, *arguments]
        self._against, self._n_steps = against, n_steps
        self._n_backward: int | None = None
        self._code: dict[str, Any] = {}

    def losses(self, cheap: bool, kept: Sequence[str], seed: int | None) -> list[float]:
        result = self._run("losses", cheap, kept, seed)
        losses = [float(loss) for loss in result["losses"]]
        if not losses:
            raise RuntimeError("the script calls no backward; expected a script that trains")
        if self._n_backward is None:
            self._n_backward = len(losses)
        self.steps += len(losses)
        return losses

    def facts(self, cheap: bool, kept: Sequence[str]) -> tuple[float, int]:
        result = self._run("facts", cheap, kept)
        self.steps += 1
        return result["share"], result["saved"]

    def ranking(self) -> list[str]:
        result = self._run("ranking", True, ())
        self.steps += self._n_steps
        return result["ranking"]

    def code(self, kept: Sequence[str]) -> str:
        return self._run("facts", True, kept)["code"]

    def _run(self, kind: str, cheap: bool, kept: Sequence[str], seed: int | None = None) -> dict[str, Any]:
        """Run the script. Raises `RuntimeError` with the end of its errors if it does not come to a result."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            task = Task(kind, str(out), self._against, cheap, list(kept), seed, self._n_steps, self._n_backward)
            command = [sys.executable, "-m", "ampkit", "debug", "rehearse", "--task", json.dumps(asdict(task))]
            run = subprocess.run(
                [*command, *self._command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
            )
            if not out.exists():
                raise RuntimeError("the script did not come to a result: " + run.stderr.strip()[-2000:])
            return json.loads(out.read_text(encoding="utf-8"))


def run_task(text: str, run: Callable[[contextlib.AbstractContextManager[Any], Callable[[], None]], str]) -> None:
    """Do a task in this process. `run` runs the script under a context, which ends it by the function that it gets."""
    task = Task(**json.loads(text))
    precision = _ScriptPrecision(task)
    result: dict[str, Any] = {}
    with precision.regions(task.cheap, task.kept):
        if task.kind == "losses":
            training = _Training(task)
            why = run(training)
            result["losses"] = training.losses
        elif task.kind == "facts":
            facts = StepFacts(None)
            why = run(facts)
            result.update(share=facts.share(float8=precision.float8), saved=facts.saved, code=precision.code(task.kept))
        else:
            comparison = PrecisionComparison(None)
            comparison.first_step = task.steps - 1
            why = run(comparison)
            result["ranking"] = ranked(comparison.report)
    if why:
        raise RuntimeError(why)
    Path(task.out).write_text(json.dumps(result), encoding="utf-8")
