"""`search_policy`: the smallest part of a model to keep in float32, by the user's own metric."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn import Module

from ampkit.debugging.minimise import minimal_subset
from ampkit.debugging.module_calls import ModuleCall, ModuleCalls, module_paths
from ampkit.debugging.policy_change import takes_float32
from ampkit.debugging.precision import PrecisionComparison
from ampkit.debugging.precision_report import OperatorError, PrecisionReport
from ampkit.debugging.snapshot import Snapshot
from ampkit.policy.module_rules import module_of
from ampkit.policy.policy import Policy, Rule
from ampkit.region.recording import RecordedCall, record_casts

__all__ = ["Evaluation", "SearchResult", "Unit", "search_policy"]

_PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
_OVERFLOW = 1e6         # the score of an overflow, beside relative errors
_GROWS = 1.5            # times; an error that grows less was passed on


@dataclass(frozen=True)
class Unit:
    """What can be kept in another precision: a module with all in it; or an operator, in a module or (`path` "")
    wherever it is called. `str()` is `blocks.0.attn`, `aten::matmul` or `blocks.0.attn: aten::matmul`."""

    path: str
    op: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.path, self.op)))

    def covers(self, other: Unit) -> bool:
        """Whether `other` is kept wherever this unit is."""
        inside = not self.path or other.path == self.path or other.path.startswith(f"{self.path}.")
        return inside and (self.op == other.op if self.op else bool(self.path))


@dataclass(frozen=True)
class Evaluation:
    """One run of the user's metric, with these units in the other precision."""

    kept: tuple[Unit, ...]
    value: Any
    passes: bool


@dataclass(frozen=True)
class SearchResult:
    """The result of `search_policy`; `str()` of it is what a terminal shows.

    `status` is "found"; "passes already", where `policy` is the one that the search began with; "inconclusive", where
    the metric fails with everything in the other precision too, and `policy` is None; or "budget spent", where `policy`
    passes and may not be minimal. `code` is the line that makes `policy`, "" where there is nothing to change.
    `evaluations` has every run of the metric in order: the policy as it was, everything kept (twice), and the search.
    """

    status: Literal["found", "passes already", "inconclusive", "budget spent"]
    policy: Policy | None
    kept: tuple[Unit, ...]
    code: str
    evaluations: tuple[Evaluation, ...]
    precision: torch.dtype

    @property
    def value(self) -> Any:
        """The metric under `policy`."""
        return next(one.value for one in self.evaluations if frozenset(one.kept) == frozenset(self.kept))

    def __str__(self) -> str:
        n_runs, dtype = len(self.evaluations), str(self.precision).removeprefix("torch.")
        runs = "1 evaluation" if n_runs == 1 else f"{n_runs} evaluations"
        before, reference = (_shown(one.value) for one in (self.evaluations[0], self.evaluations[min(1, n_runs - 1)]))
        if self.status == "passes already":
            return f"nothing to do: {before} passes under the policy as it is, {runs}"
        if self.status == "inconclusive":
            return f"inconclusive: {reference} fails in {dtype} too: precision is not the only cause, {runs}"
        n_rules = len(self.kept)
        fails = "it fails without it" if n_rules == 1 else f"it fails without any one of the {n_rules}"
        evidence = f"verified: {_shown(self.value)} passes, {fails}, {runs}"
        if self.status == "budget spent":
            evidence = f"{_shown(self.value)} passes; not minimal: the budget of {runs} is spent"
        return (
            f"{before} fails under the policy; {dtype} gives {reference}\n"
            f"  keep      {', '.join(map(str, self.kept))}\n  change    {self.code}\n  evidence  {evidence}"
        )


