"""A plot of a result file: ratios with error bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.case import AMPKIT, KEPT, OWN_OPTIMIZER, SAME_LIST, TORCH, TORCH_OPERATORS
from benchmarks.results import Row

matplotlib.use("Agg")

COLOURS = {
    TORCH: "#4c566a", AMPKIT: "#d08770", SAME_LIST: "#bf4b4b", KEPT: "#5e9c76",
    OWN_OPTIMIZER: "#7b5ea7", "fp32": "#8fb4d9", "no region": "#8fb4d9", "bare dispatch mode": "#b0b0b0",
    TORCH_OPERATORS: "#4c566a",
}
STEPS = ("accumulation", "width", "training", "scaler", "kernels")
BASES = (TORCH, TORCH_OPERATORS)


def draw(rows: Sequence[Row], folder: Path) -> list[str]:
    """Write the plot if the rows have data for it; returns the file names."""
    figure = ratios(rows)
    if figure is None:
        return []
    figure.savefig(folder / "ratios.png", dpi=110)
    return ["ratios.png"]


def ratios(rows: Sequence[Row]) -> Figure | None:
    """One line per case and side: the ratio to torch.amp, its 20-80 % quantiles, and the aims as ticks."""
    points = [
        (f"{row['family']}: {row['name']}", name, side["ratio"], row)
        for row in rows if row["family"] in STEPS and row["base"] in BASES
        for name, side in row["sides"].items() if name.startswith("ampkit")
    ]
    if not points:
        return None
    figure = Figure(figsize=(9, 1.2 + 0.2 * len(points)), layout="constrained")
    axes = figure.add_subplot()
    shown: set[str] = set()
    for place, (_, side, ratio, row) in enumerate(points):
        errors = [[ratio["median"] - ratio["low"]], [ratio["high"] - ratio["median"]]]
        label = None if side in shown else side
        shown.add(side)
        axes.errorbar(ratio["median"], place, xerr=errors, fmt="o", ms=4, capsize=2, color=_colour(side), label=label)
        for aim in row["aims"]:
            if aim["side"] == side and aim["base"] == row["base"]:
                axes.plot([aim["limit"]], [place], marker="|", ms=9, color="black")
    axes.axvline(1.0, color=_colour(TORCH), lw=1)
    axes.set_xscale("log")
    axes.set_yticks(range(len(points)), _labels([point[0] for point in points]), fontsize=7)
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.set_xlabel("time over torch.amp's, median and 20-80 %; | is an aim")
    _ticks(axes)
    axes.legend(fontsize=7)
    return figure


def _labels(names: list[str]) -> list[str]:
    """A name only where it is new."""
    return [name if n == 0 or names[n - 1] != name else "" for n, name in enumerate(names)]


def _ticks(axes: Any) -> None:
    """Ratios as plain numbers on a logarithmic axis."""
    low, high = axes.get_xlim()
    marks = [mark for mark in (0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 10) if low <= mark <= high]
    axes.set_xticks(marks, [str(mark) for mark in marks])
    axes.minorticks_off()
    axes.grid(axis="x", alpha=0.3)


def _colour(side: str) -> str:
    return COLOURS.get(side, "#333333")
