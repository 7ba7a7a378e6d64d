"""`rehearse`: trains in pairs to measure the cost of low precision, and finds the modules that cause it.

A pair is one training under the policy and one in the reference, with the same weights and batches. Pairs that begin
with slightly different weights give the gap of their losses, and its error. The second half of the file runs the
trainings of a script, each in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch.nn import Module

from ampkit.debugging.changes import code_of, has_float8, inherits, policy_of, replaced_regions, wider, without_float8
from ampkit.debugging.finding import VERSION, plain
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.ranks import rank
from ampkit.debugging.snapshot import TrainingSnapshot
from ampkit.debugging.trials import Trial, move, run_script, run_task, smallest
from ampkit.policy.module_paths import named_paths, unwrapped
from ampkit.policy.policy import Policy
from ampkit.policy.rules import Rule
from ampkit.region.arguments import RegionSpec

RULES = {f"fp8_{rule.value.removeprefix('float8_')}": rule for rule in Rule if rule.value.startswith("float8_")}
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
    regions = Regions(policy, lambda paths: [model])
    start, extra = before, 0

    def losses(count: int, seed: int = 0) -> list[float]:
        start.restore()
        move(model.parameters(), seed)
        return [float(torch.as_tensor(loss).detach()) for loss in itertools.islice(steps(), count)]

    def train(kept: Sequence[str] | None, seed: int) -> list[float]:
        with regions.entered(kept):
            return losses(n_steps, seed)

    with before, torch.compiler.set_stance("force_eager"):
        observer = Observer(model)
        observer.on_state = before.add  # scalers too
        with regions.entered(None), observer:
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
        report = compare(train, lambda: [path for path in leaf_paths([model]) if regions.can_keep(path)])
    report.steps += extra
    if report.modules:
        report.fix, report.policy = regions.code(report.modules), regions.without(regions.own, tuple(report.modules))
    return report


def compare(train: Train, paths: Callable[[], list[str]]) -> RehearsalReport:
    """Compare trainings in pairs, and find few modules without which no gap remains. An interrupt ends it."""
    report = RehearsalReport()
    try:
        _Pairs(train, report).compare(paths)
    except KeyboardInterrupt:
        report.incomplete = "interrupted; the results until then follow"
    return report


class _Pairs:
    """Trainings in pairs, each of which is executed once."""

    def __init__(self, train: Train, report: RehearsalReport) -> None:
        self._train, self._report = train, report
        self._losses: dict[tuple[tuple[str, ...] | None, int], float] = {}

    def compare(self, paths: Callable[[], list[str]]) -> None:
        report = self._report
        for pairs, n_errors in _ROUNDS:
            for count in range(report.pairs + 1, pairs + 1):
                report.gap, report.error, report.threshold = self._gap((), count, n_errors)
                report.pairs = count
                _print(f"pair {count}: {_percent(report.gap)}")
            report.undecided = not report and (report.gap or 0.0) + 2 * report.error > _SMALLEST_GAP
            if not report.undecided:
                break
        if all(self._losses[None, seed] == self._losses[(), seed] for seed in range(1, report.pairs + 1)):
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
        if key not in self._losses:
            values = self._train(kept, seed)
            self._report.steps += len(values)
            is_finite = bool(values) and all(map(math.isfinite, values))
            self._losses[key] = statistics.mean(values[len(values) // 2 :]) if is_finite else math.inf
        return self._losses[key]

    def _gap(self, kept: Sequence[str], pairs: int, n_errors: float) -> tuple[float, float, float]:
        """Return the gap, its standard error, and the smallest gap that is outside of it.

        The gap is the mean on the scale of asinh, which is linear near 0 and logarithmic far from it, as large gaps
        spread.
        """
        seeds = range(1, pairs + 1)
        references = [self._loss(None, seed) for seed in seeds]
        if not all(map(math.isfinite, references)):
            raise ValueError("the loss of the reference is not finite: `ampkit debug train.py` finds the cause")
        self._report.loss = abs(statistics.mean(references)) or 1.0
        differences = [self._loss(kept, seed) - reference for seed, reference in zip(seeds, references, strict=True)]
        if not all(map(math.isfinite, differences)):
            return math.inf, 0.0, _SMALLEST_GAP
        scaled = [math.asinh(difference / self._report.loss) for difference in differences]
        mean = statistics.mean(scaled)
        error = statistics.stdev(scaled) / math.sqrt(pairs) if pairs > 1 else 0.0
        return math.sinh(mean), error * math.cosh(mean), max(math.sinh(min(n_errors * error, 700.0)), _SMALLEST_GAP)

    def _closes(self, kept: Sequence[str]) -> bool:
        remaining, _, threshold = self._gap(kept, *_ROUNDS[0])
        _print(f"without {', '.join(kept) if len(kept) < 4 else f'{len(kept)} modules'}: {_percent(remaining)}")
        return remaining <= threshold and remaining < (self._report.gap or 0.0) / 2


def _print(text: str) -> None:
    print(f"rehearse: {text}", file=sys.stderr, flush=True)


def leaf_paths(models: Iterable[Module]) -> list[str]:
    """Return the paths of modules without children, the ones with the fewest parameters first."""
    leaves = [(path, each) for model in models for path, each in named_paths(model) if path and not [*each.children()]]
    return [path for path, each in sorted(leaves, key=lambda leaf: sum(p.numel() for p in leaf[1].parameters()))]


class Regions:
    """The regions of a rehearsal, under the policy without some modules, and in the reference.

    `policy` is tested instead of the regions' policies, `rule` for linear layers in addition to them; None: as they
    are. `models` returns the models that have modules at some paths.
    """

    def __init__(
        self, policy: Policy | None, models: Callable[[Sequence[str]], list[Module]], rule: Rule | None = None
    ) -> None:
        self._policy, self._models, self._rule = policy, models, rule
        self._first: RegionSpec | None = None  # region of the steps
        # Policies are made once: regions are entered in each step.
        self.without, self._without_float8 = functools.cache(self._made_without), functools.cache(without_float8)
        self._with_rule = functools.cache(lambda given: given.with_rules({"aten::linear": rule}) if rule else given)

    @property
    def own(self) -> Policy:
        """The policy that is tested, in the program's first region."""
        return Policy.default("cpu") if self._first is None else self._tested(self._first)

    @property
    def float8(self) -> bool:
        """Whether FP8 is tested, against 16 bits; otherwise 16 bits against float32."""
        return has_float8(self.own)

    def entered(self, kept: Sequence[str] | None) -> AbstractContextManager[None]:
        """Return a context in which the program's regions have the policy without `kept`; None: the reference."""

        def replace(spec: RegionSpec) -> RegionSpec:
            if self._policy is not None and self._policy.device_type != spec.device_type:
                return spec
            if self._first is None and spec.enabled:
                self._first = spec
            if inherits(spec) and (kept is not None or self.float8):
                return spec
            if kept is not None:
                return spec._replace(policy=self.without(self._tested(spec), tuple(kept)))
            if self.float8:
                return spec._replace(policy=self._without_float8(self._tested(spec)))
            return spec._replace(enabled=False)

        return replaced_regions(replace)

    def can_keep(self, path: str) -> bool:
        """Return whether there is a module at a path, and the policy has no rule for it."""
        with contextlib.suppress(ValueError):
            return self.without(self.own, (path,)) != self.own
        return False

    def code(self, kept: Sequence[str]) -> str:
        """Return the code of the policy that is tested without some modules."""
        given = self._policy or (None if self._first is None else self._first.policy)
        rules = "" if self._rule is None else f'.with_rules({{"aten::linear": {self._rule}}})'
        return code_of(given, self.own.device_type, kept, wider(self.own, float8=self.float8), rules)

    def _tested(self, spec: RegionSpec) -> Policy:
        return self._with_rule(self._policy or policy_of(spec))

    def _made_without(self, policy: Policy, kept: tuple[str, ...]) -> Policy:
        """Return a policy without some modules. Raises `ValueError` if it has a rule for one of them already."""
        value = wider(policy, float8=has_float8(policy))
        for model in self._models(kept) if kept else ():
            policy = policy.for_modules(model, dict.fromkeys(kept, value))
        return policy


