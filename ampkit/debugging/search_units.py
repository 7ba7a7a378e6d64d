"""What a search may keep in float32: modules, and operators outside them, those most likely at fault first."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import Module

from ampkit.debugging.precision_report import OperatorError, PrecisionReport
from ampkit.policy.policy import Policy, Rule
from ampkit.region.recording import CastRecord

__all__ = ["Unit", "code_of", "policy_with", "ranked_units", "units_below"]

_LOW = (torch.float16, torch.bfloat16)
_OVERFLOW = 1e6         # what an overflow counts for, beside relative errors
_GROWS = 1.5            # times; errors that grow less are passed on


@dataclass(frozen=True)
class Unit:
    """A module with all that is in it; or an operator, in a module or (`path` "") wherever it is called."""

    path: str
    op: str = ""

    @property
    def name(self) -> str:
        """`blocks.0.attn`, `aten::matmul` or `blocks.0.attn: aten::matmul`"""
        return ": ".join(filter(None, (self.path, self.op)))

    def covers(self, other: Unit) -> bool:
        """Whether another one computes in float32 where this one does."""
        inside = not self.path or other.path == self.path or other.path.startswith(f"{self.path}.")
        return inside and (self.op == other.op if self.op else bool(self.path))


def ranked_units(
    model: Module, policy: Policy, casts: CastRecord, precision: PrecisionReport
) -> tuple[list[Unit], list[Unit], dict[Unit, float]]:
    """What computed in low precision, the likeliest culprit first and of equals the smallest; the operators in modules,
    for a closer look; and the share that each module has in what computed in low precision."""
    paths = {name for name, _ in model.named_modules() if name} - _with_rules(policy)
    found: dict[Unit, None] = {}
    inside: dict[Unit, None] = {}
    for call in casts.calls:
        if not any(dtype in _LOW for dtype in call.computed_in):
            continue
        if call.module in paths:
            found[Unit(call.module)] = inside[Unit(call.module, call.op)] = None
        elif _takes_float32(policy, call.op):
            found[Unit("", call.op)] = None
    for one in precision.operators:
        if one.path in paths and one.dtype in ("float16", "bfloat16"):
            found[Unit(one.path)] = None
    scores = _scores(precision)
    shares = _shares(found, precision)
    # A region sees matmul where kernels see bmm: an operator without a score has that of all outside modules.
    order = sorted(found, key=lambda unit: (
        -max(scores.get(unit.path, 0.0), scores.get(unit.op, 0.0)), shares.get(unit, 0.0)
    ))
    return order, [unit for unit in inside if _takes_float32(policy, unit.op)], shares


def units_below(unit: Unit, units: Iterable[Unit]) -> list[Unit]:
    """The units inside another one."""
    return [one for one in units if one != unit and unit.covers(one)]


def policy_with(policy: Policy, units: Sequence[Unit], model: Module) -> Policy:
    """`policy` with units of `model` kept in float32."""
    everywhere, modules = _rules(units)
    if everywhere:
        policy = policy.with_rules(dict.fromkeys(everywhere, Rule.FLOAT32))
    rules = {
        path: torch.float32 if not ops else policy.with_rules(dict.fromkeys(ops, Rule.FLOAT32))
        for path, ops in modules.items()
    }
    return policy.for_modules(model, rules) if rules else policy


def code_of(units: Sequence[Unit], policy: str) -> str:
    """The line to paste; `policy` is how the policy before is written."""
    everywhere, modules = _rules(units)

    def with_rules(ops: Iterable[str]) -> str:
        return ".with_rules({" + ", ".join(f'"{op}": Rule.FLOAT32' for op in ops) + "})"

    text = f"policy = {policy}" + (with_rules(everywhere) if everywhere else "")
    if modules:
        text += ".for_modules(model, {" + ", ".join(
            f'"{path}": ' + (f"{policy}{with_rules(ops)}" if ops else "torch.float32") for path, ops in modules.items()
        ) + "})"
    return text


def _rules(units: Sequence[Unit]) -> tuple[list[str], dict[str, list[str]]]:
    """Operators for everywhere; operators by module, none for all of it. What a module covers is left out."""
    needed = [one for one in units if not any(other != one and other.covers(one) for other in units)]
    modules: dict[str, list[str]] = defaultdict(list)
    for one in needed:
        if one.path:
            modules[one.path] += [one.op] * bool(one.op)
    return [one.op for one in needed if not one.path], modules


def _scores(precision: PrecisionReport) -> dict[str, float]:
    """How suspect a module or an operator is: by the error that it makes, and by that which grows in it.

    Where an error grows, the one who made it is as suspect: in float32 there would be nothing to grow.
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


def _shares(units: Iterable[Unit], precision: PrecisionReport) -> dict[Unit, float]:
    low = [one for one in precision.operators if one.dtype in ("float16", "bfloat16")]
    whole = sum(math.prod(one.shape) for one in low) or 1
    return {
        unit: sum(math.prod(one.shape) for one in low if unit.covers(Unit(one.path))) / whole
        for unit in units if unit.path and not unit.op
    }


def _with_rules(policy: Policy) -> set[str]:
    """The modules that the policy names already."""
    return {rule.key for rule in policy.modules.rules if isinstance(rule.key, str)}


def _takes_float32(policy: Policy, op: str) -> bool:
    try:
        policy.with_rules({op: Rule.FLOAT32})
    except (TypeError, ValueError):
        return False
    return True
