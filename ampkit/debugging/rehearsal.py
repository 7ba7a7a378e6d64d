"""`rehearse`: whether low precision costs a training anything, by short trainings in pairs; and what to keep out.

A pair is one training under the policy and one in the reference, with the same weights and batches. Three pairs or
more, from weights moved by a hundredth, give the gap of their losses and its error. Only where the gap is outside of
its error, modules are ranked by the expected changes of the loss, and a policy without the first of them is tried.
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
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.flop_counter import flop_registry

from ampkit.debugging.detect import rank
from ampkit.debugging.operator_calls import OperatorCall, OperatorObserver
from ampkit.debugging.precision import PrecisionComparison
from ampkit.debugging.regions import (
    code_of,
    has_float8,
    inherits,
    policy_of,
    replaced_regions,
    wider,
    without_float8,
)
from ampkit.debugging.report import PrecisionReport, Report
from ampkit.debugging.snapshot import TrainingSnapshot
from ampkit.policy.policy import Policy
from ampkit.policy.rules import Rule
from ampkit.region.arguments import RegionSpec
from ampkit.torch_internals.operator_tracing import OpOverload, storage_key

_SMALLEST_GAP = 0.01  # a smaller one is not a finding
# For each number of pairs how many errors a gap must have: Student's t, 97.5 %. With more pairs if it is not decided.
_ERRORS = {3: 4.3, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31}
_FEWEST, _MOST = 3, 9
_MOST_PLACES = 4
_LINEAR = "aten::linear"
BLIND = "later steps, other data, gaps below 1 %, and what the reference loses as well"


@dataclass
class RehearsalReport(Report):
    """The report of `rehearse`; truthy if the policy costs something.

    `policy` is a policy that closes the gap; None where nothing is to change, where nothing closes it, and for a
    script, which `change` has the code for.
    """

    kind = "rehearsal"
    gap: float | None = None  # of the loss, relative to the reference's; inf where it is not finite
    error: float | None = None  # the standard error of `gap`
    places: list[str] = field(default_factory=list)  # modules to keep out, by path
    left: float | None = None  # the gap without them
    change: str = ""  # code of a policy that closes the gap
    loss: float | None = None  # of the reference, at the end
    share: float | None = None  # of the multiplications, those in the cheaper format; with `change`, of those left
    saved: list[int] = field(default_factory=list)  # bytes that backward keeps: in the reference, under the policy
    pairs: int = 0  # of trainings
    steps: int = 0  # taken, in all trainings
    tried: dict[str, float] = field(default_factory=dict)  # the gap without these modules

    def __post_init__(self) -> None:
        self.policy: Policy | None = None

    def __bool__(self) -> bool:
        return bool(self.loop) or (self.gap is not None and self.gap > self.bar)

    @property
    def bar(self) -> float:
        """The gap from which on something is to change: at least 1 %, and outside of its error with 97.5 %."""
        return _bar(self.error or 0.0, self.pairs)

    def __str__(self) -> str:
        lines = [*self.first_lines(), *([f"inconclusive: {self.incomplete}"] if self.incomplete else [])]
        if self.gap is None:
            return "\n".join(lines)
        found = bool(self)
        verdict = "low precision costs" if found else "nothing to keep: low precision costs"
        verdict = "so far low precision costs" if self.incomplete and not found else verdict
        lines.append(f"{verdict} {_percent(self.gap)} +- {100 * (self.error or 0):.1f} % of the loss ({self.loss:.4g})")
        if self.places:
            lines.append(f"  place     {', '.join(self.places)}")
        if self.change:
            lines += [f"  change    {self.change}", f"  evidence  verified: with it {_percent(self.left or 0)}"]
        elif found and not self.incomplete:
            lines.append("  advice    no change of up to four modules closes it; a recipe that rounds less may")
            lines += [f"  tried     without {places}: {_percent(gap)}" for places, gap in self.tried.items()]
        if self.share is not None:
            now = f"{100 * self.share:.0f} % of the multiplications are in the cheaper format"
            reference, kept = (f"{nbytes / 1e6:.3g} MB" for nbytes in self.saved)
            lines.append(f"  cheap     {now}; backward keeps {kept} in place of {reference}")
        return "\n".join([*lines, f"  unseen    {BLIND}; {self.steps} steps were taken"])


def _percent(gap: float) -> str:
    return f"{100 * gap:+.1f} %" if math.isfinite(gap) else "everything: the loss is not finite, a gap"


def rehearse(
    steps: Callable[[], Iterator[Any]],
    model: Module,
    policy: Policy | None = None,
    *,
    n_steps: int = 40,
    warm_up: int = 80,
    state: Iterable[Any] = (),
    progress: bool = True,
) -> RehearsalReport:
    """Find out whether low precision costs a training anything, and which modules to keep out of it.

    Trains in pairs: under the policy, and in the reference, which is the policy without its FP8 rules, or float32 for a
    policy that has none. Three pairs start from slightly different weights, and give the gap of the losses in the
    second half of the steps, and its error. Where the gap is above 1 % and not outside of its error, up to nine pairs
    are trained. Where it is outside, modules with the largest expected changes of the loss are kept out, and the
    training without them is tried the same way. That takes six trainings, and three more for each trial.

    Afterwards the model, optimizers, scalers and random number generators are as before. Compiled functions run
    eagerly. Ctrl-C ends it with a report of what is known so far. Processes that train together are not supported.

    Synchronizes with the device.

    Args:
        steps: a generator function without arguments that takes a training step at each `next`, and yields the loss.
            It must do the same each time it is called: the same batches in the same order. Its forward runs in regions
            of `ampkit.autocast`.
        model: the module that it trains.
        policy: the policy to judge, in place of the policies of the regions; None: those.
        n_steps: the steps of a training; fewer if `steps` ends.
        warm_up: steps in the reference that come before all trainings, once: near the initial weights little shows.
            0 for a model that is trained already.
        state: further objects that a step changes, with `state_dict` and `load_state_dict`.
        progress: whether to print what is known so far to stderr.

    Returns:
        The report. `gap` and `error` are shares of the reference's loss, `places` are the modules to keep out, and
        `policy` is a policy that closes the gap, None where nothing is to change.

    Raises:
        TypeError: if `model` is no module, or an object in `state` has no `state_dict` and `load_state_dict`.
        ValueError: if `steps` yields nothing or does not do the same each time, or nothing is computed in the cheaper
            format, as without a region.
        RuntimeError: in one of several ranks.

    Example::

        def steps():
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
            for x, y in batches:
                optimizer.zero_grad()
                with ampkit.autocast("cuda", torch.bfloat16):
                    loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                yield loss.item()

        print(debugging.rehearse(steps, model, policy))
    """
    if not isinstance(model, Module):
        raise TypeError(f"model is {type(model).__name__}; expected the torch.nn.Module that the steps train")
    if rank() is not None:
        raise RuntimeError("rehearse runs in one process: ranks would decide for themselves how many steps to take")
    before = TrainingSnapshot(model, state)
    with before, torch.compiler.set_stance("force_eager"):
        trainings = _Trainings(steps, model, policy, n_steps, before)
        report = judge(trainings, lambda: trainings.start(warm_up), progress=progress)
    if report.change:
        report.policy = trainings.precision.kept(trainings.precision.own(), report.places)
    return report


class Trainings(Protocol):
    """What a rehearsal asks of a program: short trainings of it, and facts of one step."""

    steps: int  # taken so far

    def run(self, kind: str, cheap: bool = True, kept: Sequence[str] = (), seed: int | None = None) -> dict[str, Any]:
        """Train under the policy without the modules `kept`, or with `cheap` False in the reference.

        `kind` is "losses" for those of a training, or of one step "facts" or "ranking", see `step_result`.
        """
        ...


def judge(trainings: Trainings, start: Callable[[], None], *, progress: bool = True) -> RehearsalReport:
    """Rehearse a program. An interrupt ends it with what is known."""
    report = RehearsalReport()
    try:
        start()
        _judge(trainings, report, _say if progress else lambda text: None)
    except KeyboardInterrupt:
        report.incomplete = "interrupted; what follows was known by then"
    report.steps = trainings.steps
    return report


def _judge(trainings: Trainings, report: RehearsalReport, say: Callable[[str], None]) -> None:
    facts = trainings.run("facts")
    if not facts["share"]:
        raise ValueError(
            "no product is computed in the cheaper format: there is nothing to judge. Expected steps whose forward "
            "runs in a region of ampkit.autocast, and for FP8 linear layers whose sizes are multiples of 16"
        )
    report.share, report.saved = facts["share"], [trainings.run("facts", cheap=False)["saved"], facts["saved"]]
    references: list[float] = []
    gaps: list[float] = []

    def loss(**training: Any) -> float:
        losses = trainings.run("losses", **training)["losses"]
        return statistics.mean(losses[len(losses) // 2 :]) if all(map(math.isfinite, losses)) else math.inf

    def trial(kept: Sequence[str]) -> tuple[float, bool]:
        found = [loss(kept=kept, seed=1 + i) - mean for i, mean in enumerate(references)]
        left, error = _gap(found, report.loss or 1.0)
        report.tried[", ".join(kept)] = left
        say(f"without {', '.join(kept)}: {_percent(left)}")
        return left, left <= _bar(error, len(found)) and left < (report.gap or 0.0) / 2

    while report.pairs < _FEWEST or (report.pairs < _MOST and _SMALLEST_GAP < (report.gap or 0.0) <= report.bar):
        references.append(loss(cheap=False, seed=1 + report.pairs))
        if not math.isfinite(references[-1]):
            raise ValueError("the loss of the reference is not finite: ampkit.debugging.find_nonfinite finds out why")
        gaps.append(loss(seed=1 + report.pairs) - references[-1])
        report.pairs += 1
        report.loss = abs(statistics.mean(references)) or 1.0
        report.gap, report.error = _gap(gaps, report.loss)
        say(f"pair {report.pairs}: {_percent(report.gap)} +- {100 * report.error:.1f} %")
    if report:
        _keep(trainings, report, trial)


def _bar(error: float, pairs: int) -> float:
    return max(_ERRORS[pairs] * error, _SMALLEST_GAP) if pairs >= _FEWEST else math.inf


def _keep(trainings: Trainings, report: RehearsalReport, trial: Callable[[Sequence[str]], tuple[float, bool]]) -> None:
    """Find few modules without which there is no gap."""
    ranking, kept, closed, count = trainings.run("ranking")["ranking"][:_MOST_PLACES], [], False, 1
    while ranking and not closed and len(kept) < len(ranking):
        kept = ranking[:count]
        report.left, closed = trial(kept)
        count *= 2
    if not closed:
        report.left = None
        return
    report.places = kept
    for path in kept[:-1]:
        fewer = [each for each in report.places if each != path]
        left, closed = trial(fewer)
        if closed:
            report.places, report.left = fewer, left
    facts = trainings.run("facts", kept=report.places)
    report.change, report.share, report.saved[1] = facts["code"], facts["share"], facts["saved"]


def _gap(differences: list[float], loss: float) -> tuple[float, float]:
    """The mean of differences relative to a loss, and its standard error."""
    gap = statistics.mean(differences) / loss
    if len(differences) < 2 or not math.isfinite(gap):
        return gap, 0.0
    return gap, statistics.stdev(differences) / loss / math.sqrt(len(differences))


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
        self.steps = 0

    def start(self, warm_up: int) -> None:
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
                    f"{again[0]:.6g}. Make data loaders and generators inside of it, so that it begins with the same "
                    "batch, or give what has a state_dict as `state`"
                )
            if warm_up:
                self._taken(warm_up)
                self._warm = TrainingSnapshot(self._model, self._before.owners)

    def run(self, kind: str, cheap: bool = True, kept: Sequence[str] = (), seed: int | None = None) -> dict[str, Any]:
        with self.precision.regions(cheap, kept):
            if kind == "losses":
                return {"losses": self._taken(self._n_steps, seed)}
            return step_result(kind, self.precision, self._model, kept, lambda tool: self._taken(1, tool=tool))

    def _taken(
        self, n_steps: int, seed: int | None = None, tool: contextlib.AbstractContextManager[Any] | None = None
    ) -> list[float]:
        """The losses of steps from the state after the warm-up, which run under a tool."""
        self._warm.restore()
        move(self._model.parameters(), seed)
        losses = []
        with tool or contextlib.nullcontext():
            for loss in itertools.islice(self._steps(), n_steps):  # which also frees, and so closes, the generator
                losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))
                self.steps += 1
        return losses


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
        self._seen: RegionSpec | None = None  # the first region of the steps
        self._made: dict[Any, Policy] = {}

    @property
    def float8(self) -> bool:
        """Whether FP8 is judged, against 16 bits; else 16 bits against float32."""
        return has_float8(self.own())

    def regions(self, cheap: bool, kept: Sequence[str] = ()) -> contextlib.AbstractContextManager[None]:
        """A context in which the program's regions are those of the policy, or with `cheap` False of the reference."""

        def replace(spec: RegionSpec) -> RegionSpec:
            if self._policy is not None and self._policy.device_type != spec.device_type:
                return spec
            if self._seen is None and spec.enabled:
                self._seen = spec
            if inherits(spec) and (cheap or self.float8):
                return spec
            own = self._judged(spec)
            if cheap:
                return spec._replace(policy=self.kept(own, kept))
            if self.float8:
                return spec._replace(policy=self._once(("reference", own), lambda: without_float8(own)))
            return spec._replace(enabled=False)

        return replaced_regions(replace)

    def _judged(self, spec: RegionSpec) -> Policy:
        """The policy that is judged, in the place of the one of a region."""
        policy, rule = self._policy or policy_of(spec), self._rule
        return policy if rule is None else self._once(policy, lambda: policy.with_rules({_LINEAR: rule}))

    def own(self) -> Policy:
        """The policy that is judged, in the program's first region."""
        return Policy.default("cpu") if self._seen is None else self._judged(self._seen)

    def kept(self, policy: Policy, kept: Sequence[str]) -> Policy:
        """A policy without some modules. Raises `ValueError` if it has a rule for one of them already."""

        def bound() -> Policy:
            value = wider(policy, float8=has_float8(policy))
            models = self._models(kept)
            return functools.reduce(
                lambda made, model: made.for_modules(model, dict.fromkeys(kept, value)), models, policy
            )

        return self._once((policy, *kept), bound) if kept else policy

    def can_keep(self, path: str) -> bool:
        """Whether there is a module at a path, and the policy has no rule for it."""
        with contextlib.suppress(ValueError):
            return self.kept(self.own(), [path]) != self.own()
        return False

    def code(self, kept: Sequence[str]) -> str:
        """The code of the policy that is judged without some modules."""
        own = self.own()
        given = self._policy or (None if self._seen is None else self._seen.policy)
        rules = "" if self._rule is None else f'.with_rules({{"{_LINEAR}": {self._rule}}})'
        return code_of(given, own.device_type, kept, wider(own, float8=self.float8), rules)

    def _once(self, key: Any, make: Callable[[], Policy]) -> Policy:
        """A policy that is made once: regions are entered in each step."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def step_result(
    kind: str,
    precision: Precision,
    model: Module | None,
    kept: Sequence[str],
    run: Callable[[StepFacts | PrecisionComparison], object],
) -> dict[str, Any]:
    """What `Trainings.run` returns for one step, which `run` takes under a tool.

    For "facts" the share of multiplications in the cheaper format, the bytes that backward keeps, and the code of the
    policy; for "ranking" modules by what their rounding is expected to change, the most first.
    """
    if kind == "facts":
        facts = StepFacts(model)
        run(facts)
        return {"share": facts.share(float8=precision.float8), "saved": facts.saved, "code": precision.code(kept)}
    comparison = PrecisionComparison(model)
    run(comparison)
    return {"ranking": list(filter(precision.can_keep, _ranked(comparison.report)))}


def _ranked(report: PrecisionReport) -> list[str]:
    """Modules by the expected change of the loss; by the errors of their gradients where no change is large."""
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
        self._products = {1: 0, 2: 0, 4: 0, 8: 0}  # multiplications, by bytes of an operand's element
        self._kept: dict[int, int] = {}  # bytes by storage
        self.on_step: Callable[[], None] = lambda: None  # called when a step has ended

    def _begin(self, stack: contextlib.ExitStack) -> None:
        super()._begin(stack)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor))

    def _step_ended(self, *, skipped: bool = False) -> None:
        self.on_step()

    def share(self, *, float8: bool) -> float:
        """The share of the multiplications in FP8, or in 16 bits or fewer."""
        cheap = self._products[1] + (0 if float8 else self._products[2])
        return cheap / (sum(self._products.values()) or 1)

    @property
    def saved(self) -> int:
        """The bytes that backward keeps."""
        return sum(self._kept.values())

    def _note(self, tensor: Tensor) -> Tensor:
        if not tensor.is_leaf or not tensor.requires_grad:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse ones have no storage
                self._kept[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def _observe(self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        tensors = call.tensors
        if call.facts.name.startswith("aten::_scaled_mm"):
            count = 2 * tensors[0].shape[0] * tensors[0].shape[1] * tensors[1].shape[1]
        elif func._overloadpacket in flop_registry:
            count = flop_registry[func._overloadpacket](*args, **kwargs, out_val=result)
        else:
            return result
        self._products[min(tensor.element_size() for tensor in tensors if tensor.is_floating_point())] += count
        return result
