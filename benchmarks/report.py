"""A result file as Markdown and plots: `python -m benchmarks.report RESULTS [--out FOLDER]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.results import Row

TITLES = {
    "operators": "One operator inside an open region",
    "regions": "Opening and closing a region",
    "weights": "Casting weights",
    "host": "Steps, unscaling and clipping without their launches",
    "scaler": "Loss scaling",
    "kernels": "Kernels beside torch's operators, the GPU's own time",
    "float8": "FP8 casts and linear layers, the GPU's own time",
    "tuning": "Launch parameters, the GPU's own time",
    "accumulation": "Gradient accumulation, eight micro-batches",
    "width": "A four-block transformer at growing width",
    "training": "Training steps",
    "debugging": "A training step under debugging tools",
}
MOST_SIDES = 8  # that a report shows of a case


def one_line(row: Row) -> str:
    """A row for the terminal."""
    label = f"{row['family']}/{row['name']}"
    if "error" in row:
        return f"{label}: {'skipped' if row.get('skipped') else 'FAILED'}: {row['error']}"
    parts = [
        f"{name} {duration(side['wall']['median'])} ({side['ratio']['median']:.2f})"
        for name, side in row["sides"].items()
    ]
    return f"{label}: {', '.join(parts)}"


def duration(seconds: float) -> str:
    """Seconds in a readable unit."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def amount(n_bytes: float) -> str:
    """Bytes in a readable unit."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n_bytes >= 2**power:
            return f"{n_bytes / 2**power:.3g} {unit}"
    return f"{n_bytes:.0f} B"


def under_roof(row: Row, seconds: float) -> float | None:
    """Fraction of the machine's roof that a time reaches: the least possible time over the time it took.

    The least possible is the larger of bytes over the memory rate and FLOPs over the better of the measured matrix
    rates, all taken in the same run. None for a case without a work model.
    """
    work, roof = row["work"], row["environment"]["ceilings"]
    if work is None or seconds <= 0:
        return None
    rate = max(roof["float32_gflop_per_s"], roof["bfloat16_gflop_per_s"])
    return max(work["bytes"] / roof["memory_gb_per_s"], work["flops"] / rate) / 1e9 / seconds


def markdown(rows: Sequence[Row], plots: Iterable[str] = ()) -> str:
    """The report. Plots are linked by file name."""
    good = results.measured(rows)
    parts = [_head(rows[0]["environment"]), _aims(good)]
    parts += [f"![{name}]({name})" for name in plots]
    for family, members in groupby(good, key=lambda row: row["family"]):
        parts.append(_family(family, list(members)))
    failed = [row for row in rows if "error" in row]
    if failed:
        lines = [f"- {row['family']}/{row['name']}: {row['error']}" for row in failed]
        parts.append("## Not measured\n\n" + "\n".join(lines))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(facts: dict[str, Any]) -> str:
    roof = facts["ceilings"]
    commit = f"{facts['commit']}{' with uncommitted changes' if facts['dirty'] else ''}"
    triton = f", Triton {facts['triton']}" if facts["triton"] else ""
    return f"""# ampkit beside torch.amp: {facts['device']}, {facts['date']}

torch {facts['torch']}{triton}, Python {facts['python']}, {facts['threads']} thread(s) of {facts['cores']} cores
({facts['instructions']}), load {facts['load_at_start']} before the start; ampkit at {commit}.
Tests passed first: {facts['gate']}.
Measured in the same run: memory {roof['memory_gb_per_s']:.3g} GB/s, matrix products {roof['float32_gflop_per_s']:.4g}
GFLOP/s in float32 and {roof['bfloat16_gflop_per_s']:.4g} in bfloat16.

