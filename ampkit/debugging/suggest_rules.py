"""`suggest_rules`: other rules for the operators of a step, proposed only when they were timed and compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ampkit.debugging.operator_stats import OperatorStats
from ampkit.policy.policy import Policy, Rule

__all__ = ["RuleSuggestions", "RuleTrial", "suggest_rules"]

_OTHER = {
    Rule.FLOAT32: Rule.KEEP, Rule.FLOAT32_DTYPE_ARG: Rule.KEEP, Rule.PROMOTE: Rule.KEEP, Rule.LOWER: Rule.FLOAT32,
}


@dataclass(frozen=True)
class RuleTrial:
    """Other rules, tried: the least time with them and without, interleaved, and the metric."""

    rules: dict[str, Rule]
    seconds: float
    before: float
    value: Any
    passes: bool

    def __str__(self) -> str:
        rules = ", ".join(f"{op}: {rule.name}" for op, rule in self.rules.items())
        return (
            f"{rules}: {self.seconds * 1e3:.3g} ms for {self.before * 1e3:.3g} ms, {self.value} "
            f"{'passes' if self.passes else 'fails'}"
        )


@dataclass(frozen=True)
class RuleSuggestions:
    """What was tried, each alone and at last together, and the best that passed and was faster."""

    trials: list[RuleTrial]
    best: RuleTrial | None
    policy: Policy

    def __str__(self) -> str:
        if self.best is None:
            return "\n".join([f"nothing proposed: none of {len(self.trials)} changes passed and was faster", *(
                f"  tried     {trial}" for trial in self.trials
            )])
        rules = ", ".join(f'"{op}": Rule.{rule.name}' for op, rule in self.best.rules.items())
        return f"  change    policy = policy.with_rules({{{rules}}})\n  evidence  {self.best}"


def suggest_rules(
    stats: OperatorStats, evaluate: Callable[[Policy], Any], *, policy: Policy | None = None,
    passes: Callable[[Any], bool] = bool, most: int = 6, rounds: int = 5, margin: float = 0.03,
) -> RuleSuggestions:
    """Whether other rules make `evaluate` faster, and its metric still passes.

    `stats` come from `collect_operator_stats`; of the operators that a region cast for, those with the most bytes cast
    are tried, at most `most`: without their casts where a rule asks for float32, in float32 where it asks for less.
    `evaluate(policy)` does the work, from the same state each time, and returns the metric. Each change is timed beside
    the policy as it is, in turns, the least of `rounds`; those that pass and save more than `margin`, together too.
    """
    if rounds < 1 or most < 1:
        raise ValueError(f"rounds is {rounds} and most is {most}; expected 1 or more of each")
    moved: dict[str, int] = {}
    found: dict[str, Rule] = {}
    for call in stats.rules.calls:
        if call.rule in _OTHER:
            moved[call.op] = moved.get(call.op, 0) + call.nbytes
            found[call.op] = _OTHER[call.rule]
    if not found:
        raise ValueError("stats hold no operator that a region casts for; expected a region entered while collecting")
    if policy is None:
        policy = Policy.default(stats.device_type)
    base = policy

    def tried(rules: dict[str, Rule]) -> RuleTrial:
        other = base.with_rules({**rules})
        value = evaluate(other)     # not timed: the first one warms up
        evaluate(base)
        seconds = before = float("inf")
        for _ in range(rounds):
            before = min(before, _timed(evaluate, base))
            seconds = min(seconds, _timed(evaluate, other))
        return RuleTrial(rules, seconds, before, value, bool(passes(value)))

    ops = sorted(found, key=lambda op: -moved[op])[:most]
    trials = [tried({op: found[op]}) for op in ops]
    good = [one for one in trials if one.passes and one.seconds < (1 - margin) * one.before]
    if len(good) > 1:
        together = tried({op: rule for one in good for op, rule in one.rules.items()})
        trials.append(together)
        if together.passes:
            good.append(together)
    best = min(good, key=lambda one: one.seconds / one.before, default=None)
    return RuleSuggestions(trials, best, policy if best is None else policy.with_rules({**best.rules}))


def _timed(evaluate: Callable[[Policy], Any], policy: Policy) -> float:
    start = time.perf_counter()
    evaluate(policy)
    return time.perf_counter() - start