# --- a script


def rehearse_script(script: Sequence[str], against: str | None, n_steps: int) -> RehearsalReport:
    """Rehearse a script, given with its arguments, each training of which runs in a fresh process.

    Raises:
        RuntimeError: with the end of the script's errors, if it does not come to a result.
    """
    backwards: int | None = None  # steps that a scaler skips do not change calls of backward

    def run(kept: Sequence[str] | None, seed: int) -> dict[str, Any]:
        nonlocal backwards
        steps = n_steps if backwards is None else None
        task = {"against": against, "kept": kept, "seed": seed, "steps": steps, "backwards": backwards}
        result = run_script(script, task, "rehearse")
        if result["why"]:
            raise RuntimeError(result["why"])
        if not result["all"]:
            raise RuntimeError("the script calls no backward; expected a script that trains")
        backwards = backwards or len(result["all"])
        results.append(result)
        return result

    results: list[dict[str, Any]] = []
    report = compare(
        lambda kept, seed: [float(loss) for loss in run(kept, seed)["all"]], lambda: list(results[-1]["paths"])
    )
    report.fix = run(report.modules, 1)["code"] if report.modules else ""
    return report


def run_training(
    task: dict[str, Any], run: Callable[[AbstractContextManager[Any]], str], stop: Callable[[], None]
) -> None:
    """Execute a training of `rehearse_script` in this process, see `run_task`."""
    regions = Regions(None, _models, RULES[task["against"]] if task["against"] else None)

    def result(trial: Trial) -> dict[str, Any]:
        paths = [path for path in leaf_paths(trial.modules.roots()) if regions.can_keep(path)]
        return {"paths": paths, "code": regions.code(task["kept"] or ())}

    run_task(task, run, stop, regions.entered(task["kept"]), result)


def _models(paths: Sequence[str]) -> list[Module]:
    """Return the outermost modules of this process that have modules at these paths."""
    modules = [each for each in gc.get_objects() if isinstance(each, Module)]
    having = [each for each in modules if set(paths) <= {path for path, _ in named_paths(each) if path}]
    inside = {inner for each in having for inner in each.modules() if inner is not each}
    return [each for each in having if each not in inside and unwrapped(each) is each]
