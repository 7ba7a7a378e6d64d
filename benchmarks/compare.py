"""Compare two result files, and list what got slower: `python -m benchmarks.compare OLD NEW [--fail]`.

Compares each side's ratio to its base, measured in the same rounds: it is comparable across days and, with care,
across similar machines. A change counts if the 20-80 % ranges do not overlap and the medians differ by more than a
threshold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import results
from benchmarks.report import spread
from benchmarks.results import Row

THRESHOLD = 0.03


@dataclass(frozen=True)
class Change:
    """One side of one case in both files. `direction` is "slower", "faster" or "same"."""

    case: str
    side: str
    old: dict[str, float]
    new: dict[str, float]
    direction: str

    @property
    def factor(self) -> float:
        """New ratio over old ratio."""
        return self.new["median"] / self.old["median"]


def compare(old: Sequence[Row], new: Sequence[Row], threshold: float = THRESHOLD) -> list[Change]:
    """Return the changes of all sides in both files, except the bases; the largest slowdown first."""
    before = {results.key(row): row for row in results.measured(old)}
    changes = []
    for row in results.measured(new):
        earlier = before.get(results.key(row))
        if earlier is None or earlier["base"] != row["base"]:
            continue
        for name in row["sides"].keys() & earlier["sides"].keys() - {row["base"]}:
            a, b = earlier["sides"][name]["ratio"], row["sides"][name]["ratio"]
            changes.append(Change(f"{row['family']}/{row['name']}", name, a, b, _direction(a, b, threshold)))
    return sorted(changes, key=lambda change: (-change.factor, change.case, change.side))


def _direction(old: dict[str, float], new: dict[str, float], threshold: float) -> str:
    if new["low"] > old["high"] and new["median"] > old["median"] * (1 + threshold):
        return "slower"
    if new["high"] < old["low"] and new["median"] < old["median"] * (1 - threshold):
        return "faster"
    return "same"


def text(old: Sequence[Row], new: Sequence[Row], changes: Sequence[Change]) -> str:
    """Return the comparison as Markdown."""
    heads = {"old": old[0]["environment"], "new": new[0]["environment"]}
    lines = [f"{name}: {e['commit']}, torch {e['torch']}, {e['device']}, {e['date']}" for name, e in heads.items()]
    for direction in ("slower", "faster"):
        changed = [change for change in changes if change.direction == direction]
        if changed:
            lines += ["", f"| {direction} | side | old ratio | new ratio | factor |", "| --- | --- | --- | --- | --- |"]
            changed = changed if direction == "slower" else changed[::-1]
            lines += [f"| {c.case} | {c.side} | {spread(c.old)} | {spread(c.new)} | {c.factor:.2f} |" for c in changed]
    same = sum(change.direction == "same" for change in changes)
    return "\n".join([*lines, "", f"{len(changes)} compared, {same} the same within their spread"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison; with `--fail`, status 1 if anything got slower."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="least change of a median (default: 0.03)")
    parser.add_argument("--fail", action="store_true", help="exit with 1 if anything got slower")
    options = parser.parse_args(argv)
    try:
        old, new = results.load(options.old), results.load(options.new)
    except (OSError, ValueError) as error:
        print(f"no results to read: {error}", file=sys.stderr)
        return 2
    changes = compare(old, new, options.threshold)
    print(text(old, new, changes))
    return int(options.fail and any(change.direction == "slower" for change in changes))


if __name__ == "__main__":
    sys.exit(main())
