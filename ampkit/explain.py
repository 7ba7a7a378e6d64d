"""`ampkit explain OP`: the rule that an operator follows under autocast, who set it, and why. Without OP: all rules."""

from __future__ import annotations

import argparse
import sys

from ampkit.policy.operators import named_by
from ampkit.policy.policy import Policy


def main(argv: list[str] | None = None) -> int:
    """Print an operator's rules by the default policy, and by torch.amp's list if they differ.

    Returns the exit code: 2 for an unknown operator.
    """
    parser = argparse.ArgumentParser(
        prog="ampkit explain", description="Print an operator's rules under autocast; without OP, all rules."
    )
    parser.add_argument("op", metavar="OP", nargs="?", help='"softmax", "aten::softmax.int", "mylib::attention", ...')
    parser.add_argument("--device", metavar="TYPE", default="cuda", help="the device type (default: cuda)")
    options = parser.parse_args(argv)
    try:
        default = _lines(Policy.default(options.device), options.op)
        torch_amp = _lines(Policy.torch(options.device), options.op)
    except (ValueError, TypeError) as error:
        print(f"ampkit explain: {error}", file=sys.stderr)
        return 2
    print("\n".join(default))
    if options.op is not None and torch_amp != default:
        print("under Policy.torch:", *torch_amp, sep="\n")
    return 0


def _lines(policy: Policy, op: str | None) -> list[str]:
    """Return a line for each overload that the name means and that has a rule; if none has, for each overload."""
    explanations = [policy.explain(overload) for overload in (policy.rules() if op is None else named_by(op))]
    listed = [explanation for explanation in explanations if explanation.layer != "unlisted"]
    return sorted({str(explanation) for explanation in listed or explanations})
