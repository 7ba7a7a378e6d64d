"""`ampkit policy-table`: the default policy as a Markdown table, so that docs/policy.md cannot go stale."""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ampkit.policy.operator_keys import candidates
from ampkit.policy.policy import Policy, Rule

DEVICES = ("cpu", "cuda")
BEGIN, END = "<!-- policy-table: made by `ampkit policy-table` -->", "<!-- end of policy-table -->"

MEANINGS = {
    Rule.LOWER: "inputs are cast to the region's dtype",
    Rule.FLOAT32: "inputs are cast to float32",
    Rule.FLOAT32_DTYPE_ARG: "inputs stay, the result is computed and returned in float32 through `dtype=`",
    Rule.PROMOTE: "inputs are cast to the widest dtype among them",
    Rule.BANNED: "raises, and says what to use instead",
    Rule.DECOMPOSE: "the operators that it is made of follow their own rules",
    Rule.KEEP: "inputs stay as they are",
}
UNLISTED = {
    Rule.DECOMPOSE: "composites that no row names",
    Rule.KEEP: "everything else: `add`, `relu`, `embedding`, in-place and `out=` variants, ...",
}


def render() -> str:
    """The table for CPU and CUDA: what both do, then what only one of them does.

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
        listed = _cell(shared)
        if rule in UNLISTED:
            listed = f"{UNLISTED[rule]} {listed}".strip()
        cells = [f"`{rule.name}`", meaning, listed, *(_cell(names - shared) for names in sets)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def insert(document: str) -> str:
    """The document with a fresh table between its markers. Raises `ValueError` if it has none."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no place for the table: expected a line {BEGIN!r} and after it a line {END!r}")
    return f"{head}{BEGIN}\n{render()}\n{END}{tail}"


def main(argv: list[str] | None = None) -> int:
    """Print the table, a list, or one operator's rules; or write the table between the markers of a file."""
    parser = argparse.ArgumentParser(
        prog="ampkit policy-table", description="Print the default policy as a Markdown table, or parts of it as text."
    )
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="write the table between the markers of this file instead"
    )
    parser.add_argument("--device", metavar="TYPE", help="list one device type's rules, an operator a line")
    parser.add_argument("--op", metavar="NAME", help="only this operator's: softmax, aten::softmax.int")
    parser.add_argument("--plain", action="store_true", help="list every operator of CPU and CUDA, without Markdown")
    options = parser.parse_args(argv)
    file = options.into
    if file is None and (options.device or options.op or options.plain):
        try:
            print("\n".join(_lines((options.device,) if options.device else DEVICES, options.op)))
        except ValueError as error:
            parser.exit(2, f"ampkit policy-table: {error}\n")
        return 0
    if file is None:
        print(render())
        return 0
    try:
        file.write_text(insert(file.read_text(encoding="utf-8")), encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.exit(2, f"ampkit policy-table: {file}: {error}\n")
    return 0


def _lines(devices: Sequence[str], op: str | None) -> list[str]:
    """`device  operator  RULE` for each operator with a rule, or for one. `ValueError` for an unknown one."""
    found = []
    for device in devices:
        policy = Policy.default(device)
        chosen = policy.rules() if op is None else candidates(op)
        names = sorted(each.name() for each in chosen)
        found += [f"{device:6s} {name:50s} {policy.rule_for(name).name}" for name in names]
    return found


def _names_by_rule(policy: Policy) -> dict[Rule, set[str]]:
    names: dict[Rule, set[str]] = defaultdict(set)
    for op, rule in policy.rules().items():
        names[rule].add(op.overloadpacket.__name__)
    return names


def _cell(names: set[str]) -> str:
    return " ".join(f"`{name}`" for name in sorted(names, key=lambda name: (name.lstrip("_"), name)))
