"""The operator lists: which rule each operator follows, per device type, and why.

A list is a tuple of `Group`s. `TORCH` is torch.amp's own list for each device (`torch_lists`), `DEFAULT_EXTRA` is what
ampkit's default policy lays on top (`default_lists`).

Names are ATen's: ``conv2d`` is the overload ``aten::conv2d`` (``torch.ops.aten.conv2d.default``),
``conv2d.padding`` is that overload. In-place and ``out=`` overloads are never listed: the caller chose the
dtype of what they write to.
"""

from collections.abc import Iterable

import torch

from ampkit.policy.default_lists import DEFAULT_EXTRA
from ampkit.policy.operator_keys import resolve
from ampkit.policy.rules import Group, Rule
from ampkit.policy.torch_lists import TORCH
from ampkit.torch_internals.operators import OpOverload
from ampkit.torch_internals.versions import SUPPORTED, parsed
from ampkit.user_code import warn_user

__all__ = ["DEFAULT_EXTRA", "TORCH", "Group", "Rule", "fold", "names"]

_missing: set[str] = set()      # names that a warning has named


def _torch_version() -> tuple[int, int]:
    return parsed(torch.__version__)


def fold(groups: Iterable[Group]) -> dict[OpOverload, tuple[Rule, str]]:
    """One layer of a policy: every operator of `groups` with its rule, and why.

    Groups for other versions of torch are left out, and so, with one warning, are names that the running torch lacks,
    since torch drops operators between versions. Raises `ValueError` for an operator that is listed twice.
    """
    layer: dict[OpOverload, tuple[Rule, str]] = {}
    missing: set[str] = set()
    for group in groups:
        for name in names(group):
            try:
                op = resolve(name)
            except ValueError:
                missing.add(name)
                continue
            if op in layer:
                raise ValueError(
                    f"operator {op.name()!r} is listed twice: as {layer[op][0].name} and as {group.rule.name}"
                )
            layer[op] = group.rule, group.why
    if missing - _missing:
        _missing.update(missing)
        warn_user(
            f"torch {torch.__version__} does not have these operators of ampkit's lists, which leave them out: "
            f"{', '.join(sorted(missing))}. The lists are made for {SUPPORTED}; "
            "`make operators` in a checkout compares them with the torch at hand"
        )
    return layer


def names(group: Group) -> list[str]:
    """The names of a group; none if it is not for the running torch's version."""
    return group.ops.split() if group.since <= _torch_version() < group.until else []
