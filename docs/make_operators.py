"""Write operators.md from the operator lists. Run: python docs/make_operators.py"""

from collections.abc import Iterable
from pathlib import Path

from ampkit.policy.default_lists import DEFAULT_EXTRA
from ampkit.policy.rules import Group
from ampkit.policy.torch_lists import TORCH

TARGET = Path(__file__).with_name("operators.md")

DEVICES = ("cpu", "cuda")  # `ampkit explain --device` has the others

INTRO = """# Operator lists

The [rule](policy.md#rules-for-operators) of each operator in a region, for CPUs and CUDA. `ampkit explain softmax`
prints the rule of one operator, and `ampkit explain --device mps` lists other devices. `docs/make_operators.py` writes
this page from `ampkit/policy/torch_lists.py` and `default_lists.py`.

Operators without a rule, in-place operators and `out=` variants are not cast. `Policy.torch(device)` is the first list,
`Policy.default(device)` both. Names are ATen's, with the overload after the dot unless it is the default one.

<div class="filter" data-filter></div>
"""

COMPOSITES = """## Composites

A composite operator calls other operators. Without a rule of its own, its parts follow their rules: `einsum` calls
`bmm`, and `cross_entropy_loss` calls `log_softmax` and `nll_loss`. Kernels can also call operators with rules:
`_trilinear`, behind `bilinear` on CPUs, calls `bmm`. The default policy has float32 rules for such operators if a cast
breaks them.
"""


def render() -> str:
    """Return the whole page."""
    parts = [INTRO]
    for title, lists in (("## torch.amp's lists\n", TORCH), ("## Additions of the default policy\n", DEFAULT_EXTRA)):
        parts.append(title)
        shared = [group for group in lists[DEVICES[0]] if all(group in lists[device] for device in DEVICES)]
        for name, groups in [(" and ".join(DEVICES), shared), *((device, lists[device]) for device in DEVICES)]:
            parts.append(f"### {name}\n\n{_table(g for g in groups if groups is shared or g not in shared)}\n")
    parts.append(COMPOSITES)
    return "\n".join(parts)


def _table(groups: Iterable[Group]) -> str:
    merged: dict[Group, str] = {}
    for group in groups:  # a row for each rule and reason
        key = group._replace(ops="")
        merged[key] = f"{merged.get(key, '')} {group.ops}"
    rows = [(f"`{g.rule.name}`", _sentence(g.why, g.since, g.until), _names(ops)) for g, ops in merged.items()]
    return _lines([("rule", "reason", "operators"), ("---", "---", "---"), *rows])


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
