"""A picture of a scaler's history: scale, skipped steps, gradient norm. Needs matplotlib, imported when called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot_history(history: Sequence[dict[str, Any]], path: str | Path, *, title: str | None = None) -> Path:
    """Draw `GradScaler.history` into a file; the suffix says the format.

    The scale on a log-2 axis with a mark at every overflow, and below it the gradient norm where steps were clipped.

    Args:
        history: rows of `GradScaler.history`.
        path: the file to write.
        title: a line above the picture.

    Raises:
        ImportError: matplotlib is missing; says how to install it.
        ValueError: no rows.
    """
    if not history:
        raise ValueError("the history is empty; expected rows of GradScaler.history after at least one update()")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot_history needs matplotlib: pip install matplotlib") from error

    updates = [row["update"] for row in history]
    overflows = [row for row in history if row["overflow"]]
    norms = [(row["update"], row["grad_norm"]) for row in history if _is_drawable(row["grad_norm"])]
    figure = Figure(figsize=(9, 5 if norms else 3), layout="constrained")
    axes = figure.subplots(2 if norms else 1, 1, sharex=True, squeeze=False)[:, 0]
    axes[0].step(updates, [row["scale"] for row in history], where="post", color="tab:blue", label="loss scale")
    axes[0].plot(
        [row["update"] for row in overflows],
        [row["scale"] for row in overflows],
        "x",
        color="tab:red",
        label=f"overflow ({len(overflows)})",
    )
    axes[0].set_yscale("log", base=2)
    axes[0].set_ylabel("scale")
    axes[0].legend(loc="best")
    if norms:
        axes[1].plot(*zip(*norms, strict=True), color="tab:green", linewidth=1)
        axes[1].set_yscale("log")
        axes[1].set_ylabel("gradient norm")
    axes[-1].set_xlabel("update")
    if title:
        figure.suptitle(title)
    path = Path(path)
    figure.savefig(path)
    return path


def _is_drawable(norm: float | None) -> bool:
    return norm is not None and math.isfinite(norm) and norm > 0
