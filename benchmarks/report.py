"""Render a result file as Markdown, a table for each question: `python -m benchmarks.report RESULTS [--page PAGE]`.

`--page` replaces the summary in a page of the documentation, between two comments with the folder's name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.case import AMPKIT, SAME_LIST, TORCH
from benchmarks.results import Row

# By family, in the order of the report.
QUESTIONS = {
    "small": "Steps of small models under a gradient scaler",
    "width": "Steps of a four-block transformer by width, bfloat16, fused AdamW",
    "mlp": "Steps of an MLP of four layers by width, bfloat16, fused AdamW",
    "inference": "Inference in one region, `no_grad`",
    "training": "Training steps",
    "bfloat16 weights": "Steps with bfloat16 weights that lose no updates, and with float32 weights and fused AdamW",
    "compiled": "Regions and compiled code",
    "accumulation": "Gradient accumulation, eight micro-batches",
    "features": "Module rules, custom functions, checkpoints, records",
    "scaler": "Loss scaling",
    "operators": "One operator inside an open region, 8 x 8 tensors",
    "regions": "Making, entering and leaving a region",
    "weights": "Casting weights",
    "host": "Steps, unscaling and clipping without their launches",
    "kernels": "Kernels compared with torch's operators, the GPU's own time",
    "float8": "FP8 casts and linear layers, the GPU's own time",
    "tuning": "Launch parameters, the GPU's own time",
    "debugging": "A training step under debugging tools",
}
# Rows of the summary: the case as a reader calls it, its family, and its name in the results.
SUMMARY = (
    ("training step, transformer, width 32", "width", "d=32, 2 x 16 tokens"),
    ("training step, transformer, width 256", "width", "d=256, 2 x 16 tokens"),
    ("training step, transformer, width 512", "width", "d=512, 2 x 16 tokens"),
    ("inference, transformer, width 32", "inference", "transformer, d=32"),
    ("inference, transformer, width 256", "inference", "transformer, d=256"),
    ("eight micro-batches, width 256", "accumulation", "d=256, 2 blocks, 1 x 8 tokens, bf16 x8"),
    ("clipping and torch's AdamW, 8 x 4M weights", "scaler", "clip + AdamW, 8 x 4M"),
)
SUMMARY_SIDES = (AMPKIT, SAME_LIST, "fp32")
MOST_SIDES = 8  # that a report shows of a case
BEGIN, END = "<!-- figures: {}, written by python -m benchmarks.report -->\n", "<!-- end of figures -->"


def one_line(row: Row) -> str:
    """Return a row for the terminal."""
    label = f"{row['family']}/{row['name']}"
    if "error" in row:
        return f"{label}: {'skipped' if row.get('skipped') else 'FAILED'}: {row['error']}"
    return f"{label}: {', '.join(f'{name} {_times(row, name)}' for name in row['sides'])}"


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


def spread(ratio: dict[str, float]) -> str:
    """Median and quantiles of a ratio."""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def _times(row: Row, name: str) -> str:
    """Return the base's times, or the ratios to them."""
    side = row["sides"][name]
    if row["clock"] == "events":
        return duration(side["wall"]["median"]) if name == row["base"] else spread(side["ratio"])
    if name == row["base"]:
        return f"{duration(side['cpu']['median'])}, {duration(side['wall']['median'])}"
    return f"{spread(side['cpu_ratio'])}, {side['ratio']['median']:.2f}"


def _fact(fact: str, form: Callable[[Any], str] = str) -> Callable[[Row, str], str]:
    def cell(row: Row, name: str) -> str:
        value = row["sides"][name]["facts"].get(fact)
        return "" if value is None else form(value)

    return cell


def _rate(row: Row, name: str) -> str:
    side = row["sides"][name]
    moved = side["facts"].get("bytes_moved")
    return "" if moved is None else f"{moved / side['wall']['median'] / 1e9:.3g}"


def _host(row: Row, name: str) -> str:
    return duration(row["sides"][name]["host"]["median"]) if row["clock"] == "events" else ""


# Further tables of a family, by title; a table is shown if any side has such a fact.
FACTS: dict[str, Callable[[Row, str], str]] = {
    "GB/s": _rate,
    "Host time": _host,
    "Launches": _fact("launches"),
    "Casts": _fact("casts"),
    "Peak memory": _fact("peak_bytes", amount),
    "Copies": _fact("copies"),
    "Loss at the end": _fact("final_loss", "{:.4f}".format),
}


def shown(rows: Iterable[Row]) -> list[Row]:
    """Rows with figures, in the order of `QUESTIONS`; of very many sides the base and the three fastest."""
    figures = [dict(row) for row in results.measured(rows)]
    for row in figures:
        sides = row["sides"]
        if len(sides) > MOST_SIDES:
            fastest = sorted(sides.keys() - {row["base"]}, key=lambda name: sides[name]["wall"]["median"])[:3]
            row["sides"] = {name: sides[name] for name in (row["base"], *fastest)}
    order = list(QUESTIONS)
    return sorted(figures, key=lambda row: order.index(row["family"]))


