"""`search_policy`: the smallest part of a model to keep in float32, by the user's own metric."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.nn import Module

from ampkit.debugging.minimise import minimal_subset
from ampkit.debugging.precision import PrecisionComparison
from ampkit.debugging.search_units import Unit, code_of, policy_with, ranked_units, units_below
from ampkit.policy.policy import Policy
from ampkit.region.recording import record_casts

__all__ = ["Evaluation", "SearchResult", "search_policy"]

Status = Literal["found", "passes already", "float32 fails", "budget spent"]


@dataclass(frozen=True)
class Evaluation:
    """One run of the user's metric."""

    units: tuple[Unit, ...]     # in float32
    value: Any
    passes: bool
    seconds: float


@dataclass
class SearchResult:
    """What a search found. `policy` is None where nothing passes, and the policy it began with where that does."""

    status: Status
    policy: Policy | None
    units: tuple[Unit, ...]
    code: str                       # the line to paste
    evaluations: list[Evaluation]
    noise: float | None             # how far two runs in float32 are apart, where the metric is a number
    kept: float | None              # the share of low-precision results that are now in float32, if known
    before: Any                     # the metric under the policy it began with,
    reference: Any                  # in float32,
    after: Any                      # and under the policy found

    def diff(self) -> str:
        """What the policy changes, a line per rule."""
        return "\n".join(f"+ {one.name}: float32" for one in self.units)

    def __str__(self) -> str:
        runs = "1 evaluation" if len(self.evaluations) == 1 else f"{len(self.evaluations)} evaluations"
        before, reference, after = map(_shown, (self.before, self.reference, self.after))
        noise = "" if self.noise is None else f", within {self.noise:.2g} of itself"
        if self.status == "passes already":
            return f"nothing to do: {before} passes under the policy as it is, {runs}"
        if self.status == "float32 fails":
            return f"inconclusive: {reference} fails in float32 too{noise}: precision is not what is wrong, {runs}"
        lines = [f"{before} fails under the policy; float32 gives {reference}{noise}"]
        if self.status == "budget spent":
            lines.append(f"  change    {self.code}")
            lines.append(f"  evidence  {after} passes with it; not minimal: the budget of {runs} is spent")
            return "\n".join(lines)
        n_rules = len(self.units)
        fails = "it fails without it" if n_rules == 1 else f"it fails without any one of the {n_rules}"
        lines += [
            f"  needs     {', '.join(one.name for one in self.units)}"
            + ("" if self.kept is None else f": {self.kept:.1%} of what was in low precision"),
            f"  change    {self.code}",
            f"  evidence  verified: {after} passes, {fails}, {runs}",
        ]
        return "\n".join(lines)


def search_policy(
    evaluate: Callable[[Policy], Any], model: Module, *, policy: Policy | None = None,
    passes: Callable[[Any], bool] = bool, scope: Literal["modules", "operators"] = "modules",
    max_evaluations: int = 100, progress: bool | None = None,
) -> SearchResult:
    """The smallest set of modules, and of operators outside them, to keep in float32 so that a metric passes.

    `evaluate(policy)` runs `model` for the metric, each time from the same state, in regions with that policy, and
    `passes(metric)` says whether it is good enough. `policy` (`Policy.default` for the model's device) must fail, and
    everything in float32 must pass; float32 is evaluated twice, for the noise. The first evaluation's first step is
    compared with float32 operator by operator, ten times slower: those that round or overflow, or make the error that
    grows, are tried first. The result passes, and does not without any one of its rules. `scope="operators"` looks
    inside the modules that are found for the operators that matter. `progress`: show it on stderr; None does on a
    terminal.
    """
    if scope not in ("modules", "operators"):
        raise ValueError(f"scope is {scope!r}; expected 'modules' or 'operators'")
    if not isinstance(model, Module):
        raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    if max_evaluations < 4:
        raise ValueError(f"max_evaluations is {max_evaluations}; expected 4 or more: three only tell whether to search")
    if policy is None:
        first = next(model.parameters(), None)
        policy = Policy.default("cpu" if first is None else first.device.type)
    search = _Search(evaluate, model, policy, passes, max_evaluations)
    search.shows = sys.stderr.isatty() if progress is None else progress
    return search.run(scope)


class _BudgetSpent(Exception):
    pass


