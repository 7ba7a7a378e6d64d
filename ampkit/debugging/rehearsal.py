"""`rehearse`: whether low precision costs a training anything, by short trainings in pairs; and what to keep out.

A pair is one training under the policy and one in the reference, with the same weights and batches. Pairs that begin
with slightly different weights give the gap of their losses, and its error. Longer trainings follow only where
something is suspected.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.flop_counter import flop_registry

from ampkit.debugging.detect import rank
from ampkit.debugging.operator_calls import OperatorCall, OperatorObserver
from ampkit.debugging.precision import PrecisionComparison
from ampkit.debugging.regions import code_of, has_float8, inherits, policy_of, replaced_regions, wider, without_float8
from ampkit.debugging.report import PrecisionReport, Report
from ampkit.debugging.snapshot import TrainingSnapshot
from ampkit.debugging.torch_private import OpOverload, storage_key
from ampkit.policy.policy import Policy
from ampkit.policy.rules import Rule
from ampkit.region.arguments import RegionSpec

_SMALLEST_GAP = 0.01  # a smaller one is not a finding
# For each look the pairs, the length of a training, and how many errors a gap must have: Student's t with one-sided
# errors of 2.5, 1.25 and 1.25 %. So where the true gap is 0, all looks together find one in 5 % at most.
_LOOKS = ((3, 1, 4.30), (3, 3, 6.21), (5, 3, 3.50))
_TRIAL = _LOOKS[0]
_MOST_PLACES = 4
_BLIND = "later steps, other data, gaps below 1 %, and what the reference loses as well"

Run = Callable[..., dict[str, Any]]
"""Trains a program: `run(kind, cheap=True, kept=(), seed=None, length=1)`, under the policy without the modules `kept`,
or with `cheap` False in the reference. `kind` is "losses" for those of a training, or of one step "facts" or "ranking",
see `step_result`. The result has the `steps` that were taken."""


@dataclass
class RehearsalReport(Report):
    """The report of `rehearse`; truthy if the policy costs something.

    `policy` is a policy that closes the gap; None where nothing is to change, where nothing closes it, and for a
    script, which `change` has the code for.
    """

    kind = "rehearsal"
    gap: float | None = None  # of the loss, relative to the reference's; inf where it is not finite
    error: float = 0.0  # the standard error of `gap`
    bar: float = math.inf  # the gap from which on something is to change: at least 1 %, and outside of its error
    places: list[str] = field(default_factory=list)  # modules to keep out, by path
    left: float | None = None  # the gap without them
    change: str = ""  # code of a policy that closes the gap
    undecided: bool = False  # no gap was found, and none of 1 % was ruled out
    suspects: dict[str, float] = field(default_factory=dict)  # modules and by which share they may raise the loss
    loss: float = 1.0  # of the reference, at the end
    share: float | None = None  # of the multiplications, those in the cheaper format; with `change`, of those left
    saved: list[int] = field(default_factory=list)  # bytes that backward keeps: in the reference, under the policy
    pairs: int = 0  # of trainings that `gap` is from
    after: int = 0  # steps of each of them
    steps: int = 0  # taken, in all trainings
    tried: dict[str, float] = field(default_factory=dict)  # the gap without these modules

    def __post_init__(self) -> None:
        self.policy: Policy | None = None

    def __bool__(self) -> bool:
        return bool(self.loop) or (self.gap is not None and self.gap > self.bar)

    def __str__(self) -> str:
        lines = [*self.first_lines(), *([f"inconclusive: {self.incomplete}"] if self.incomplete else [])]
        if self.gap is None:
            return "\n".join(lines)
        lines.append(self._verdict())
        if self.change:
            lines += [f"  place     {', '.join(self.places)}", f"  change    {self.change}"]
            lines.append(f"  evidence  verified: with it {_percent(self.left or 0)}")
        elif self and not self.incomplete:
            lines.append("  advice    no change of up to four modules closes it; a recipe that rounds less may")
            lines += [f"  tried     without {places}: {_percent(gap)}" for places, gap in self.tried.items()]
        if self.share is not None:
            reference, kept = (f"{nbytes / 1e6:.3g} MB" for nbytes in self.saved)
            share = f"{100 * self.share:.0f} % of the multiplications are in the cheaper format"
            lines.append(f"  cheap     {share}; backward keeps {kept} in place of {reference}")
        return "\n".join([*lines, f"  unseen    {_BLIND}; {self.steps} steps were taken"])

    def gap_in_words(self) -> str:
        """The gap with its error, which is not known of one pair."""
        return _percent(self.gap or 0) + (f" +- {100 * self.error:.1f} %" if self.pairs > 1 else "")

    def _verdict(self) -> str:
        gap = self.gap_in_words()
        if self.undecided:
            start = "not decided: "
            for name, rise in list(self.suspects.items())[:1]:
                by = f"{rise:.1%}" if rise < 1 else "more than 100 %"  # where a term of second order is no estimate
                start = f"suspected, not decided: {name} is expected to raise the loss by {by}; "
            return f"{start}the gap after {self.after} steps is {gap}"
        costs = "low precision costs" if self else "nothing to keep: low precision costs"
        costs = "so far low precision costs" if self.incomplete and not self else costs
        return f"{costs} {gap} of the loss ({self.loss:.4g})"


def _percent(gap: float) -> str:
    return f"{100 * gap:+.1f} %" if math.isfinite(gap) else "everything: the loss is not finite, a gap"


def rehearse(
    steps: Callable[[], Iterator[Any]],
    model: Module,
    policy: Policy | None = None,
    *,
    n_steps: int = 40,
    warm_up: int = 80,
) -> RehearsalReport:
    """Find out whether low precision costs a training anything, and which modules to keep out of it.

    Trains in pairs: under the policy, and in the reference, which is the policy without its FP8 rules, or float32 for a
    policy that has none. Three pairs start from slightly different weights, and give the gap of the losses in the
    second half of the steps, and its error. Where the gap is not outside of its error, and it may be above 1 % or the
    rounding of a module is expected to raise the loss by as much, three pairs are trained three times as long, then two
    more. Where the true gap is 0, these looks together find one in 5 % of the cases at most (Student's t with 2.5,
    1.25 and 1.25 %). Where there is a gap, modules with the largest expected rise of the loss are kept out, and the
    training without them is tried the same way.

    That takes 240 steps where nothing is suspected, 480 or 1200 more where something is, three trainings for each
    trial, and the memory of `compare_precision` for one step. Progress is printed to stderr. Afterwards the model,
    optimizers, scalers and random number generators are as before. Compiled functions run eagerly. Ctrl-C ends it with
    a report of what is known so far. Processes that train together are not supported. Synchronizes with the device.

    Args:
        steps: a generator function without arguments that takes a training step at each `next`, and yields the loss.
            It must do the same each time it is called: the same batches in the same order. Its forward runs in regions
            of `ampkit.autocast` or `torch.autocast`.
        model: the module that it trains.
        policy: the policy to judge, in place of the policies of the regions; None: those.
        n_steps: the steps of a training; longer ones take three times as many. Fewer if `steps` ends.
        warm_up: steps in the reference that come before all trainings, once: near the initial weights little shows.
            0 for a model that is trained already.

    Returns:
        The report. `gap` and `error` are shares of the reference's loss, `places` are the modules to keep out, and
        `policy` is a policy that closes the gap, None where nothing is to change.

    Raises:
        TypeError: if `model` is no module.
        ValueError: if `steps` yields nothing or does not do the same each time, or nothing is computed in the cheaper
            format, as without a region.
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
        raise RuntimeError("rehearse runs in one process: ranks would decide for themselves how many steps to take")
    before = TrainingSnapshot(model)
    with before, torch.compiler.set_stance("force_eager"):
        trainings = _Trainings(steps, model, policy, n_steps, before)
        report = judge(trainings.run, lambda: trainings.start(warm_up))
    if report.change:
        report.policy = trainings.precision.without(trainings.precision.own, tuple(report.places))
    return report