def search_policy(
    evaluate: Callable[[Policy], Any], model: Module, passes: Callable[[Any], bool] = bool, *,
    policy: Policy | None = None, precision: torch.dtype = torch.float32, operators: bool = False,
    max_evaluations: int = 100,
) -> SearchResult:
    """Find a smallest set of modules, and of operators outside them, to keep in float32 so that a metric passes.

    `evaluate(policy)` computes the metric with `model` itself, no copy, in regions with that policy; `passes(metric)`
    says whether it is good enough. Parameters, buffers, gradients, random numbers and optimizers that step are restored
    before each evaluation and at the end; `evaluate` resets whatever else it changes. `policy` (`Policy.default` for
    the model's device) must fail, and everything in `precision` pass, evaluated twice; modules that it names by their
    own path stay as they are. With bfloat16 or float16 as `precision` only modules are kept, not operators outside.

    The first step of the first evaluation is compared with float32 operator by operator, some ten times slower; what
    rounds, overflows, or makes the error that grows is tried first. The result passes, and fails without any one of its
    rules: both were evaluated. It is minimal, not always the smallest of all. `operators=True` then looks inside the
    modules found for the operators that suffice. Syncs as `evaluate` does.

    Raises `TypeError` for a model or policy that is none, `ValueError` for another precision and for fewer than four
    evaluations.
    """
    if not isinstance(model, Module):
        raise TypeError(f"model is {type(model).__name__}; expected a torch.nn.Module")
    if precision not in _PRECISIONS:
        raise ValueError(f"precision is {precision!r}; expected torch.float32, torch.bfloat16 or torch.float16")
    if max_evaluations < 4:
        raise ValueError(f"max_evaluations is {max_evaluations}; expected 4 or more: three only tell whether to search")
    if policy is None:
        policy = Policy.default(next((one.device.type for one in model.parameters()), "cpu"))
    if not isinstance(policy, Policy):
        raise TypeError(f"policy is {type(policy).__name__}; expected a Policy")
    search = _Search(evaluate, model, passes, policy, precision, max_evaluations, Snapshot(model))
    with search.state:
        try:
            return search.run(operators)
        finally:
            search.state.restore()


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class _BudgetSpent(Exception):
    pass


@dataclass
class _Search:
    """The evaluations of one search, each set of units once."""

    evaluate: Callable[[Policy], Any]
    model: Module
    passes: Callable[[Any], bool]
    policy: Policy
    precision: torch.dtype
    max_evaluations: int
    state: Snapshot
    evaluations: list[Evaluation] = field(default_factory=list)
    answers: dict[frozenset[Unit], bool] = field(default_factory=dict)

    def run(self, operators: bool) -> SearchResult:
        """Evaluate the policy, everything kept, and then smaller sets."""
        comparison = PrecisionComparison(self.model)
        comparison.run.only_first_step = True
        with record_casts() as casts, comparison:
            calls = casts.calls = _LocatedCalls(comparison.run.modules)
            if self._run(()):
                return self._result("passes already", ())
        units, inside = self._ranked(calls, comparison.report)
        if not (units and self.test(units) and self._run(_outermost(units))):
            return self._result("inconclusive", ())
        try:
            found = self._refined(minimal_subset(units, self.test), [*units, *inside] if operators else units)
        except _BudgetSpent:
            passing = (one for one in self.evaluations if one.passes)
            return self._result("budget spent", min(passing, key=lambda one: len(one.kept)).kept)
        return self._result("found", _outermost(found))

    def test(self, units: Sequence[Unit]) -> bool:
        """Whether the metric passes with these units kept."""
        kept = _outermost(units)
        key = frozenset(kept)
        if key not in self.answers:
            if len(self.evaluations) >= self.max_evaluations:
                raise _BudgetSpent
            self.answers[key] = self._run(kept)
        return self.answers[key]

    def _run(self, kept: tuple[Unit, ...]) -> bool:
        self.state.restore()
        value = self.evaluate(self._policy_and_code(kept)[0])
        self.evaluations.append(Evaluation(kept, value, bool(self.passes(value))))
        return self.evaluations[-1].passes

    def _refined(self, found: list[Unit], units: Sequence[Unit]) -> list[Unit]:
        """`found` with what suffices inside a module in place of the module."""
        seen: set[Unit] = set()
        while (module := next((one for one in found if one not in seen), None)) is not None:
            seen.add(module)
            smaller = [one for one in found if one != module]
            smaller += [one for one in units if one not in found and module.covers(one)]
            if len(smaller) >= len(found) and self.test(smaller):
                found = minimal_subset(smaller, self.test)
        return found

    def _ranked(self, calls: _LocatedCalls, precision: PrecisionReport) -> tuple[list[Unit], list[Unit]]:
        """What computed in less than `precision`, the most suspect first; and the operators in modules."""
        rules = [(rule.key, module_of(bound.module)) for rule in self.policy.modules.rules for bound in rule.bound]
        ruled = {id(module) for _, module in rules}
        own = {id(module) for key, module in rules if isinstance(key, str) and "*" not in key}
        named = module_paths(self.model)
        kept = {path for path, module in named if id(module) in own}
        # All in float32, a module around one with a rule might be given 16 bits by it: there, only operators are units.
        around = {path for path, one in named if any(id(inner) in ruled for inner in one.modules() if inner is not one)}
        paths = {path for path, _ in named if path} - kept - around
        found: dict[Unit, None] = {}
        inside: dict[Unit, None] = {}
        for place, call in zip(calls.places, calls, strict=True):
            if not any(map(_is_low, call.computed_in)):
                continue
            path = place.path if place is not None and place.known else ""
            if path in paths:
                found[Unit(path)] = None
            if path not in kept and self.precision is torch.float32 and takes_float32(call.op, self.policy.device_type):
                (inside if path in paths else found)[Unit(path, call.op)] = None
        for one in precision.operators:
            if one.path in paths and _is_low(getattr(torch, one.dtype)):
                found[Unit(one.path)] = None
        scores = _scores(precision)
        # A region sees matmul where kernels see bmm: an operator without a score has that of all outside modules.
        ranked = sorted(found, key=lambda unit: -max(scores[unit.path], scores[unit.op] if unit.op else 0.0))
        return ranked, list(inside)

    def _policy_and_code(self, kept: Iterable[Unit]) -> tuple[Policy, str]:
        """The policy with these units kept, and the line that makes it."""
        policy, code = self.policy, "policy"
        if policy == Policy.default(policy.device_type):
            code = f'Policy.default("{policy.device_type}")'
        modules: dict[str, list[str]] = defaultdict(list)
        for one in kept:
            modules[one.path] += [one.op] * bool(one.op)
        policy, code = _with_rules(policy, code, modules.pop("", []))
        values = {
            path: _with_rules(policy, code, ops) if ops else (self.precision, str(self.precision))
            for path, ops in modules.items()
        }
        if values:
            policy = policy.for_modules(self.model, {path: value for path, (value, _) in values.items()})
            rules = ", ".join(f'"{path}": {text}' for path, (_, text) in values.items())
            code += f".for_modules(model, {{{rules}}})"
        return policy, f"policy = {code}"

    def _result(self, status: Any, kept: tuple[Unit, ...]) -> SearchResult:
        policy, code = self._policy_and_code(kept)
        return SearchResult(
            status, None if status == "inconclusive" else policy, kept, code if kept else "", tuple(self.evaluations),
            self.precision,
        )


