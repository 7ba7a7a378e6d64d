"""Draw the pictures of the pages, from examples and from stored results. Run: python docs/make_pictures.py

The pictures are SVG files with text as text, on no background and in colors that are legible on white and on dark gray.
It needs matplotlib and scikit-learn, and takes some seconds.
"""

import runpy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
RESULTS = ROOT / "benchmarks" / "results" / "2026-11-23-cpu-avx512-bf16" / "results.jsonl"
TEXT, GRAY, BLUE, ORANGE, GREEN = "#808080", "#9aa0a8", "#3b82c4", "#e07b2a", "#2f9e6e"
STYLE = {
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "font.family": "sans-serif",
    "font.size": 11,
    "legend.frameon": False,
    "legend.labelcolor": TEXT,
    "savefig.transparent": True,
    "svg.fonttype": "none",  # the reader's font
    "svg.hashsalt": "ampkit",  # the same file from the same numbers
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


def example(name: str) -> Any:
    """Return the result of an example's `main`."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]()


def costs() -> dict[str, list[tuple[int, float, float, float]]]:
    """Return width, median and quantiles of ampkit's time divided by torch.amp's, for training and inference."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import results

    found: dict[str, list[tuple[int, float, float, float]]] = {"training step": [], "inference, no_grad": []}
    for row in results.measured(results.load(RESULTS)):
        line = {"width": "training step", "inference": "inference, no_grad"}.get(row["family"])
        if line is not None and not row["name"].startswith("MLP"):
            ratio = row["sides"]["ampkit"]["cpu_ratio"]
            width = int(row["name"].partition("d=")[2].partition(",")[0])
            found[line].append((width, ratio["median"], ratio["low"], ratio["high"]))
    return found


def cost_by_width(axes: Any, found: dict[str, list[tuple[int, float, float, float]]]) -> None:
    """Draw ratios to torch.amp by model width, with their quantiles."""
    for (name, points), color in zip(found.items(), (BLUE, ORANGE), strict=True):
        widths, medians, lows, highs = zip(*sorted(points), strict=True)
        below = [median - low for median, low in zip(medians, lows, strict=True)]
        above = [high - median for median, high in zip(medians, highs, strict=True)]
        axes.errorbar(widths, medians, (below, above), color=color, marker="o", linewidth=2, capsize=4, label=name)
    axes.axhline(1.0, color=GRAY, linewidth=1.5)
    axes.text(512, 0.99, "torch.amp", va="top", ha="right", color=TEXT)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="model width", ylabel="time / time of torch.amp", ylim=(0.9, 1.5))
    axes.set_xticks([32, 64, 128, 256, 512], ["32", "64", "128", "256", "512"])
    axes.legend()


def same(axes: Any, found: Any) -> None:
    """Draw the losses of torch.amp and ampkit, and state whether all bits are equal."""
    (theirs, *their_rest), (ours, *our_rest) = found
    axes.plot(theirs, color=BLUE, linewidth=5, alpha=0.6, label="torch.amp")
    axes.plot(ours, color=ORANGE, linewidth=1.6, linestyle=(0, (4, 2)), label="ampkit")
    equal = ours == theirs and our_rest == their_rest
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    axes.set_title(f"{len(ours)} losses, all weights, the loss scale: {'equal to the bit' if equal else 'different'}")
    axes.legend()


def skip(axes: Any, found: Any) -> None:
    """Draw losses on the left and loss scales on the right, with `skip_above` and without."""
    left, right = axes
    names = ("without skip_above", "skip_above=TimesMedian(30.0)")
    for name, (losses, scales), color in zip(names, found, (BLUE, ORANGE), strict=True):
        left.plot(losses, color=color, linewidth=1.6, label=name)
        right.step(range(len(scales)), scales, color=color, linewidth=2.2, where="post")
    left.set(xlabel="step", ylabel="training loss", yscale="log")
    right.set(xlabel="step", ylabel="loss scale")
    right.set_yscale("log", base=2)
    left.figure.legend(loc="outside upper center", ncols=2)


def bfloat16(axes: Any, found: Any) -> None:
    """Draw losses by kind of weight, means of 20 steps."""
    lines = ((GRAY, 6.0, "-"), (BLUE, 2.0, "-"), (GREEN, 2.6, "-"), (ORANGE, 1.6, (0, (4, 2))))
    for (label, losses), (color, width, line) in zip(found.items(), lines, strict=True):
        means = [statistics.fmean(losses[i : i + 20]) for i in range(0, len(losses), 20)]
        steps = [i + 10 for i in range(0, len(losses), 20)]
        axes.plot(steps, means, color=color, linewidth=width, linestyle=line, label=label)
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend(loc="lower left")


def size(axes: Any, found: Any) -> None:
    """Draw bars of megabytes saved for backward and of bytes per weight."""
    labels = (("MB saved for backward", "%.2f"), ("bytes per weight, with AdamW", "%g"))
    for panel, values, (label, form) in zip(axes, found, labels, strict=True):
        names, heights = zip(*reversed(values.items()), strict=True)
        bars = panel.barh(names, heights, color=[*[ORANGE] * (len(names) - 1), GRAY], height=0.6)
        panel.bar_label(bars, fmt=form, padding=4, color=TEXT)
        panel.margins(x=0.14)
        panel.set(xlabel=label)


# By file name: the function that draws it and its number of panels. `why_*` are drawn from the example of that name.
PICTURES: dict[str, tuple[Callable[[Any, Any], None], int]] = {
    "why_same": (same, 1),
    "why_skip": (skip, 2),
    "why_bfloat16": (bfloat16, 1),
    "why_bytes": (size, 2),
    "cost_by_width": (cost_by_width, 1),
}


def draw(found: dict[str, Any], folder: Path) -> None:
    """Write the pictures into a folder, from their numbers by name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        for name, (picture, panels) in PICTURES.items():
            figure, axes = pyplot.subplots(1, panels, figsize=(8, 2.8))
            picture(axes, found[name])
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)


def numbers() -> dict[str, Any]:
    """Return the numbers of each picture."""
    return {name: example(name) if name.startswith("why_") else costs() for name in PICTURES}


if __name__ == "__main__":
    draw(numbers(), ASSETS)
