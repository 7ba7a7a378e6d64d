"""Write operators.md from the operator lists. Run: python docs/make_operators.py"""

from collections.abc import Iterable
from pathlib import Path

from ampkit.policy.default_lists import DEFAULT_EXTRA
from ampkit.policy.rules import Group
from ampkit.policy.torch_lists import TORCH

TARGET = Path(__file__).with_name("operators.md")

INTRO = """# What a region does to each operator

Written by `docs/make_operators.py` from `ampkit/policy/torch_lists.py` and `default_lists.py`; a test compares them. A
region asks its policy about every operator that is called inside it; [policies](policy.md#rules-for-operators) has what
each rule does.

An unlisted operator runs on its arguments as they came, and so do in-place and `out=` overloads: the caller chose the
dtype of what they write to. `ampkit explain softmax` and `Policy.explain(op)` give an operator's rule and the reason;
`record_casts()` shows the operators of a module; `Policy.with_rules({op: rule})` changes a rule.

`Policy.torch(device)` is torch.amp's own list for the device. `Policy.default(device)` lays ampkit's additions on top.
Names are ATen's, with the overload after the dot where it is not the default one.

<div class="filter" data-filter></div>
"""

COMPOSITES = """## Composites

A composite operator is written in terms of others. An unlisted one runs its own code with the region active, so
a listed operator inside it follows its rule: `einsum` ends in `bmm`, `cross_entropy_loss` in `log_softmax` and
`nll_loss`.

Kernels that are not composites may call listed operators too, as `_trilinear` (behind `bilinear` on CPU) calls `bmm`.
The region is active there as well, as torch.amp is: that is what makes results equal to the bit under `Policy.torch`.
Where it does harm (`linalg.pinv` and `sparse.mm` lose their derivative, `matrix_exp` would raise), the default policy
names the outer operator and so keeps casts out of it.
"""


def render() -> str:
    """The whole document."""
    parts = [INTRO, "## torch.amp's lists\n"]
    for devices, groups in _shared(TORCH):
        parts.append(f"### {devices}\n\n{_table(groups)}\n")
    parts.append("## What the default policy adds\n")
    for devices, groups in _shared(DEFAULT_EXTRA):
        parts.append(f"### {devices}\n\n{_table(groups)}\n")
    parts.append(COMPOSITES)
    return "\n".join(parts)


def _shared(lists: dict[str, tuple[Group, ...]]) -> list[tuple[str, tuple[Group, ...]]]:
    """Each distinct list once, with the devices that have it."""
    found: dict[tuple[Group, ...], list[str]] = {}
    for device, groups in lists.items():
        found.setdefault(groups, []).append(device)
    return [(", ".join(devices), groups) for groups, devices in found.items()]


def _table(groups: Iterable[Group]) -> str:
    rows = [(f"`{g.rule.name}`", _sentence(g.why, g.since, g.until), _names(g.ops)) for g in groups]
    if not rows:
        return "torch lists nothing for these devices; a plugin for them may."
    return _lines([("rule", "why", "operators"), ("---", "---", "---"), *rows])


def _lines(rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _names(ops: str) -> str:
    return " ".join(f"`{name}`" for name in sorted(ops.split()))


def _sentence(why: str, since: tuple[int, int], until: tuple[int, int]) -> str:
    span = []
    if since != (0, 0):
        span.append("from torch {}.{}".format(*since))
    if until != (1000, 0):
        span.append("before torch {}.{}".format(*until))
    return f"{why} ({', '.join(span)})" if span else why


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET}")
