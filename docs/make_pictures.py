"""Run the code of index.md, write its output into the page, draw its pictures. Run: python docs/make_pictures.py

The pictures are SVG files with text as text, on no background and in colors that are legible on white and on dark gray.
It needs matplotlib and scikit-learn, and takes some seconds.
"""

import contextlib
import io
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("index.md")
ASSETS = PAGE.parent / "assets"
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n^```text\n(?P<prints>.*?)^```\n)?", re.MULTILINE | re.DOTALL)
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


def run(text: str) -> tuple[dict[str, Any], str]:
    """Run the page's Python blocks in one namespace; return it, and the page with what each block printed below it."""
    namespace: dict[str, Any] = {"__name__": "train"}

    def with_output(found: re.Match[str]) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(found["code"], "train.py", "exec"), namespace)
        below = f"\n```text\n{printed.getvalue()}```\n" if printed.getvalue() else ""
        return f"```python\n{found['code']}```\n{below}"

    return namespace, BLOCK.sub(with_output, text)


def same(axes: Any, found: dict[str, Any]) -> None:
    """The losses of torch.amp and ampkit, and that their bits are equal."""
    (theirs, *their_rest), (ours, *our_rest) = found["theirs"], found["ours"]
    axes.plot(theirs, color=BLUE, linewidth=5, alpha=0.6, label="torch.amp")
    axes.plot(ours, color=ORANGE, linewidth=1.6, linestyle=(0, (4, 2)), label="ampkit")
    equal = ours == theirs and our_rest == their_rest
    axes.set(xlabel="step", ylabel="training loss", yscale="log")
    axes.set_title(f"{len(ours)} losses, all weights, the loss scale: {'equal to the bit' if equal else 'different'}")
    axes.legend()


def nonfinite(axes: Any, found: dict[str, Any]) -> None:
    """The loss until it is inf, what the report says, and the run with the proposed change."""
    losses, report = found["losses"], found["report"]
    broken = 81
    finding = report.findings[0]
    axes.plot([loss / 1e3 for loss in losses[:broken]], color=BLUE, linewidth=2, label="float16")
    axes.plot(range(broken, len(losses)), [loss / 1e3 for loss in losses[broken:]], color=GREEN, linewidth=2)
    axes.plot([], [], color=GREEN, linewidth=2, label="module 2 in float32")
    last = losses[broken - 1] / 1e3
    axes.plot([broken], [last], marker="x", markersize=10, markeredgewidth=2.5, color=ORANGE, linestyle="none")
    place = f"{finding.what} in step {broken}\n{finding.place.op}, module {finding.place.module}"
    axes.annotate(place, (broken + 3, last), (broken + 10, last + 20), color=ORANGE)
    axes.set(xlabel="step", ylabel="mean error, thousand dollars", ylim=(0, None))
    axes.legend(loc="lower left")


def skip(axes: Any, found: dict[str, Any]) -> None:
    """Losses on the left, loss scales on the right, with `skip_above` and without."""
    left, right = axes
    runs = (("without skip_above", found["plain"], BLUE), ("skip_above=TimesMedian(30.0)", found["guarded"], ORANGE))
    for label, (losses, scales), color in runs:
        left.plot(losses, color=color, linewidth=1.6, label=label)
        right.step(range(len(scales)), scales, color=color, linewidth=2.2, where="post")
    left.set(xlabel="step", ylabel="training loss", yscale="log")
    right.set(xlabel="step", ylabel="loss scale")
    right.set_yscale("log", base=2)
    left.figure.legend(loc="outside upper center", ncols=2)


def bfloat16(axes: Any, found: dict[str, Any]) -> None:
    """Losses by kind of weight, means of 20 steps."""
    looks = ((GRAY, 6.0, "-"), (BLUE, 2.0, "-"), (GREEN, 2.6, "-"), (ORANGE, 1.6, (0, (4, 2))))
    for (label, losses), (color, width, line) in zip(found["learned"].items(), looks, strict=True):
        means = [statistics.fmean(losses[i : i + 20]) for i in range(0, len(losses), 20)]
        steps = [i + 10 for i in range(0, len(losses), 20)]
        axes.plot(steps, means, color=color, linewidth=width, linestyle=line, label=label)
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend(loc="lower left")


def size(axes: Any, found: dict[str, Any]) -> None:
    """Bars of megabytes kept for backward and of bytes per weight."""
    left, right = axes
    for panel, name, label, form in (
        (left, "megabytes", "MB kept for backward", "%.2f"),
        (right, "bytes_kept", "bytes per weight, with AdamW", "%g"),
    ):
        names, values = zip(*reversed(found[name].items()), strict=True)
        bars = panel.barh(names, values, color=[*[ORANGE] * (len(names) - 1), GRAY], height=0.6)
        panel.bar_label(bars, fmt=form, padding=4, color=TEXT)
        panel.margins(x=0.14)
        panel.set(xlabel=label)


PICTURES: dict[str, tuple[Callable[[Any, dict[str, Any]], None], int]] = {  # what draws it, and its number of panels
    "why_same": (same, 1),
    "why_nonfinite": (nonfinite, 1),
    "why_skip": (skip, 2),
    "why_bfloat16": (bfloat16, 1),
    "why_bytes": (size, 2),
}


def draw(found: dict[str, Any], folder: Path) -> None:
    """Write the pictures into a folder, from what the page's code computed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        for name, (picture, panels) in PICTURES.items():
            figure, axes = pyplot.subplots(1, panels, figsize=(8, 2.8))
            picture(axes, found)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)


if __name__ == "__main__":
    sys.path.insert(0, str(PAGE.parents[1]))
    computed, page = run(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")
    draw(computed, ASSETS)
