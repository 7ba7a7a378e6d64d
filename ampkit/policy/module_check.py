"""Which modules of a model the rules of `Policy.for_modules` match, before a step is run."""

from __future__ import annotations

import difflib
from typing import Any, NamedTuple

from torch.nn import Module

from ampkit.policy.module_paths import path_of
from ampkit.policy.module_rules import ModuleRules, describe

__all__ = ["ModuleCheck", "RuleHits", "check"]


class RuleHits(NamedTuple):
    """One rule, and the paths of the modules that its key matches, relative to the model; "" is the model itself."""

    key: str                    # as it is written in code
    value: Any                  # the dtype or the policy
    modules: tuple[str, ...]
    nearest: tuple[str, ...]    # the closest paths, for a pattern that matches nothing

    @property
    def hint(self) -> str:
        """The closest paths, to go on a sentence with; "" where there are none."""
        return f"; nearest: {', '.join(self.nearest)}" if self.nearest else ""


class ModuleCheck(NamedTuple):
    """What `Policy.check` found; prints a line for each rule."""

    rules: tuple[RuleHits, ...]

    @property
    def unused(self) -> tuple[RuleHits, ...]:
        """The rules that match no module of the model."""
        return tuple(rule for rule in self.rules if not rule.modules)

    def __str__(self) -> str:
        if not self.rules:
            return "this policy has no rules for modules"
        return "\n".join(_line(rule) for rule in self.rules)


def check(rules: ModuleRules, model: Module) -> ModuleCheck:
    """Each rule with what it matches if `model` is the outermost module called."""
    modules = {path_of(model, module): module for module in model.modules()}
    found = []
    for key, value in rules.items:
        alone = ModuleRules(((key, value),))
        hits = tuple(path for path, module in modules.items() if alone.find(module, path) is not None)
        near = difflib.get_close_matches(key, modules, n=3) if isinstance(key, str) and not hits else ()
        found.append(RuleHits(describe(key), value, hits, tuple(near)))
    return ModuleCheck(tuple(found))


def _line(rule: RuleHits) -> str:
    if rule.modules:
        return f"{rule.key}: {rule.value!r}: " + ", ".join(path or "the model itself" for path in rule.modules)
    return f"{rule.key}: {rule.value!r}: no module{rule.hint}"