class _Search:
    def __init__(
        self, evaluate: Callable[[Policy], Any], model: Module, policy: Policy, passes: Callable[[Any], bool],
        max_evaluations: int,
    ) -> None:
        self.model, self.policy = model, policy
        self.evaluations: list[Evaluation] = []
        self.units: list[Unit] = []     # the likeliest culprit first
        self.inside: list[Unit] = []    # operators in modules
        self.shares: dict[Unit, float] = {}     # of what computes in low precision
        self.shows = False
        self._evaluate, self._passes, self._most = evaluate, passes, max_evaluations
        self._answers: dict[frozenset[Unit], list[Evaluation]] = {}

    def run(self, scope: str) -> SearchResult:
        """The protocol."""
        before = self._current()
        if before.passes:
            return self._result("passes already", before)
        everything = self.units
        reference, again = self._evaluated(everything), self._evaluated(everything, anew=True)
        if not (everything and reference.passes and again.passes):
            return self._result("float32 fails", before, (reference, again))
        status: Status = "found"
        try:
            found = self._refined(minimal_subset(everything, self._test))
            if scope == "operators":
                found = self._operators(found)
        except _BudgetSpent:
            status = "budget spent"
            best = self.best
            found = list(best.units) if best is not None else everything
        finally:
            self._show(end=True)
        return self._result(status, before, (reference, again), found)

    def _refined(self, found: list[Unit]) -> list[Unit]:
        """For modules whose submodules suffice, those."""
        for module in list(found):
            below = units_below(module, self.units)
            others = [one for one in found if one != module]
            if below and self._test([*others, *below]):
                found = minimal_subset([*others, *below], self._test)
        return found

    def _operators(self, found: list[Unit]) -> list[Unit]:
        """For modules some of whose operators suffice, those."""
        for module in list(found):
            inside = [one for one in self.inside if module.covers(one) and not module.op]
            others = [one for one in found if one != module]
            if len(inside) > 1 and self._test([*others, *inside]):
                found = minimal_subset([*others, *inside], self._test)
        return found

    def _test(self, units: Sequence[Unit]) -> bool:
        return self._evaluated(units).passes

    def _current(self) -> Evaluation:
        """The metric under the policy as it is, its first step looked at."""
        comparison = PrecisionComparison(self.model)
        comparison.run.only_first_step = True
        with record_casts() as casts, comparison:
            made = self._run(())
        self.units, self.inside, self.shares = ranked_units(self.model, self.policy, casts, comparison.report)
        self.evaluations.append(made)
        return made

    @property
    def best(self) -> Evaluation | None:
        """The evaluation that passed with the fewest rules."""
        return min((one for one in self.evaluations if one.passes), key=lambda one: len(one.units), default=None)

    def _evaluated(self, units: Sequence[Unit], *, anew: bool = False) -> Evaluation:
        needed = tuple(one for one in units if not any(other != one and other.covers(one) for other in units))
        answers = self._answers.setdefault(frozenset(needed), [])
        if len(answers) <= anew:
            if len(self.evaluations) >= self._most:
                raise _BudgetSpent
            self._show()
            answers.append(self._run(needed))
            self.evaluations.append(answers[-1])
        return answers[anew]

    def _run(self, units: tuple[Unit, ...]) -> Evaluation:
        start = time.perf_counter()
        value = self._evaluate(policy_with(self.policy, units, self.model))
        return Evaluation(units, value, bool(self._passes(value)), time.perf_counter() - start)

    def _show(self, *, end: bool = False) -> None:
        if self.shows:
            done, best = len(self.evaluations), self.best
            bar = "#" * round(20 * done / self._most)
            line = f"\r[{bar:.<20}] {done} of at most {self._most} evaluations"
            if best is not None:
                line += f"; {len(best.units)} of {len(self.units)} suffice so far"
            print(f"{line:<79}", end="\n" if end else "", file=sys.stderr, flush=True)

    def _result(
        self, status: Status, before: Evaluation, references: tuple[Evaluation, ...] = (), found: Sequence[Unit] = ()
    ) -> SearchResult:
        written = f'Policy.default("{self.policy.device_type}")'
        if self.policy != Policy.default(self.policy.device_type):
            written = "policy"
        policy = policy_with(self.policy, found, self.model) if found else None
        if status == "passes already":
            policy = self.policy
        shares = [self.shares.get(one) for one in found]
        return SearchResult(
            status, policy, tuple(found), code_of(found, written) if found else "", self.evaluations,
            _noise(references), None if None in shares else sum(filter(None, shares)), before.value,
            references[0].value if references else None, self._evaluated(found).value if found else before.value,
        )


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _noise(references: tuple[Evaluation, ...]) -> float | None:
    try:
        first, second = (float(one.value) for one in references)
    except (TypeError, ValueError):
        return None
    return abs(first - second)
