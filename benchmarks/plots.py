"""Plots of a result file: ratios with error bars, and cost against size."""

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
    """Write every plot that the rows have data for; returns the file names."""
    written = []
    for name, make in (("ratios.png", ratios), ("sizes.png", sizes)):
        figure = make(rows)
        if figure is not None:
            figure.savefig(folder / name, dpi=110)
            written.append(name)
    return written


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


def sizes(rows: Sequence[Row]) -> Figure | None:
    """Per series of growing size: time of each side, and its ratio to the base below."""
    series: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["size"] is not None:
            series.setdefault((row["family"], row["size_name"]), []).append(row)
    series = {name: sorted(members, key=lambda row: row["size"]) for name, members in series.items() if members[1:]}
    if not series:
        return None
    figure = Figure(figsize=(3.4 * len(series), 5.5), layout="constrained")
    grid = figure.subplots(2, len(series), squeeze=False, sharex="col")
    for column, ((family, size_name), members) in enumerate(series.items()):
        times, ratio_axes = grid[0][column], grid[1][column]
        x = [row["size"] for row in members]
        for side in members[0]["sides"]:
            found = [row["sides"][side] for row in members]
            times.plot(x, [one["wall"]["median"] * 1e3 for one in found], "o-", ms=3, color=_colour(side), label=side)
            ratio = [one["ratio"] for one in found]
            ratio_axes.plot(x, [one["median"] for one in ratio], "o-", ms=3, color=_colour(side))
            ratio_axes.fill_between(
                x, [one["low"] for one in ratio], [one["high"] for one in ratio], color=_colour(side), alpha=0.2
            )
        times.set(title=family, xscale="log", yscale="log", ylabel="ms")
        ratio_axes.set(xlabel=size_name, xscale="log", ylabel=f"ratio to {members[0]['base']}")
        ratio_axes.axhline(1.0, color=_colour(TORCH), lw=1)
        if x[-1] < 100 * x[0]:      # less than two decades: a logarithmic axis has too few round ticks
            ratio_axes.set_xticks(x, [f"{value:g}" for value in x])
            ratio_axes.minorticks_off()
        times.legend(fontsize=6)
    return figure


def _colour(side: str) -> str:
    return COLOURS.get(side, "#333333")