The sides of a case take turns; a ratio is the median over rounds of a side's time over that of the base in the same
round, with 20 % and 80 % quantiles. Below 1 the side is faster. *CPU ratio* is the same in processor time, which other
programs disturb less. *Roof*: the least time that the work model allows on this machine, over the time taken; above
100 % the data stayed in a cache, or the roof was measured a little low."""


def _aims(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        for aim in row["aims"]:
            found = aim["ratio"]
            verdict = "reached" if found["median"] <= aim["limit"] else "**missed**"
            lines.append(
                f"| {row['family']}/{row['name']} | {aim['side']} | {aim['base']} | {aim['limit']:.2f} | "
                f"{spread(found)} | {verdict} |"
            )
    if not lines:
        return ""
    return "\n".join([
        "## Aims", "", "| case | side | beside | at most | found | |", "| --- | --- | --- | --- | --- | --- |", *lines,
    ])


def spread(found: dict[str, float]) -> str:
    """Median and quantiles of a ratio."""
    return f"{found['median']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def _family(family: str, rows: list[Row]) -> str:
    counted = _columns(rows)
    head = ["case", "side", "time", "ratio (20-80 %)", "CPU ratio", *(title for title, _ in counted)]
    lines = [f"## {TITLES.get(family, family)}", "", _cells(head), _cells(["---"] * len(head))]
    for row in rows:
        for number, (name, side) in enumerate(_shown(row)):
            label = row["name"] if number == 0 else ""
            cells = [label, name, duration(side["wall"]["median"]), spread(side["ratio"])]
            # Rows of sides in other processes, which there were once, have no processor time.
            cells.append(f"{side['cpu_ratio']['median']:.2f}" if side["cpu_ratio"] else "")
            lines.append(_cells([*cells, *(show(row, side) for _, show in counted)]))
    return "\n".join(lines)


def _shown(row: Row) -> list[tuple[str, dict[str, Any]]]:
    """All sides of a case; of very many the base and the three fastest."""
    sides = list(row["sides"].items())
    if len(sides) <= MOST_SIDES:
        return sides
    others = sorted(row["sides"].keys() - {row["base"]}, key=lambda name: row["sides"][name]["wall"]["median"])
    return [item for item in sides if item[0] in (row["base"], *others[:3])]


def _columns(rows: list[Row]) -> list[tuple[str, Any]]:
    """The columns of a family besides times: (title, text of a side)."""
    facts = {name for row in rows for side in row["sides"].values() for name in side["facts"]}

    def fact(name: str, form: Any = str) -> Any:
        return lambda row, side: form(side["facts"][name]) if side["facts"].get(name) is not None else ""

    columns = [
        ("casts", "casts", fact("casts")),
        ("samples_per_step", "samples/s", _samples_per_second),
        ("bytes_moved", "GB/s", _rate),
        ("peak_bytes", "peak memory", fact("peak_bytes", amount)),
        ("copies", "copies", fact("copies")),
        ("launches", "launches", fact("launches")),
        ("launches", "host time", lambda row, side: duration(side["host"]["median"])),
        ("final_loss", "loss", fact("final_loss", lambda value: f"{value:.4f}")),
    ]
    found = [(title, show) for name, title, show in columns if name in facts]
    if not any(side["facts"].get("launches") for row in rows for side in row["sides"].values()):
        found = [(title, show) for title, show in found if title not in ("launches", "host time")]
    if any(row["work"] for row in rows):
        found.append(("roof", _roof))
    return found


def _samples_per_second(row: Row, side: dict[str, Any]) -> str:
    return f"{side['facts']['samples_per_step'] / side['wall']['median']:.4g}"


def _rate(row: Row, side: dict[str, Any]) -> str:
    moved = side["facts"].get("bytes_moved")
    return "" if moved is None else f"{moved / side['wall']['median'] / 1e9:.3g}"


def _roof(row: Row, side: dict[str, Any]) -> str:
    fraction = under_roof(row, side["wall"]["median"])
    return "" if fraction is None else f"{fraction:.0%}"


def _cells(texts: Iterable[str]) -> str:
    return "| " + " | ".join(texts) + " |"


def checks(folder: Path) -> str:
    """The results of the checks that were saved beside the figures."""
    lines = []
    for path in sorted(folder.glob("*checks.json")):
        found: dict[str, str | None] = json.loads(path.read_text(encoding="utf-8"))
        failed = [f"- {name}: {text}" for name, text in found.items() if text]
        lines += ["", f"## {path.stem}: {len(found) - len(failed)} of {len(found)} passed", "", *failed]
    return "\n".join([*lines, ""]) if lines else ""


def write(path: Path, folder: Path) -> Path:
    """Write `report.md` and, where matplotlib is installed, its plots; returns the path of the report."""
    rows = results.load(path)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        from benchmarks import plots
    except ImportError:
        names: list[str] = []
    else:
        names = plots.draw(results.measured(rows), folder)
    target = folder / "report.md"
    target.write_text(markdown(rows, names) + checks(path.parent), encoding="utf-8")
    return target


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of a result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path, help="a results.jsonl")
    parser.add_argument("--out", type=Path, help="folder of the report (default: beside the results)")
    options = parser.parse_args(argv)
    try:
        print(write(options.results, options.out or options.results.parent))
    except (OSError, ValueError) as error:
        print(f"no results to read: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
