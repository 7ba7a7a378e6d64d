"""Trial runs: a training runs again with a change, and only the loss of each backward is recorded.

A trial enters no dispatch mode, so it takes about as long as the training without any tool. A script runs in a process
of its own, which gets its task, including the change, as JSON on the command line.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampkit.debugging.changes import Change, Clipping, LearningRate, LineChange, LossScale, NoCache, PolicyChange
from ampkit.debugging.finding import Losses, plain
from ampkit.debugging.observe.call_sites import ModuleCalls, find_caller
from ampkit.debugging.observe.training_loop import TrainingLoop
from ampkit.debugging.snapshot import TrainingSnapshot
from ampkit.gradients.collect import parameters as parameters_of

_KINDS: tuple[Any, ...] = (PolicyChange, LineChange, LossScale, NoCache, LearningRate, Clipping)
_MORE_STEPS = 26  # of a step function, while a loss scale settles
_START = 60.0  # seconds that a process may take to start and to end

Attempt = Callable[[Change | None, int, Collection[int]], Losses | str]
"""`attempt(change, seed, skips)` returns the losses of a training with a change, or why there are none. For `seed` and
`skips` see `Trial`."""

T = TypeVar("T")


class NoResultError(RuntimeError):
    """A process that runs a script ended without a result."""


class StoppedError(BaseException):
    """Ends a script whose run has reached its limit. Not an `Exception`, so that the script does not catch it."""


@dataclass
class Trial:
    """Context that records the loss of each backward, and moves the weights at the first step of each optimizer.

    The losses of a step whose gradients are not finite when the optimizer runs are recorded as NaN.

    Raises:
        StoppedError: after `steps` iterations or `seconds`.
    """

    seed: int = 0  # of the change of the weights; 0: no change
    skips: Collection[int] = ()  # iterations whose optimizer steps have no effect: a scaler skips them without a change
    steps: float = math.inf
    seconds: float = math.inf
    losses: Losses = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.all: list[float] = []  # losses in the order of the calls of backward
        self.updates = 0  # steps of optimizers
        self.modules, self.loop = ModuleCalls(None), TrainingLoop()
        self.loop.listeners, self.loop.step_starts, self.loop.step_ended = [self], self._starts, self._ended
        self._end = time.monotonic() + self.seconds
        self._moved: list[Optimizer] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []  # of a step that is skipped
        self._open = ExitStack()

    def __enter__(self) -> Trial:
        self._open.enter_context(self.loop)
        self._open.enter_context(self.modules.tracked())
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Record a loss. Called by the training loop."""
        self._stop_at_end()  # a scaler may have skipped the last step
        scaler = self.loop.scaler
        scale = scaler.get_scale() if self.loop.loss_is_scaled and scaler is not None else 1.0
        loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
        self.all.append(float(loss.detach().sum()) / scale)
        self.losses.setdefault(find_caller(1).line(), {})[self.loop.iterations.number] = self.all[-1]
        yield

    def _starts(self, optimizer: Optimizer, closure: bool) -> None:
        step, parameters = self.loop.iterations.number, parameters_of(optimizer)
        gradients = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            for losses in self.losses.values():
                losses |= {step: math.nan} if step in losses else {}
        if not any(each is optimizer for each in self._moved):
            self._moved.append(optimizer)
            move(parameters, self.seed)
        if step in self.skips:
            self._gradients = [(parameter, parameter.grad) for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None  # so the optimizer changes neither weights nor moments

    def _ended(self, optimizer: Optimizer) -> None:
        self.updates += not self._gradients
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []
        self._stop_at_end()

    def _stop_at_end(self) -> None:
        if self.loop.iterations.number >= self.steps or time.monotonic() > self._end:
            raise StoppedError


@torch.no_grad()
def move(parameters: Iterable[Tensor], seed: int) -> None:
    """Change parameters by a hundredth of themselves; by nothing if `seed` is 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters if seed else ():
        if parameter.is_floating_point():
            parameter.mul_(1 + 1e-2 * torch.randn(parameter.shape, generator=generator).to(parameter))


def smallest(items: list[T], closes: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return few items for which `closes` is true, by bisection; none if it is false for all of them."""
    if not items or not closes(items):
        return []
    parts = 2
    while len(items) > 1:
        size = math.ceil(len(items) / parts)
        chunks = [items[i : i + size] for i in range(0, len(items), size)]
        rest = [[item for item in items if item not in chunk] for chunk in chunks]
        smaller = next((each for each in (*chunks, *rest) if each and len(each) < len(items) and closes(each)), None)
        if smaller is None and size == 1:
            break
        parts = min(2 * parts, len(items)) if smaller is None else 2
        items = smaller or items
    return items


def _around(change: Change | None) -> AbstractContextManager[Any]:
    return nullcontext() if change is None else change.around()


# --- a step


def step_attempt(step: Callable[[], Any], model: Module, snapshot: TrainingSnapshot, n_steps: int) -> Attempt:
    """Return the attempts of a step function, each of which starts from the state in `snapshot`.

    A training whose optimizer never runs, or whose gradients are not finite without an optimizer, has losses of NaN.
    """

    settling: set[int] = set()  # steps that the scaler skips without a change

    def attempt(change: Change | None, seed: int, skips: Collection[int]) -> Losses | str:
        trial = Trial(seed, skips=settling if change is not None else ())
        is_finite = True
        try:
            with (
                warnings.catch_warnings(action="ignore"),  # the step's own run has shown them
                snapshot,
                torch.compiler.set_stance("force_eager"),
                _around(change),
                trial,
            ):
                for _ in range(n_steps + _MORE_STEPS):
                    step()
                    if not trial.loop.optimizers:
                        is_finite &= all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
                        snapshot.restore_gradients()  # else they would accumulate
                    if (trial.updates if trial.loop.optimizers else len(trial.all)) >= n_steps:
                        break
        except Exception as error:  # the user's code, which may refuse other dtypes or more steps
            return str(error).partition("\n")[0][:100]
        if is_finite and (trial.updates or not trial.loop.optimizers):
            if change is None and seed == 0:
                settling.update(trial.loop.skipped)
            return trial.losses
        return {site: dict.fromkeys(losses, math.nan) for site, losses in trial.losses.items()}

    return attempt


# --- a script


def script_attempt(command: Sequence[str], steps: int, seconds: float, *, may_fail: bool) -> Attempt:
    """Return the attempts of a script, given with its arguments, each of which is a process of its own.

    Args:
        command: the script and its arguments.
        steps: the iterations after which a run ends, if not 0.
        seconds: the seconds after which a run ends.
        may_fail: whether the losses count of a run that fails.
    """

    def attempt(change: Change | None, seed: int, skips: Collection[int]) -> Losses | str:
        result = run_script(command, change, seed, skips=list(skips), steps=steps or math.inf, seconds=seconds)
        if result["why"] and not may_fail:
            return str(result["why"])
        return {(file, line): {step: float(loss) for step, loss in losses} for file, line, losses in result["losses"]}

    return attempt


def run_script(command: Sequence[str], change: Change | None, seed: int, **limits: Any) -> dict[str, Any]:
    """Run a script in a process of its own, and return the result that `run_task` writes.

    `limits` are arguments of `Trial`. Raises `NoResultError` with the end of the script's errors.
    """
    kind = None if change is None else [type(change).__name__, {k: v for k, v in vars(change).items() if k[0] != "_"}]
    timeout = limits["seconds"] + _START if "seconds" in limits else None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        task = json.dumps({"out": str(out), "change": kind, "limits": {"seed": seed, **limits}})
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "ampkit", "debug", "--task", task, *command],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NoResultError(f"the script did not end within {timeout:.0f} s") from None
        except OSError as error:
            raise NoResultError(f"the script did not start: {error}") from None
        if not out.exists():
            raise NoResultError("the script did not come to a result: " + ended.stderr.strip()[-2000:])
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def run_task(task: dict[str, Any], run: Callable[[AbstractContextManager[Any]], str]) -> None:
    """Execute a training of `run_script` in this process, and write its result.

    `run` runs the script under a context and returns why it did not reach its end; "" if it did or was stopped.
    """
    kind, values = task["change"] or (None, {})
    change = next((each(**values) for each in _KINDS if each.__name__ == kind), None)
    trial = Trial(**task["limits"])
    with _around(change), torch.compiler.set_stance("force_eager"):
        result: dict[str, Any] = {"why": run(trial), "all": trial.all}
    result["losses"] = [(*site, list(losses.items())) for site, losses in trial.losses.items()]
    if isinstance(change, PolicyChange):
        result |= {"code": change.code, "leaves": change.leaves(trial.modules.roots())}
    Path(task["out"]).write_text(json.dumps(plain(result)), encoding="utf-8")
