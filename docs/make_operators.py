"""Write operators.md from the operator lists. Run: python docs/make_operators.py"""

from collections.abc import Iterable
from pathlib import Path

from ampkit.policy.default_lists import DEFAULT_EXTRA
from ampkit.policy.rules import Group
from ampkit.policy.torch_lists import TORCH

TARGET = Path(__file__).with_name("operators.md")

DEVICES = ("cpu", "cuda")  # `ampkit explain --device` has the others

INTRO = """# Operator lists

The rule of each operator in a region, for CPUs and CUDA. `ampkit explain --device mps` lists other devices.
`docs/make_operators.py` writes this page from `ampkit/policy/torch_lists.py` and `default_lists.py`.

Operators without a rule, in-place operators and `out=` variants are not cast. [Policies](policy.md#rules-for-operators)
describes the rules. `ampkit explain softmax` prints the rule of an operator and its reason.

`Policy.torch(device)` is the first list, `Policy.default(device)` both. Names are ATen's, with the overload after the
dot unless it is the default one.

<div class="filter" data-filter></div>
"""

COMPOSITES = """## Composites

A composite operator calls other operators. Without a rule of its own, its parts follow their rules: `einsum` calls
`bmm`, and `cross_entropy_loss` calls `log_softmax` and `nll_loss`. Other kernels can also call operators with rules:
`_trilinear`, behind `bilinear` on CPUs, calls `bmm`. `Policy.torch` does not change that. The default policy adds rules
for operators that break: `linalg.pinv` and `sparse.mm` would lose their derivative, and `matrix_exp` would raise.
"""


def render() -> str:
    """Return the whole page."""
    parts = [INTRO]
    for title, lists in (("## torch.amp's lists\n", TORCH), ("## Additions of the default policy\n", DEFAULT_EXTRA)):
        parts.append(title)
        parts += [f"### {device}\n\n{_table(lists[device])}\n" for device in DEVICES]
    parts.append(COMPOSITES)
    return "\n".join(parts)


def _table(groups: Iterable[Group]) -> str:
    rows = [(f"`{g.rule.name}`", _sentence(g.why, g.since, g.until), _names(g.ops)) for g in groups]
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
