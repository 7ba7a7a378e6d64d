"""`search_policy`: the smallest part of a model to keep in float32, by the user's own metric."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.nn import Module

from ampkit.debugging.changes import PolicyChange, float8_operators, takes_float32
from ampkit.debugging.precision import PrecisionComparison
from ampkit.debugging.report import PrecisionReport
from ampkit.debugging.snapshot import Snapshot
from ampkit.policy.policy import Policy
from ampkit.region.recording import record_casts

__all__ = ["Evaluation", "SearchResult", "minimal_subset", "search_policy"]

_OVERFLOW = 1e6         # the score of an overflow, beside relative errors
_GROWS = 1.5            # times; an error that grows less was passed on


@dataclass(frozen=True)
class Evaluation:
    """One run of the user's metric, with these modules (by path) and operators ("aten::matmul") in float32."""

    kept: tuple[str, ...]
    value: Any
    passes: bool


@dataclass(frozen=True)
class SearchResult:
    """The result of `search_policy`; `str()` of it is what a terminal shows.

    `status` is "found"; "passes already", where `policy` is the one that the search began with; or "inconclusive",
    where the metric fails with everything in float32 too, and `policy` is None. `code` is the line that makes `policy`,
    "" where there is nothing to change. `evaluations` has every run of the metric in order: the policy as it was,
    everything kept (twice), and the search.
    """

    status: Literal["found", "passes already", "inconclusive"]
    policy: Policy | None
    kept: tuple[str, ...]
    code: str
    evaluations: tuple[Evaluation, ...]

    @property
    def value(self) -> Any:
        """The metric under `policy`."""
        return next(one.value for one in self.evaluations if set(one.kept) == set(self.kept))

    def __str__(self) -> str:
        n_runs = len(self.evaluations)
        runs = "1 evaluation" if n_runs == 1 else f"{n_runs} evaluations"
        before, reference = (_shown(one.value) for one in (self.evaluations[0], self.evaluations[min(1, n_runs - 1)]))
        if self.status == "passes already":
            return f"nothing to do: {before} passes under the policy as it is, {runs}"
        if self.status == "inconclusive":
            return f"inconclusive: {reference} fails in float32 too: precision is not the only cause, {runs}"
        n_rules, kind = len(self.kept), "LOWER" if "Rule.LOWER" in self.code else "float32"
        fails = "it fails without it" if n_rules == 1 else f"it fails without any one of the {n_rules}"
        return (
            f"{before} fails under the policy; {kind} gives {reference}\n"
            f"  keep      {', '.join(self.kept)}\n  change    {self.code}\n"
            f"  evidence  verified: {_shown(self.value)} passes, {fails}, {runs}"
        )


def search_policy(
    evaluate: Callable[[Policy], Any], model: Module, passes: Callable[[Any], bool] = bool, *,
    policy: Policy | None = None,
) -> SearchResult:
    """Find a smallest set of modules to keep in float32 so that a metric passes; operators where modules do not do.

    `evaluate(policy)` computes the metric with `model` itself, no copy, in regions with that policy; `passes(metric)`
    says whether it is good enough. Parameters, buffers, gradients, random numbers and optimizers that step are restored
    before each evaluation and at the end; `evaluate` resets whatever else it changes. `policy` (`Policy.default` for
    the model's device) must fail, and everything in float32 pass, evaluated twice; modules that it names stay as they
    are.

    Under a policy with FP8 rules, modules that leave FP8 for LOWER are tried first, and float32 where that does not do.

    The first step of the first evaluation is compared with float32 operator by operator, some ten times slower; what
    rounds, overflows, or makes the error that grows is tried first. The result passes, and fails without any one of its
    rules: both were evaluated. It is minimal, not always the smallest of all. Syncs as `evaluate` does.

    Raises `TypeError` for a model or policy that is none.
    """
    if not isinstance(model, Module):
        raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    if policy is None:
        policy = Policy.default(next((one.device.type for one in model.parameters()), "cpu"))
    if not isinstance(policy, Policy):
        raise TypeError(f"policy is {type(policy).__name__}; expected a Policy")
    if float8_operators(policy):
        found = _searched(evaluate, PolicyChange(policy, model, lower=True), passes)
        if found.status != "inconclusive":
            return found
    return _searched(evaluate, PolicyChange(policy, model), passes)


