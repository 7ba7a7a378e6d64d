"""The operator lists: which rule each operator follows, per device type, and why.

A list is a tuple of `Group`s; `fold` turns groups into `{OpOverload: Rule}` and refuses duplicates. A name that the
running torch does not know is left out, with one warning for all lists, since torch drops operators between versions.
`TORCH` is torch.amp's own list for each device (`torch_lists`), `DEFAULT_EXTRA` is what ampkit's default policy lays
on top (`default_lists`).

Names are ATen's: ``conv2d`` is the overload ``aten::conv2d`` (``torch.ops.aten.conv2d.default``),
``conv2d.padding`` is that overload. In-place and ``out=`` overloads are never listed: the caller chose the
dtype of what they write to.
"""

import functools
import warnings
from collections.abc import Iterable

import torch

from ampkit.policy.default_lists import DEFAULT_EXTRA
from ampkit.policy.operator_keys import resolve
from ampkit.policy.rules import Group, Rule
from ampkit.policy.torch_lists import TORCH
from ampkit.torch_internals.operators import OpOverload, canonical
from ampkit.torch_internals.versions import SUPPORTED, parsed

__all__ = ["DEFAULT_EXTRA", "TORCH", "Group", "Rule", "fold", "left_out", "names"]


def _torch_version() -> tuple[int, int]:
    return parsed(torch.__version__)


def fold(groups: Iterable[Group]) -> dict[OpOverload, Rule]:
    """One layer of a policy: every operator of `groups` with its rule.

    Groups for other versions of torch are left out, and so, with a warning, are names in ampkit's lists that the
    running torch lacks. Raises `ValueError` for any other unknown name and for an operator listed twice, `TypeError`
    for a rule that is not a `Rule`. The policy combines layers, later over earlier:
    ``fold(TORCH["cpu"]) | fold(DEFAULT_EXTRA["cpu"])``.
    """
    rules: dict[OpOverload, Rule] = {}
    for group in groups:
        if not isinstance(group.rule, Rule):
            raise TypeError(f"rule of {group.ops!r} is {group.rule!r}; expected a member of Rule")
        for name in names(group):
            op = _find(name)
            if op is None and name in left_out():
                continue
            op = op or resolve(name)        # raises, with the nearest names
            if op in rules:
                raise ValueError(
                    f"operator {op.name()!r} is listed twice: as {rules[op].name} and as {group.rule.name}"
                )
            rules[op] = group.rule
    return rules


def names(group: Group) -> list[str]:
    """The names of a group; none if it is not for the running torch's version."""
    return group.ops.split() if group.since <= _torch_version() < group.until else []


def _find(name: str) -> OpOverload | None:
    """The operator that a list names; None if this torch does not have it."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    found = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
    return None if found is None else canonical(found)


@functools.cache
def left_out() -> frozenset[str]:
    """Names in ampkit's lists that this torch does not have. Warns about them once per process."""
    lists = (*TORCH.values(), *DEFAULT_EXTRA.values())
    missing = frozenset(name for groups in lists for group in groups for name in names(group) if _find(name) is None)
    if missing:
        warnings.warn(
            f"torch {torch.__version__} does not have these operators of ampkit's lists, which leave them out: "
            f"{', '.join(sorted(missing))}. The lists are made for {SUPPORTED}; `make operators` in a checkout "
            "compares them with the torch at hand",
            stacklevel=3,
        )
    return missing
