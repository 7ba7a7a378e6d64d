"""`rehearse`: trains in pairs to measure the cost of low precision, and finds the modules that cause it.

A pair is one training under the policy and one in the reference, with the same weights and batches. Pairs that begin
with slightly different weights give the gap of their losses, and its error. The second half of the file runs the
trainings of a script, each in a process of its own.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch.nn import Module

from ampkit.debugging.changes import PolicyChange
from ampkit.debugging.finding import VERSION, plain
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.ranks import rank
from ampkit.debugging.snapshot import TrainingSnapshot
from ampkit.debugging.trials import NoResultError, move, run_script, smallest
from ampkit.policy.policy import Policy

_SMALLEST_GAP = 0.01  # a smaller one is not a finding
# Pairs in all, and how many standard errors a gap must have: Student's t with one-sided errors of 2.5 and 1.25%. So if
# the true gap is 0, both rounds together find one in 4% of the cases at most.
_ROUNDS = ((3, 4.30), (6, 3.16))

Train = Callable[[Sequence[str] | None, int], list[float]]
"""`train(kept, seed)` returns the losses of a training from weights moved by `seed`: under the policy without the
modules `kept`, or with None in the reference."""


@dataclass
class RehearsalReport:
    """The report of `rehearse`; truthy if low precision costs something. Gaps are shares of the reference's loss."""

    gap: float | None = None  # inf if the loss is not finite; None before the first pair has ended
    error: float = 0.0  # the standard error of `gap`
    threshold: float = math.inf  # the smallest gap that is a finding: at least 1%, and outside of its error
    undecided: bool = False  # no gap was found, and none of 1% was ruled out
    modules: list[str] = field(default_factory=list)  # precision-sensitive modules, by path: without them no gap
    remaining: float | None = None  # the gap without them
    fix: str = ""  # code of a policy that keeps them out of low precision
    loss: float = 1.0  # of the reference, at the end
    pairs: int = 0
    steps: int = 0  # executed in all trainings
    incomplete: str = ""

    def __post_init__(self) -> None:
        self.policy: Policy | None = None  # the policy of `fix`; None for a script

    def __bool__(self) -> bool:
        return self.gap is not None and self.gap > self.threshold

    @property
    def status(self) -> Literal["clean", "found", "inconclusive"]:
        """ "found" with a gap, "inconclusive" if none was found and none of 1% was ruled out."""
        if self:
            return "found"
        return "inconclusive" if self.undecided or self.incomplete else "clean"

    def __str__(self) -> str:
        lines = [f"inconclusive: {self.incomplete}"] if self.incomplete else []
        if self.gap is not None:
            start = "precision loss: " if self else "undecided: " if self.undecided else "no precision loss: "
            error = f" +- {100 * self.error:.1f}%" if math.isfinite(self.gap) and self.pairs > 1 else ""
            lines.append(f"{start}low precision changes the loss by {_percent(self.gap)}{error} ({self.loss:.4g})")
        if self.fix:
            lines += [f"  modules   {', '.join(self.modules)}", f"  fix       {self.fix}"]
            lines.append(f"  verified  with the fix the loss changes by {_percent(self.remaining or 0)}")
        elif self:
            lines.append("  untested  a recipe that rounds less: without all of the model's modules there is a gap too")
        lines.append(f"not checked: later steps, other data, gaps below 1%; {self.steps} steps were executed")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the report as JSON text."""
        head = {"kind": "ampkit.debugging.rehearsal", "version": VERSION, "status": self.status, "text": str(self)}
        return json.dumps(plain({**head, **asdict(self)}), indent=1, allow_nan=False)


def _percent(gap: float) -> str:
    return f"{100 * gap:+.1f}%" if math.isfinite(gap) else "everything: it is not finite"


def rehearse(
    steps: Callable[[], Iterator[Any]],
    model: Module,
    policy: Policy | None = None,
    *,
    n_steps: int = 40,
    warm_up: int = 80,
) -> RehearsalReport:
    """Train in pairs to find whether low precision costs anything, and which modules to keep out of it.

    One training of a pair runs under the policy, the other in the reference: the policy without its FP8 rules, or
    float32 for a policy that has none. Three pairs start from slightly different weights, and give the gap of the
    losses in the second half of the steps, and its error. Three more follow if the gap is not outside of its error and
    may be above 1%. If there is a gap, modules are kept out of low precision, in halves, then quarters and so on, until
    few remain without which there is none.

    This takes 240 or 480 steps, and three trainings for each set of modules that is tried. Progress is printed to
    stderr. Afterwards the model, optimizers, scalers and random number generators are as before. Compiled functions run
    eagerly. Ctrl-C returns partial results. Processes that train together are not supported. Synchronizes with the
    device.

    Args:
        steps: a generator function without arguments that executes a training step at each `next`, and yields the loss.
            It must do the same each time it is called: the same batches in the same order. Its forward runs in regions
            of `ampkit.autocast` or `torch.autocast`.
        model: the module that it trains.
        policy: the policy to test, instead of the policies of the regions; None: those.
        n_steps: the steps of a training. Fewer if `steps` ends.
        warm_up: steps in the reference that come before all trainings, once: near the initial weights little shows.
            0 for a model that is trained already.

    Returns:
        The report. `modules` are the modules to keep out, and `policy` is a policy that does so, None without a gap.

    Raises:
        TypeError: if `model` is not a module.
        ValueError: if `steps` yields nothing or does not do the same each time, or nothing runs in low precision.
        RuntimeError: in one of several ranks.

    Example::

        def steps():
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            for batch in batches:
                yield train_step(model, optimizer, batch)

        print(debugging.rehearse(steps, model, policy))
    """
    if not isinstance(model, Module):
        raise TypeError(f"model is {type(model).__name__}; expected the torch.nn.Module that the steps train")
    if rank() is not None:
        raise RuntimeError("rehearse runs in one process: ranks would decide separately how many steps to execute")
    before = TrainingSnapshot(model)
    change = PolicyChange(None, policy=policy, model=model)
    start, extra = before, 0

    def losses(count: int, seed: int = 0) -> list[float]:
        start.restore()
        move(model.parameters(), seed)
        return [float(torch.as_tensor(loss).detach()) for loss in itertools.islice(steps(), count)]

    def train(kept: Sequence[str] | None, seed: int) -> list[float]:
        with replace(change, modules=kept).around():
            return losses(n_steps, seed)

    with before, torch.compiler.set_stance("force_eager"):
        observer = Observer(model)
        observer.on_state = before.add  # scalers too
        with change.around(), observer:
            first, again = losses(1), losses(1)
            if not (first and again):
                raise ValueError("steps() yields nothing; expected the loss of each step")
            if not math.isclose(first[0], again[0], rel_tol=1e-5) and not math.isnan(first[0]):
                raise ValueError(
                    f"steps() does not do the same each time: its first loss is {first[0]:.6g}, and then "
                    f"{again[0]:.6g}. Make data loaders, generators and schedulers inside of it"
                )
            extra = 2 + len(losses(warm_up) if warm_up else [])
            start = TrainingSnapshot(model, before.owners) if warm_up else before
        report = compare(train, lambda: change.leaves([model]))
    report.steps += extra
    if report.modules:
        fix = replace(change, modules=report.modules)
        report.fix, report.policy = fix.code, fix.changed_policy(fix.tested())
    return report


def compare(train: Train, paths: Callable[[], list[str]]) -> RehearsalReport:
    """Compare trainings in pairs, and find few modules without which no gap remains. An interrupt ends it."""
    report = RehearsalReport()
    try:
        _Pairs(train, report).compare(paths)
    except KeyboardInterrupt:
        report.incomplete = "interrupted; the results until then follow"
    return report


@dataclass
class _Pairs:
    """Trainings in pairs, each of which is executed once."""

    train: Train
    report: RehearsalReport
    losses: dict[tuple[tuple[str, ...] | None, int], float] = field(default_factory=dict)

    def compare(self, paths: Callable[[], list[str]]) -> None:
        report = self.report
        for pairs, n_errors in _ROUNDS:
            for count in range(report.pairs + 1, pairs + 1):
                report.gap, report.error, report.threshold = self._gap((), count, n_errors)
                report.pairs = count
                _print(f"pair {count}: {_percent(report.gap)}")
            report.undecided = not report and (report.gap or 0.0) + 2 * report.error > _SMALLEST_GAP
            if not report.undecided:
                break
        if all(self.losses[None, seed] == self.losses[(), seed] for seed in range(1, report.pairs + 1)):
            raise ValueError(
                "the losses are the same in low precision and in the reference: nothing is computed in low precision. "
                "Expected steps whose forward runs in an autocast region, and for FP8 linear layers whose sizes are "
                "multiples of 16"
            )
        if report:
            report.modules = smallest(paths(), self._closes)
            report.remaining = self._gap(report.modules, *_ROUNDS[0])[0] if report.modules else None

    def _loss(self, kept: Sequence[str] | None, seed: int) -> float:
        key = None if kept is None else tuple(kept), seed
        if key not in self.losses:
            values = self.train(kept, seed)
            self.report.steps += len(values)
            is_finite = bool(values) and all(map(math.isfinite, values))
            self.losses[key] = statistics.mean(values[len(values) // 2 :]) if is_finite else math.inf
        return self.losses[key]

    def _gap(self, kept: Sequence[str], pairs: int, n_errors: float) -> tuple[float, float, float]:
        """Return the gap, its standard error, and the smallest gap that is outside of it.

        The gap is the mean on the scale of asinh, which is linear near 0 and logarithmic far from it, as large gaps
        spread.
        """
        seeds = range(1, pairs + 1)
        references = [self._loss(None, seed) for seed in seeds]
        if not all(map(math.isfinite, references)):
            raise ValueError("the loss of the reference is not finite: `ampkit debug train.py` finds the cause")
        self.report.loss = abs(statistics.mean(references)) or 1.0
        differences = [self._loss(kept, seed) - reference for seed, reference in zip(seeds, references, strict=True)]
        if not all(map(math.isfinite, differences)):
            return math.inf, 0.0, _SMALLEST_GAP
        scaled = [math.asinh(difference / self.report.loss) for difference in differences]
        mean = statistics.mean(scaled)
        error = statistics.stdev(scaled) / math.sqrt(pairs) if pairs > 1 else 0.0
        return math.sinh(mean), error * math.cosh(mean), max(math.sinh(min(n_errors * error, 700.0)), _SMALLEST_GAP)

    def _closes(self, kept: Sequence[str]) -> bool:
        remaining, _, threshold = self._gap(kept, *_ROUNDS[0])
        _print(f"without {', '.join(kept) if len(kept) < 4 else f'{len(kept)} modules'}: {_percent(remaining)}")
        return remaining <= threshold and remaining < (self.report.gap or 0.0) / 2


def _print(text: str) -> None:
    print(f"rehearse: {text}", file=sys.stderr, flush=True)


def rehearse_script(script: Sequence[str], against: str | None, n_steps: int) -> RehearsalReport:
    """Rehearse a script, given with its arguments, each training of which runs in a process of its own.

    Raises:
        NoResultError: with the reason, if the script does not come to a result.
    """
    if n_steps < 1:
        raise ValueError(f"--steps is {n_steps}; expected 1 or more")
    results: dict[tuple[str, ...], dict[str, Any]] = {}

    def train(kept: Sequence[str] | None, seed: int) -> list[float]:
        result = run_script(script, PolicyChange(kept, against or ""), seed, steps=n_steps)
        if result["why"] or not result["all"]:
            raise NoResultError(result["why"] or "the script calls no backward; expected a script that trains")
        results[tuple(kept or ())] = result
        return [float(loss) for loss in result["all"]]

    report = compare(train, lambda: results[()]["leaves"])
    report.fix = results[tuple(report.modules)]["code"] if report.modules else ""
    return report