def _searched(evaluate: Callable[[Policy], Any], base: PolicyChange, passes: Callable[[Any], bool]) -> SearchResult:
    search = _Search(evaluate, base, passes, Snapshot(base.model))
    with search.state:
        try:
            return search.run()
        finally:
            search.state.restore()


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class _Search:
    """The evaluations of one search, each set of modules and operators once."""

    def __init__(
        self, evaluate: Callable[[Policy], Any], base: PolicyChange, passes: Callable[[Any], bool], state: Snapshot
    ) -> None:
        self._evaluate, self._base, self._passes = evaluate, base, passes
        self.state = state
        self._evaluations: list[Evaluation] = []
        self._answers: dict[frozenset[str], bool] = {}

    def run(self) -> SearchResult:
        """Evaluate the policy, everything kept, and then smaller sets."""
        comparison = PrecisionComparison(self._base.model)
        comparison.only_first_step = True
        with record_casts() as casts, comparison as report:
            if self._run(()):
                return self._result("passes already", ())
        units = self._ranked(report)
        if not self._test(units) and not self._base.lower:
            ops = {call.op for call in casts.calls if any(map(_is_low, call.computed_in))}
            units += sorted(op for op in ops if takes_float32(op, self._base.base))
        if not (units and self._test(units) and self._run(_outermost(units))):
            return self._result("inconclusive", ())
        return self._result("found", _outermost(minimal_subset(units, self._test)))

    def _test(self, units: Sequence[str]) -> bool:
        """Whether the metric passes with these units kept."""
        kept = _outermost(units)
        key = frozenset(kept)
        if key not in self._answers:
            self._answers[key] = bool(kept) and self._run(kept)
        return self._answers[key]

    def _run(self, kept: tuple[str, ...]) -> bool:
        self.state.restore()
        value = self._evaluate(self._change(kept).policy)
        self._evaluations.append(Evaluation(kept, value, bool(self._passes(value))))
        return self._evaluations[-1].passes

    def _change(self, kept: tuple[str, ...]) -> PolicyChange:
        operators = tuple(one for one in kept if "::" in one)
        return replace(self._base, modules=tuple(one for one in kept if one not in operators), operators=operators)

    def _ranked(self, report: PrecisionReport) -> list[str]:
        """The modules that computed in low precision, the most suspect first.

        Where an error grows, the module that made it is as suspect: in float32 there would be nothing to grow.
        """
        scores: dict[str, float] = defaultdict(float)
        for one in report.operators:
            if _is_low(getattr(torch, one.dtype)):
                scores[one.path] = max(scores[one.path], _OVERFLOW if math.isinf(one.local) else one.local)
            if one.amplification > _GROWS and math.isfinite(one.propagated) and report.matters(one):
                maker = report.maker(one)
                for place, amount in ((one, one.propagated), (maker, one.propagated * 1.001)):
                    if place is not None and place.path in scores:
                        scores[place.path] = max(scores[place.path], amount)
        named = {rule.key for rule in self._base.base.modules.rules}
        return sorted((path for path in scores if path and path not in named), key=lambda path: -scores[path])

    def _result(self, status: Any, kept: tuple[str, ...]) -> SearchResult:
        change = self._change(kept)
        return SearchResult(
            status, None if status == "inconclusive" else change.policy, kept, change.code if kept else "",
            tuple(self._evaluations),
        )


def _outermost(units: Sequence[str]) -> tuple[str, ...]:
    """Without modules that another one has in it."""
    return tuple(one for one in units if not any(one.startswith(f"{other}.") for other in units))


def _is_low(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def minimal_subset(order: Sequence[str], passes: Callable[[list[str]], bool]) -> list[str]:
    """A subset of `order` that passes and does not with any one member left out, in the order of `order`.

    All of `order` must pass, the empty set must not; neither is tested. Members likely to be needed come first: the
    shortest prefix that passes is found by doubling and halving, its last member is needed, and so on with those before
    it. Where more members can make a test fail again, the result is still minimal; it only takes more tests.
    `passes` should remember its answers: it is asked about some sets twice.

    >>> tests = []
    >>> def passes(members):
    ...     tests.append(members)
    ...     return {"b", "d"} <= set(members)
    >>> minimal_subset(["b", "d", "a", "c"], passes)
    ['b', 'd']
    >>> tests
    [['b'], ['b', 'd'], ['d'], ['b'], ['d']]
    """
    place = {member: i for i, member in enumerate(order)}

    def test(members: Sequence[str]) -> bool:
        return passes(sorted(members, key=place.__getitem__))

    needed: list[str] = []
    rest = list(order)
    while rest and not (needed and test(needed)):
        length = _shortest_prefix(rest, lambda prefix: test([*prefix, *needed]))
        needed.append(rest[length - 1])
        rest = rest[:length - 1]
    shrunk = True
    while shrunk and len(needed) > 1:
        shrunk = False
        for member in needed:
            fewer = [other for other in needed if other is not member]
            if test(fewer):
                needed, shrunk = fewer, True
                break
    return sorted(needed, key=place.__getitem__)


def _shortest_prefix(members: list[str], passes: Callable[[list[str]], bool]) -> int:
    """The length of a prefix that passes where one member less does not; all of `members` do."""
    low, high = 0, 1
    while high < len(members) and not passes(members[:high]):
        low, high = high, 2 * high
    high = min(high, len(members))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(members[:middle]) else (middle, high)
    return high