def judge(run: Run, start: Callable[[], int]) -> RehearsalReport:
    """Rehearse a program. An interrupt ends it with what is known. `start` returns the steps that it took."""
    report = RehearsalReport()
    try:
        report.steps = start()
        _Judge(run, report).judge()
    except KeyboardInterrupt:
        report.incomplete = "interrupted; what follows was known by then"
    return report


class _Judge:
    """The looks at a program, and the trials of what to keep out."""

    def __init__(self, run: Run, report: RehearsalReport) -> None:
        self._run, self._report = run, report
        self._length = 0  # of the pairs
        self._references: list[float] = []  # losses at the end of each pair
        self._gaps: list[float] = []

    def judge(self) -> None:
        report, facts = self._report, self._result("facts")
        if not facts["share"]:
            raise ValueError(
                "no product is computed in the cheaper format: there is nothing to judge. Expected steps whose forward "
                "runs in an autocast region, and for FP8 linear layers whose sizes are multiples of 16"
            )
        report.share, report.saved = facts["share"], [self._result("facts", cheap=False)["saved"], facts["saved"]]
        ranking = self._result("ranking")
        report.suspects = ranking["suspects"]
        for look in _LOOKS:
            self._look(*look)
            report.undecided = not report and (report.gap or 0.0) + 2 * report.error > _SMALLEST_GAP
            if report or not (report.undecided or (look == _LOOKS[0] and report.suspects)):
                break
        if report:
            self._keep(ranking["ranking"][:_MOST_PLACES])

    def _result(self, kind: str, **training: Any) -> dict[str, Any]:
        result = self._run(kind, **training)
        self._report.steps += result["steps"]
        return result

    def _loss(self, **training: Any) -> float:
        losses = self._result("losses", **training)["losses"]
        self._report.after = len(losses)
        return statistics.mean(losses[len(losses) // 2 :]) if all(map(math.isfinite, losses)) else math.inf

    def _look(self, pairs: int, length: int, n_errors: float) -> None:
        """Train pairs until there are so many of this length."""
        report = self._report
        if length != self._length:
            self._length, self._references, self._gaps = length, [], []
        for seed in range(1 + len(self._gaps), 1 + pairs):
            reference = self._loss(cheap=False, seed=seed, length=length)
            if not math.isfinite(reference):
                raise ValueError(
                    "the loss of the reference is not finite: ampkit.debugging.find_nonfinite finds out why"
                )
            self._references.append(reference)
            self._gaps.append(self._loss(seed=seed, length=length) - reference)
            report.pairs, report.loss = seed, abs(statistics.mean(self._references)) or 1.0
            report.gap, report.error, bar = _gap(self._gaps, report.loss, n_errors)
            report.bar = bar if seed == pairs else math.inf
            _say(f"pair {seed}: {report.gap_in_words()} after {report.after} steps")

    def _trial(self, kept: Sequence[str]) -> tuple[float, bool]:
        """The gap without some modules, and whether it is closed."""
        references = self._references[: _TRIAL[0]]
        gaps = [self._loss(kept=kept, seed=i, length=self._length) - loss for i, loss in enumerate(references, 1)]
        left, _, bar = _gap(gaps, self._report.loss, _TRIAL[2])
        self._report.tried[", ".join(kept)] = left
        _say(f"without {', '.join(kept)}: {_percent(left)}")
        return left, left <= bar and left < (self._report.gap or 0.0) / 2

    def _keep(self, ranking: list[str]) -> None:
        """Find few modules without which there is no gap: the first, the first two, and so on; then fewer of them."""
        report = self._report
        for count in (1, 2, 4):
            left, closed = self._trial(ranking[:count]) if count < 2 * len(ranking) else (0.0, False)
            if closed:
                break
        else:
            return
        report.places, report.left = ranking[:count], left
        for path in report.places[:-1]:
            fewer = [each for each in report.places if each != path]
            left, closed = self._trial(fewer)
            if closed:
                report.places, report.left = fewer, left
        facts = self._result("facts", kept=report.places)
        report.change, report.share, report.saved[1] = facts["code"], facts["share"], facts["saved"]


def _gap(differences: list[float], loss: float, n_errors: float) -> tuple[float, float, float]:
    """The gap that differences from a loss show, its standard error, and the smallest gap that is outside of it.

    It is the mean on the scale of asinh, which is linear near 0 and logarithmic far from it, as large gaps spread.
    """
    if not all(map(math.isfinite, differences)):
        return math.inf, 0.0, _SMALLEST_GAP
    scaled = [math.asinh(difference / loss) for difference in differences]
    mean, error = statistics.mean(scaled), 0.0
    if len(scaled) > 1:
        error = statistics.stdev(scaled) / math.sqrt(len(scaled))
    return math.sinh(mean), error * math.cosh(mean), max(math.sinh(min(n_errors * error, 700.0)), _SMALLEST_GAP)


def _say(text: str) -> None:
    print(f"rehearse: {text}", file=sys.stderr, flush=True)


class _Trainings:
    """Trainings in this process, each from the same state."""

    def __init__(
        self,
        steps: Callable[[], Iterator[Any]],
        model: Module,
        policy: Policy | None,
        n_steps: int,
        before: TrainingSnapshot,
    ) -> None:
        self._steps, self._model, self._n_steps, self._before = steps, model, n_steps, before
        self._warm: TrainingSnapshot = before
        self.precision = Precision(policy, lambda paths: [model])

    def start(self, warm_up: int) -> int:
        """Take the steps before all trainings, and check that the steps do the same each time."""
        observer = OperatorObserver(self._model, Report())
        observer.on_state = self._before.add  # scalers too
        with self.precision.regions(cheap=False):
            first, again = self._taken(1, tool=observer), self._taken(1)
            if not (first and again):
                raise ValueError("steps() yields nothing; expected the loss of each step")
            if not math.isclose(first[0], again[0], rel_tol=1e-5) and not math.isnan(first[0]):
                raise ValueError(
                    f"steps() does not do the same each time: its first loss is {first[0]:.6g}, and then "
                    f"{again[0]:.6g}. Make data loaders, generators and schedulers inside of it"
                )
            warm = self._taken(warm_up) if warm_up else []
            self._warm = TrainingSnapshot(self._model, self._before.owners) if warm_up else self._before
        return 2 + len(warm)

    def run(
        self, kind: str, *, cheap: bool = True, kept: Sequence[str] = (), seed: int | None = None, length: int = 1
    ) -> dict[str, Any]:
        with self.precision.regions(cheap, kept):
            if kind == "losses":
                losses = self._taken(self._n_steps * length, seed)
                return {"losses": losses, "steps": len(losses)}
            result = step_result(kind, self.precision, self._model, kept, lambda tool: self._taken(1, tool=tool))
            return {**result, "steps": 1}

    def _taken(
        self, n_steps: int, seed: int | None = None, tool: contextlib.AbstractContextManager[Any] | None = None
    ) -> list[float]:
        """The losses of steps from the state after the warm-up, which run under a tool."""
        self._warm.restore()
        move(self._model.parameters(), seed)
        with tool or contextlib.nullcontext():  # the generator is freed, and so closed, inside of it
            return [float(torch.as_tensor(loss).detach()) for loss in itertools.islice(self._steps(), n_steps)]


@torch.no_grad()
def move(parameters: Iterable[Tensor], seed: int | None) -> None:
    """Change parameters by a hundredth of themselves; by nothing if `seed` is None."""
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            if parameter.is_floating_point():
                parameter.mul_(1 + 1e-2 * torch.randn(parameter.shape, generator=generator).to(parameter))


class Precision:
    """The regions of a rehearsal: those of the policy, without some modules, and those of the reference.

    `policy` is judged in place of those of the regions, `rule` for linear layers beside them; None: as they are.
    `models` are the models that have modules at some paths.
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
        """The policy that is judged, in the program's first region."""
        return Policy.default("cpu") if self._first is None else self._judged(self._first)

    @property
    def float8(self) -> bool:
        """Whether FP8 is judged, against 16 bits; else 16 bits against float32."""
        return has_float8(self.own)

    def regions(self, cheap: bool, kept: Sequence[str] = ()) -> contextlib.AbstractContextManager[None]:
        """A context in which the program's regions are those of the policy, or with `cheap` False of the reference."""

        def replace(spec: RegionSpec) -> RegionSpec:
            if self._policy is not None and self._policy.device_type != spec.device_type:
                return spec
            if self._first is None and spec.enabled:
                self._first = spec
            if inherits(spec) and (cheap or self.float8):
                return spec
            if cheap:
                return spec._replace(policy=self.without(self._judged(spec), tuple(kept)))
            if self.float8:
                return spec._replace(policy=self._without_float8(self._judged(spec)))
            return spec._replace(enabled=False)

        return replaced_regions(replace)

    def can_keep(self, path: str) -> bool:
        """Whether there is a module at a path, and the policy has no rule for it."""
        with contextlib.suppress(ValueError):
            return self.without(self.own, (path,)) != self.own
        return False

    def code(self, kept: Sequence[str]) -> str:
        """The code of the policy that is judged without some modules."""
        given = self._policy or (None if self._first is None else self._first.policy)
        rules = "" if self._rule is None else f'.with_rules({{"aten::linear": {self._rule}}})'
        return code_of(given, self.own.device_type, kept, wider(self.own, float8=self.float8), rules)

    def _judged(self, spec: RegionSpec) -> Policy:
        return self._with_rule(self._policy or policy_of(spec))

    def _made_without(self, policy: Policy, kept: tuple[str, ...]) -> Policy:
        """A policy without some modules. Raises `ValueError` if it has a rule for one of them already."""
        value = wider(policy, float8=has_float8(policy))
        for model in self._models(kept) if kept else ():
            policy = policy.for_modules(model, dict.fromkeys(kept, value))
        return policy


def step_result(
    kind: str,
    precision: Precision,
    model: Module | None,
    kept: Sequence[str],
    run: Callable[[StepFacts | PrecisionComparison], object],
) -> dict[str, Any]:
    """What a rehearsal asks of one step, which `run` takes under a tool.

    For "facts" the share of multiplications in the cheaper format, the bytes that backward keeps, and the code of the
    policy; for "ranking" modules by the rise of the loss that is expected of their rounding, the largest first, and
    those of which it is large.
    """
    if kind == "facts":
        facts = StepFacts(model)
        run(facts)
        cheap = facts.products[1] + (0 if precision.float8 else facts.products[2])
        share = cheap / (sum(facts.products.values()) or 1)
        return {"share": share, "saved": sum(facts.kept.values()), "code": precision.code(kept)}
    comparison = PrecisionComparison(model)
    run(comparison)
    report = comparison.report
    suspects = {path: rise for path, rise in report.fragile.items() if path}
    return {"ranking": list(filter(precision.can_keep, _ranked(report))), "suspects": suspects}


def _ranked(report: PrecisionReport) -> list[str]:
    """Modules by the expected rise of the loss; by the errors of their gradients where no rise is large."""
    if report.fragile:
        return list(report.loss_changes)
    errors: dict[str, float] = {}
    for name, gradient in report.gradients.items():
        module = name.rpartition(".")[0]
        errors[module] = math.hypot(errors.get(module, 0.0), gradient.share)
    return sorted(errors, key=lambda module: -errors[module])


class StepFacts(OperatorObserver[Report]):
    """Context that counts a step's multiplications by format, and the bytes that backward keeps beside parameters."""

    def __init__(self, model: Module | None) -> None:
        super().__init__(model, Report())
        self.products = {1: 0, 2: 0, 4: 0, 8: 0}  # multiplications, by bytes of an operand's element
        self.kept: dict[int, int] = {}  # bytes by storage
        self.on_step: Callable[[], None] = lambda: None  # called when a step has ended

    def _begin(self, stack: contextlib.ExitStack) -> None:
        super()._begin(stack)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor))

    def _step_ended(self, *, skipped: bool = False) -> None:
        self.on_step()

    def _note(self, tensor: Tensor) -> Tensor:
        if not tensor.is_leaf or not tensor.requires_grad:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse ones have no storage
                self.kept[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def _observe(self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, tensors = func(*args, **kwargs), call.tensors
        count = 0
        if call.facts.name.startswith("aten::_scaled_mm"):
            count = 2 * tensors[0].shape[0] * tensors[0].shape[1] * tensors[1].shape[1]
        elif func._overloadpacket in flop_registry:
            count = flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
        if count:
            self.products[min(tensor.element_size() for tensor in tensors if tensor.is_floating_point())] += count
        return result
