"""A warning for path patterns of `Policy.for_modules` that mean no module: a name misspelt, or a path from elsewhere.

A region looks when it closes, the first time that its rules have met a model. What counts is which modules the
outermost ones called have, not which of them ran: a part of a model that a step leaves out is nobody's mistake, while a
pattern that fits no path at all never has an effect. Classes and modules as keys are never warned of: the former are
often meant for any model, the latter cannot be misspelt.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Module

from ampkit.policy.module_check import check
from ampkit.policy.module_rules import ModuleRules
from ampkit.user_warnings import warn_user

_MOST = 1024
_PASSING = ("torch.", "contextlib")      # between a region and the line that leaves it
_settled: set[ModuleRules] = set()      # which have met a model, by value: a policy may be made anew in every step
_seen: dict[int, ModuleRules] = {}      # some of them by `id`, where hashing each time would be most of the work


def warn_of_unused(rules: ModuleRules, roots: Sequence[Module]) -> None:
    """Warn once of patterns that mean no module of `roots`, the outermost modules called in a region.

    A module without others in it, a loss, has no paths: where only such were called, nothing is said yet.
    """
    if _seen.get(id(rules)) is rules:
        return
    models = [root for root in roots if next(root.children(), None) is not None]
    if not models:
        return
    known = rules in _settled
    if len(_settled) >= _MOST or len(_seen) >= _MOST:
        _settled.clear()
        _seen.clear()
    _seen[id(rules)] = rules    # first: where warnings are errors, leaving the region is done over
    _settled.add(rules)
    if known:
        return
    patterns = ModuleRules(tuple((key, value) for key, value in rules.items if isinstance(key, str)))
    missed = None
    for model in models:
        found = {rule.key: rule for rule in check(patterns, model).unused}
        missed = found if missed is None else {key: rule for key, rule in missed.items() if key in found}
    names = ", ".join(dict.fromkeys(type(model).__name__ for model in models))
    for rule in (missed or {}).values():
        warn_user(
            f"the pattern {rule.key} of for_modules means no module of {names}, called in this region{rule.hint}. "
            "Paths count from the outermost module called; policy.check(model) says what each pattern means",
            _PASSING,
        )
