"""`ampkit debug rehearse`: the trainings of a rehearsal as runs of a script, each in a process of its own.

The script stays as it is. In each process its regions are replaced, its first optimizer step changes the weights by a
hundredth, and the losses are those that `backward` starts with, without the loss scale.
"""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampkit.debugging.loop import check_loop
from ampkit.debugging.precision import PrecisionComparison
from ampkit.debugging.regions import has_float8, wider
from ampkit.debugging.rehearsal import Precision, RehearsalReport, StepFacts, move, ranked
from ampkit.policy.module_paths import named_paths, unwrapped
from ampkit.policy.policy import Policy
from ampkit.policy.rules import Rule
from ampkit.region.arguments import RegionSpec

RULES = {rule.value.removeprefix("float8_"): rule for rule in Rule if rule.value.startswith("float8_")}
_LINEAR = "aten::linear"
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


def run_task(
    text: str, run: Callable[[contextlib.AbstractContextManager[Any]], str], stop: Callable[[], None]
) -> RehearsalReport:
    """Do a task in this process, and write its result.

    `run` runs the script under a context and returns why it did not run to its end, if it did not; `stop` ends it.
    """
    task = Task(**json.loads(text))
    precision = _ScriptPrecision(task)
    result: dict[str, Any] = {}
    with precision.regions(task.cheap, None, task.kept), torch.compiler.set_stance("force_eager"):
        if task.kind == "losses":
            training = _Training(task, stop)
            why = run(training)
            result["losses"] = training.losses
        elif task.kind == "facts":
            facts = _OneStep(stop)
            why = run(facts)
            result.update(share=facts.share(float8=precision.float8), saved=facts.saved, code=precision.code(task.kept))
        else:
            comparison = PrecisionComparison(None)
            comparison.first_step, comparison.on_step = task.steps - 1, stop
            why = run(comparison)
            result["ranking"] = [path for path in ranked(comparison.report) if precision.can_keep(path)]
    if why:
        raise RuntimeError(why)
    Path(task.out).write_text(json.dumps(result), encoding="utf-8")
    return RehearsalReport()


class _ScriptPrecision(Precision):
    """The regions of a script, whose model is found when a module has to be kept out."""

    def __init__(self, task: Task) -> None:
        super().__init__(None)
        self._rule = None if task.against is None else RULES[task.against.removeprefix("fp8_")]

    def can_keep(self, path: str) -> bool:
        """Whether a rule for a module is possible: it has a path, and the script's policy has no such rule."""
        try:
            return bool(_models([path])) and bool(self.kept(self.own(), None, (path,)))
        except ValueError:
            return False

    def judged(self, spec: RegionSpec) -> Policy:
        policy, rule = super().judged(spec), self._rule
        return policy if rule is None else self.made(policy, lambda: policy.with_rules({_LINEAR: rule}))

    def code(self, kept: Sequence[str]) -> str:
        added = "" if self._rule is None else f'.with_rules({{"{_LINEAR}": {self._rule}}})'
        return super().code(kept).replace(".for_modules", f"{added}.for_modules", 1)

    def kept(self, policy: Policy, model: Module | None, kept: tuple[str, ...]) -> Policy:
        if not kept:
            return policy
        return self.made((policy, kept), lambda: self._bound(policy, kept))

    def _bound(self, policy: Policy, kept: tuple[str, ...]) -> Policy:
        value = wider(policy, float8=has_float8(policy))
        for model in _models(kept):
            policy = policy.for_modules(model, dict.fromkeys(kept, value))
        return policy


def _models(paths: Sequence[str]) -> list[Module]:
    """The outermost modules of this process that have modules at these paths."""
    modules = [each for each in gc.get_objects() if isinstance(each, Module)]
    having = [each for each in modules if set(paths) <= {path for path, _ in named_paths(each) if path}]
    inside = {inner for each in having for inner in each.modules() if inner is not each}
    return [each for each in having if each not in inside and unwrapped(each) is each]


class _Training(check_loop):
    """Context that notes the loss of each backward, and changes the weights at the first step of each optimizer."""

    def __init__(self, task: Task, stop: Callable[[], None]) -> None:
        super().__init__()
        self.losses: list[float] = []
        self._task, self._stop = task, stop
        self._moved: set[Optimizer] = set()

    def _backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        scale = self.scaler.get_scale() if self._loss_is_scaled and self.scaler is not None else 1.0
        loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
        self.losses.append(float(loss.detach().sum()) / scale)
        yield from super()._backward(tensors, *args, **kwargs)
        if len(self.losses) == self._task.n_backward:
            self._stop()

    def _optimizer_starts(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        super()._optimizer_starts(optimizer, args, kwargs)
        if optimizer not in self._moved:
            self._moved.add(optimizer)
            move((p for group in optimizer.param_groups for p in group["params"]), self._task.seed)

    def _step_ended(self, optimizer: Optimizer) -> None:
        super()._step_ended(optimizer)
        if self._task.n_backward is None and self.report.iterations >= self._task.steps:
            self._stop()


class _OneStep(StepFacts):
    """The facts of the script's first step, which ends it."""

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__(None)
        self._stop = stop

    def _step_ended(self, *, skipped: bool = False) -> None:
        self._stop()
