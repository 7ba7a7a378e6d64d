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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampkit.debugging.loop import check_loop
from ampkit.debugging.precision import PrecisionComparison
from ampkit.debugging.rehearsal import Precision, RehearsalReport, Run, StepFacts, move, step_result
from ampkit.policy.module_paths import named_paths, unwrapped
from ampkit.policy.rules import Rule

RULES = {rule.value.removeprefix("float8_"): rule for rule in Rule if rule.value.startswith("float8_")}
AGAINST = tuple(f"fp8_{name}" for name in RULES)


def script_trainings(script: str, arguments: Sequence[str], against: str | None, n_steps: int) -> Run:
    """Trainings as runs of a script in fresh processes, for `judge`.

    A run raises `RuntimeError` with the end of the script's errors if it does not come to a result.
    """
    n_backward: dict[int, int] = {}  # calls of backward by length: steps that a scaler skips do not change it

    def run(
        kind: str, *, cheap: bool = True, kept: Sequence[str] = (), seed: int | None = None, length: int = 1
    ) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            task = {"kind": kind, "out": str(out), "against": against, "cheap": cheap, "kept": kept, "seed": seed}
            task |= {"steps": n_steps * length, "n_backward": n_backward.get(length)}
            command = [sys.executable, "-m", "ampkit", "debug", "rehearse", "--task", json.dumps(task)]
            command += [script, *arguments]
            ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
            if not out.exists():
                raise RuntimeError("the script did not come to a result: " + ended.stderr.strip()[-2000:])
            result = json.loads(out.read_text(encoding="utf-8"))
        if kind == "losses":
            n_backward.setdefault(length, len(result["losses"]))
        return result

    return run


def run_task(
    text: str, run: Callable[[contextlib.AbstractContextManager[Any]], str], stop: Callable[[], None]
) -> RehearsalReport:
    """Do a task in this process, and write its result.

    `run` runs the script under a context and returns why it did not run to its end, if it did not; `stop` ends it.
    """
    task = SimpleNamespace(**json.loads(text))  # of `script_trainings`
    precision = Precision(None, _models, None if task.against is None else RULES[task.against.removeprefix("fp8_")])

    def run_under(tool: contextlib.AbstractContextManager[Any]) -> None:
        why = run(tool)
        if why:
            raise RuntimeError(why)

    def run_step(tool: StepFacts | PrecisionComparison) -> None:
        tool.on_step = stop
        tool.first_step = 0 if task.kind == "facts" else task.steps - 1
        run_under(tool)

    with precision.regions(task.cheap, task.kept), torch.compiler.set_stance("force_eager"):
        if task.kind == "losses":
            training = _Training(task, stop)
            run_under(training)
            if not training.losses:
                raise RuntimeError("the script calls no backward; expected a script that trains")
            result: dict[str, Any] = {"losses": training.losses, "steps": len(training.losses)}
        else:
            result = step_result(task.kind, precision, None, task.kept, run_step)
            result["steps"] = 1 if task.kind == "facts" else task.steps
    Path(task.out).write_text(json.dumps(result), encoding="utf-8")
    return RehearsalReport()


def _models(paths: Sequence[str]) -> list[Module]:
    """The outermost modules of this process that have modules at these paths."""
    modules = [each for each in gc.get_objects() if isinstance(each, Module)]
    having = [each for each in modules if set(paths) <= {path for path, _ in named_paths(each) if path}]
    inside = {inner for each in having for inner in each.modules() if inner is not each}
    return [each for each in having if each not in inside and unwrapped(each) is each]


class _Training(check_loop):
    """Context that notes the loss of each backward, and changes the weights at the first step of each optimizer."""

    def __init__(self, task: Any, stop: Callable[[], None]) -> None:
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
