"""`ampkit explain OP`: which rule an operator follows in a region, who set it, and why."""

from __future__ import annotations

import argparse
import sys

import torch

from ampkit.policy.policy import Policy


def main(argv: list[str] | None = None) -> int:
    """Print the rule of each overload. Returns the exit code: 2 for an operator that does not exist."""
    parser = argparse.ArgumentParser(prog="ampkit explain", description="Say what a region does to an operator.")
    parser.add_argument("op", metavar="OP", help='"softmax", "aten::softmax.int", "mylib::attention", ...')
    parser.add_argument("--device", default="cuda", help="the device type, cuda without it")
    options = parser.parse_args(argv)
    try:
        policies = {"default": Policy.default(options.device), "torch.amp": Policy.torch(options.device)}
        lines = {name: _lines(policy, options.op) for name, policy in policies.items()}
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        print(f"ampkit explain: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines["default"]))
    if lines["torch.amp"] != lines["default"]:
        print("under Policy.torch:")
        print("\n".join(lines["torch.amp"]))
    return 0


def _lines(policy: Policy, op: str) -> list[str]:
    """One line for each overload that the name means."""
    name = op if "::" in op else f"aten::{op}"
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if packet is None:
        raise ValueError(f"no operator {name!r}; expected a name such as 'softmax' or 'aten::softmax.int'")
    names = [overload] if overload else [one for one in packet.overloads() if not one.endswith("out")]
    found = {one: policy.explain(f"{namespace}::{base}" + ("" if one == "default" else f".{one}")) for one in names}
    listed = {one: why for one, why in found.items() if why.layer != "unlisted"}
    return sorted({str(why) for why in (listed or found).values()})
