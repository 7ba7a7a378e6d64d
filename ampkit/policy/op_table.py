"""The operator lists: which rule each operator follows, per device type, and why.

A list is a tuple of `Group`s; `fold` turns groups into `{OpOverload: Rule}` and refuses unknown names and
duplicates, so a list that loads is a list whose every line means something. `TORCH` is torch.amp's own list for
each device (`_torch_lists`), `DEFAULT_EXTRA` is what ampkit's default policy lays on top (`_default_lists`);
`OPAQUE` and `DECOMPOSED` classify the composite operators (`_composites`).

Names are ATen's: ``conv2d`` is the overload ``aten::conv2d`` (``torch.ops.aten.conv2d.default``),
``conv2d.padding`` is that overload. In-place and ``out=`` overloads are never listed: the caller chose the
dtype of what they write to.
"""

import difflib
from collections.abc import Iterable

import torch
from torch._ops import OpOverload

from ampkit.policy._composites import DECOMPOSED, OPAQUE
from ampkit.policy._default_lists import DEFAULT_EXTRA
from ampkit.policy._rules import Group, Rule
from ampkit.policy._torch_lists import TORCH

__all__ = ["DECOMPOSED", "DEFAULT_EXTRA", "OPAQUE", "TORCH", "Group", "Rule", "fold", "resolve"]


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def resolve(name: str) -> OpOverload:
    """The operator that `name` means: ``"conv2d"``, ``"conv2d.padding"`` or ``"aten::conv2d.padding"``.

    Without a namespace the operator is ATen's; without an overload it is the one called ``default``.
    Raises `ValueError`, with the nearest names, if this torch has no such operator. Never syncs.

    >>> resolve("conv2d.padding")
    <OpOverload(op='aten.conv2d', overload='padding')>
    """
    namespace, _, rest = name.rpartition("::")
    namespace = namespace or "aten"
    base, _, overload = rest.partition(".")
    library = getattr(torch.ops, namespace)
    packet = getattr(library, base, None)
    if packet is None:
        near = difflib.get_close_matches(base, _names(namespace), n=3)
        raise ValueError(f"unknown operator {name!r} in torch {torch.__version__}; nearest: {near or 'none'}")
    found = getattr(packet, overload or "default", None)
    if found is None:
        raise ValueError(
            f"operator '{namespace}::{base}' has no overload {overload or 'default'!r}; "
            f"expected one of {packet.overloads()}"
        )
    return found


def _names(namespace: str) -> list[str]:
    """Base names of all operators of a namespace."""
    every = torch._C._dispatch_get_all_op_names()
    return sorted({name.split("::")[1].split(".")[0] for name in every if name.startswith(namespace + "::")})


def fold(groups: Iterable[Group]) -> dict[OpOverload, Rule]:
    """One layer of a policy: every operator of `groups` with its rule.

    Groups outside the running torch's version span are left out. Raises `ValueError` for a name that does not
    exist and for an operator listed twice, `TypeError` for a rule that is not a `Rule`. Layers are combined
    by the policy, later over earlier: ``fold(TORCH["cpu"]) | fold(DEFAULT_EXTRA["cpu"])``.
    """
    version = _torch_version()
    rules: dict[OpOverload, Rule] = {}
    for group in groups:
        if not isinstance(group.rule, Rule):
            raise TypeError(f"rule of {group.ops!r} is {group.rule!r}; expected a member of Rule")
        if not group.since <= version < group.until:
            continue
        for name in group.ops.split():
            op = resolve(name)
            if op in rules:
                raise ValueError(
                    f"operator {op.name()!r} is listed twice: as {rules[op].name} and as {group.rule.name}"
                )
            rules[op] = group.rule
    return rules