class _LocatedCalls(list[RecordedCall]):
    """Recorded calls, and in `places` the call of the model's module that each was made in."""

    def __init__(self, modules: ModuleCalls) -> None:
        super().__init__()
        self.modules = modules
        self.places: list[ModuleCall | None] = []

    def append(self, call: RecordedCall) -> None:
        super().append(call)
        self.places.append(self.modules.current())


def _outermost(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Without units that another one covers."""
    return tuple(one for one in units if not any(other != one and other.covers(one) for other in units))


def _is_low(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


def _with_rules(policy: Policy, code: str, ops: Sequence[str]) -> tuple[Policy, str]:
    if not ops:
        return policy, code
    rules = ", ".join(f'"{op}": Rule.FLOAT32' for op in ops)
    return policy.with_rules(dict.fromkeys(ops, Rule.FLOAT32)), f"{code}.with_rules({{{rules}}})"


def _scores(precision: PrecisionReport) -> dict[str, float]:
    """By module path and operator, the largest error that it makes, or that grows in it.

    Where an error grows, the operator that made it is as suspect: in float32 there would be nothing to grow.
    """
    scores: dict[str, float] = defaultdict(float)

    def blame(one: OperatorError, amount: float) -> None:
        for name in (one.path, one.op.partition(".")[0]):
            scores[name] = max(scores[name], amount)

    by_index = {one.index: one for one in precision.operators}
    for one in precision.operators:
        blame(one, _OVERFLOW if math.isinf(one.local) else one.local)
        if one.amplification > _GROWS and math.isfinite(one.propagated) and precision.matters(one):
            blame(one, one.propagated)
            maker = by_index.get(one.error_from)
            if maker is not None:
                blame(maker, one.propagated * 1.001)
    return scores
