"""From operator lists to tables: `fold` turns the names of a list into operators with their rules.

A list is a tuple of `Group`s. `TORCH` has torch.amp's own list for each device type (`torch_lists`), `DEFAULT_EXTRA`
the additions of ampkit's default policy (`default_lists`).

Names are ATen's: ``conv2d`` is the overload ``aten::conv2d`` (``torch.ops.aten.conv2d.default``), ``conv2d.padding`` is
the overload of that name. In-place and ``out=`` overloads are never listed, since the caller chose the dtype of the
tensor that they write to.
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

_warned_of: set[str] = set()  # missing names for which there was a warning


def _torch_version() -> tuple[int, int]:
    return parsed(torch.__version__)


def fold(groups: Iterable[Group]) -> dict[OpOverload, tuple[Rule, str]]:
    """One layer of a policy: every operator of `groups` with its rule and the reason.

    Omits groups for other versions of torch and, with one warning, names that the running torch lacks: torch drops
    operators between versions. Raises `ValueError` for an operator that is listed twice.
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
    if missing - _warned_of:
        _warned_of.update(missing)
        warn_user(
            f"torch {torch.__version__} does not have these operators of ampkit's lists, which are ignored: "
            f"{', '.join(sorted(missing))}. The lists are made for {SUPPORTED}; "
            "`make operators` in a checkout compares them with the torch at hand"
        )
    return layer


def names(group: Group) -> list[str]:
    """The names of a group; none if the group does not apply to the running torch's version."""
    return group.ops.split() if group.since <= _torch_version() < group.until else []
