"""`ampkit explain OP`: which rule an operator follows under autocast, who set it, and why. Without OP: every rule."""

from __future__ import annotations

import argparse
import sys

from ampkit.policy.operator_keys import named_by
from ampkit.policy.policy import Policy


def main(argv: list[str] | None = None) -> int:
    """Print an operator's rules by the default policy, and by torch.amp's list if they differ; 2 for an unknown one."""
    parser = argparse.ArgumentParser(
        prog="ampkit explain", description="Say what autocast does with an operator; without OP, with all listed ones."
    )
    parser.add_argument("op", metavar="OP", nargs="?", help='"softmax", "aten::softmax.int", "mylib::attention", ...')
    parser.add_argument("--device", metavar="TYPE", default="cuda", help="the device type (default: cuda)")
    options = parser.parse_args(argv)
    try:
        default = _lines(Policy.default(options.device), options.op)
        native = _lines(Policy.torch(options.device), options.op)
    except (ValueError, TypeError) as error:
        print(f"ampkit explain: {error}", file=sys.stderr)
        return 2
    print("\n".join(default))
    if options.op is not None and native != default:
        print("under Policy.torch:", *native, sep="\n")
    return 0


def _lines(policy: Policy, op: str | None) -> list[str]:
    """A line for each overload that the name means: those that a list names, or else all of them."""
    found = [policy.explain(each) for each in (policy.rules() if op is None else named_by(op))]
    listed = [each for each in found if each.layer != "unlisted"]
    return sorted({str(each) for each in listed or found})
