"""`ampkit explain OP`: which rule an operator follows under autocast, who set it, and why. Without OP: all rules."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict

from ampkit.policy.float8_recipes import RECIPES
from ampkit.policy.operator_keys import named_by
from ampkit.policy.policy import Policy, Rule

DEVICES = ("cpu", "cuda")

MEANINGS = {
    Rule.LOWER: "inputs are cast to the region's dtype",
    Rule.LOWER_FLOAT32_OUT: "the same for matrix products, with a float32 result",
    Rule.FLOAT32: "inputs are cast to float32",
    Rule.FLOAT32_DTYPE_ARG: "inputs stay, the result is computed and returned in float32 through `dtype=`",
    Rule.PROMOTE: "inputs are cast to the widest dtype among them",
    Rule.BANNED: "raises, and says what to use instead",
    Rule.DECOMPOSE: "the operators that it is made of follow their own rules",
    Rule.KEEP: "inputs stay as they are",
    Rule.FLOAT8_TENSORWISE: "products in FP8, one scale for a matrix, gradients in e5m2",
    Rule.FLOAT8_ROWWISE: "products in FP8, a scale for each row",
    Rule.FLOAT8_ROWWISE_GW_HP: "the same, but gradients of weights in the region's dtype",
}
UNLISTED = {
    Rule.DECOMPOSE: "composites that no row names",
    Rule.KEEP: "everything else: `add`, `relu`, `embedding`, in-place and `out=` variants, ...",
    **dict.fromkeys((Rule.LOWER_FLOAT32_OUT, *RECIPES), "by `with_rules` alone"),
}


def main(argv: list[str] | None = None) -> int:
    """Print one operator's rules, or the default policy as a Markdown table. Returns 2 for an unknown operator."""
    parser = argparse.ArgumentParser(
        prog="ampkit explain", description="Say what autocast does with an operator; without OP, with all of them."
    )
    parser.add_argument("op", metavar="OP", nargs="?", help='"softmax", "aten::softmax.int", "mylib::attention", ...')
    parser.add_argument("--device", metavar="TYPE", default="cuda", help="the device type for OP (default: cuda)")
    options = parser.parse_args(argv)
    if options.op is None:
        print(table())
        return 0
    try:
        default = explanations(Policy.default(options.device), options.op)
        native = explanations(Policy.torch(options.device), options.op)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        print(f"ampkit explain: {error}", file=sys.stderr)
        return 2
    print("\n".join(default))
    if native != default:
        print("under Policy.torch:", *native, sep="\n")
    return 0


def explanations(policy: Policy, op: str) -> list[str]:
    """One line for each overload that the name means: those that a list names, or else all of them."""
    found = [policy.explain(one) for one in named_by(op)]
    listed = [one for one in found if one.layer != "unlisted"]
    return sorted({str(one) for one in listed or found})


def table() -> str:
    """The default policy for CPU and CUDA as a Markdown table: what both do, then what only one of them does.

    Overloads go by their operator's name; an operator whose overloads differ is in several rows.
    """
    by_device = {device: _names_by_rule(Policy.default(device)) for device in DEVICES}
    lines = [
        f"| rule | what happens | on {' and '.join(map(str.upper, DEVICES))} "
        + "".join(f"| only on {device.upper()} " for device in DEVICES) + "|",
        "| --- " * (3 + len(DEVICES)) + "|",
    ]
    for rule, meaning in MEANINGS.items():
        sets = [by_device[device][rule] for device in DEVICES]
        shared = set.intersection(*sets)
        listed = f"{UNLISTED.get(rule, '')} {_cell(shared)}".strip()
        cells = [f"`{rule.name}`", meaning, listed, *(_cell(names - shared) for names in sets)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _names_by_rule(policy: Policy) -> dict[Rule, set[str]]:
    names: dict[Rule, set[str]] = defaultdict(set)
    for op, rule in policy.rules().items():
        names[rule].add(op.overloadpacket.__name__)
    return names


def _cell(names: set[str]) -> str:
    return " ".join(f"`{name}`" for name in sorted(names, key=lambda name: (name.lstrip("_"), name)))
