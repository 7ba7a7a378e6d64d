"""The results of `Policy.explain`."""

from __future__ import annotations

from typing import NamedTuple

from ampkit.policy.rules import Rule


class Explanation(NamedTuple):
    """The rule of one operator, and where it comes from."""

    op: str
    rule: Rule
    layer: str      # "torch", "default", "register_op", "with_rules[0]", ... or "unlisted"
    why: str

    def __str__(self) -> str:
        return f"{self.op}: {self.rule.name} (set by {self.layer}): {self.why}"


class ModuleExplanation(NamedTuple):
    """The rules of the operators that the forward of a module's class calls, as its source says; `str()` of it lists
    them, those that no list names together."""

    module: str
    operators: tuple[Explanation, ...]

    def __str__(self) -> str:
        listed = [f"  {one}" for one in self.operators if one.layer != "unlisted"]
        made_of = {True: " (its parts follow their own rules)", False: ""}
        others = ", ".join(
            one.op + made_of[one.rule is Rule.DECOMPOSE] for one in self.operators if one.layer == "unlisted"
        )
        if not self.operators:
            return f"{self.module} calls no operator that its source names; ask about the modules in it"
        if not listed:
            return f"{self.module} calls no operator that a list names, but {others}"
        return "\n".join([f"{self.module} calls", *listed, *([f"  and, named by no list, {others}"] if others else [])])