def table(rows: Sequence[Row], cell: Callable[[Row, str], str]) -> str:
    """Return a line for each case, a column for each side; "" if all cells are empty."""
    sides = list(dict.fromkeys(name for row in rows for name in row["sides"]))
    lines = [[cell(row, name) if name in row["sides"] else "" for name in sides] for row in rows]
    if not any(map(any, lines)):
        return ""
    body = [[row["name"], _machine(row), *cells] for row, cells in zip(rows, lines, strict=True)]
    head = ["case", "on", *sides]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))


def _machine(row: Row) -> str:
    """Return the machine by which rows are compared: a CPU's instruction set, or the name of the GPU."""
    environment = row["environment"]
    return environment["instructions"] if environment["device_type"] == "cpu" else environment["device"]


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the environment and the counts, then a table of times for each question."""
    e = rows[0]["environment"]
    commit = f"{e['commit']}{' with uncommitted changes' if e['dirty'] else ''}"
    triton = f", Triton {e['triton']}" if e["triton"] else ""
    calls = [f"| {job} | {ours} | {theirs} |" for job, (ours, theirs) in e["python_calls"].items()]
    parts = [
        f"{e['device']}, {e['date']}; torch {e['torch']}{triton}, Python {e['python']}, {e['threads']} thread(s) of "
        f"{e['cores']} cores ({e['instructions']}), load {e['load_at_start']} before the start, "
        f"effort {e['effort']:g}; ampkit at {commit}.",
        "The base has its times, processor time first, then wall time; every other side the same two over the base's: "
        "the median over rounds, with 20% and 80% quantiles of the first. On a GPU's own clock there is one.",
        "## Python calls of the code that runs in every step",
        "Functions of ampkit and torch.amp, and all.",
        "\n".join(["| job | ampkit | torch |", "| --- | --- | --- |", *calls]),
    ]
    for family, members in groupby(shown(rows), key=lambda row: row["family"]):
        parts += [f"## {QUESTIONS[family]}", table(list(members), _times)]
    return parts


def summary(rows: Sequence[Row]) -> str:
    """Return the table of a few cases for users: torch.amp's processor time, and ratios of processor time to it."""
    measured = {(row["family"], row["name"]): row["sides"] for row in results.measured(rows)}
    lines = ['| case | torch.amp | ampkit | with `policy="torch"` | float32 |', "| --- | ---: | ---: | ---: | ---: |"]
    for label, family, name in SUMMARY:
        sides = measured[family, name]
        ratios = [f"{sides[side]['cpu_ratio']['median']:.2f}" if side in sides else "" for side in SUMMARY_SIDES]
        lines.append(f"| {' | '.join([label, duration(sides[TORCH]['cpu']['median']), *ratios])} |")
    return "\n".join(lines)


def aims(rows: Sequence[Row]) -> str:
    """Each aim with the measured ratio: of processor time on a CPU."""
    lines = [
        f"| {row['family']}/{row['name']} | {aim['side']} | {aim['base']} | {aim['limit']:.2f} | "
        f"{spread(aim['ratio'])} | {'reached' if aim['ratio']['median'] <= aim['limit'] else '**missed**'} |"
        for row in shown(rows)
        for aim in row["aims"]
    ]
    head = ["## Aims", "", "| case | side | base | at most | found | |", "| --- | --- | --- | --- | --- | --- |"]
    return "\n".join([*head, *lines]) if lines else ""


def markdown(rows: Sequence[Row]) -> str:
    """Return the report: tables of times, aims, tables of other facts, and the cases that were not measured."""
    parts = [
        f"# ampkit and torch.amp\n\nTests first: {rows[0]['environment']['gate']}",
        *tables(rows),
        aims(rows),
    ]
    for family, members in groupby(shown(rows), key=lambda row: row["family"]):
        same = list(members)
        for title, cell in FACTS.items():
            if facts := table(same, cell):
                parts += [f"## {title}: {QUESTIONS[family][0].lower()}{QUESTIONS[family][1:]}", facts]
    failed = [f"- {row['family']}/{row['name']}: {row['error']}" for row in rows if "error" in row]
    parts += ["## Not measured", "\n".join(failed)] if failed else []
    return "\n\n".join(part for part in parts if part) + "\n"


def write(path: Path) -> Path:
    """Write `report.md` next to the results; returns its path."""
    target = path.parent / "report.md"
    target.write_text(markdown(results.load(path)), encoding="utf-8")
    return target


def put_into(page: Path, rows: Sequence[Row], folder: str) -> None:
    """Replace the summary of a folder's results in a page. Raises `ValueError` if it lacks one of the two comments."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN.format(folder))
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no place for figures; expected {BEGIN.format(folder).strip()!r} and {END!r}")
    page.write_text(f"{before}{begin}\n{summary(rows)}\n\n{end}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of a result file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("results", type=Path, help="a results.jsonl")
    parser.add_argument("--page", type=Path, help="a page to put the summary into")
    options = parser.parse_args(argv)
    try:
        print(write(options.results))
        if options.page is not None:
            put_into(options.page, results.load(options.results), options.results.parent.name)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
