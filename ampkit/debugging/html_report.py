"""One HTML file for what text cannot show: error and headroom along the depth of a model, a run over its steps.

No script, nothing fetched; light or dark as the reader's system is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from ampkit.debugging.report_file import text_of

__all__ = ["page"]

_LIMITS = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38}
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { overflow-x: auto; padding: 0.75rem; border: 1px solid #8886; border-radius: 6px; }
svg { width: 100%; height: 12rem; border-bottom: 1px solid #8888; overflow: visible; }
polyline { fill: none; stroke: #2a78c2; stroke-width: 2; vector-effect: non-scaling-stroke; }
circle { fill: #2a78c2; }
figure { margin: 1.5rem 0; }
.ends { display: flex; justify-content: space-between; font-size: 0.85rem; overflow-wrap: anywhere; gap: 2rem; }
"""


def page(reports: Sequence[tuple[str, list[dict[str, Any]]]]) -> str:
    """A page with a section for each report, given with the names of their files."""
    sections = "\n".join(
        f"<section><h2>{escape(name)}</h2>\n<pre>{escape(text_of(report))}</pre>\n{_figures(report)}</section>"
        for name, report in reports
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>ampkit debug report</title>\n<style>{_STYLE}</style></head>\n"
        f"<body><h1>ampkit debug report</h1>\n{sections}\n</body>\n</html>\n"
    )


def _figures(report: list[dict[str, Any]]) -> str:
    kind = report[0]["kind"].rpartition(".")[2]
    if kind == "precision":
        return _by_depth(report[0]["operators"])
    return _over_steps(report) if kind == "monitor" else ""


def _by_depth(operators: list[dict[str, Any]]) -> str:
    """Error and headroom of what each module computes, in the order in which modules first run."""
    modules = list(dict.fromkeys(one["module"] for one in operators if one["phase"] == "forward"))
    found = []
    for phase in ("forward", "backward"):
        of_module = {name: [one for one in operators if (one["module"], one["phase"]) == (name, phase)]
                     for name in modules}
        errors = [(name or "(none)", math.log10(worst)) for name, some in of_module.items()
                  if 0 < (worst := max((float(one["total"]) for one in some), default=0.0)) < math.inf]
        found.append(_figure(f"error against the reference in {phase}, as a power of ten", errors))
        headroom = [
            (name or "(none)", min(math.log2(_LIMITS[one["dtype"]] / float(one["largest"])) for one in used))
            for name, some in of_module.items()
            if (used := [one for one in some if one["dtype"] in _LIMITS and float(one["largest"]) > 0])
        ]
        found.append(_figure(f"headroom in {phase}: powers of two between the largest value and the end of the range",
                             headroom))
    return "\n".join(found)


def _over_steps(samples: list[dict[str, Any]]) -> str:
    """What a monitor saw: the module that is nearest to the end of its range, the scale, lost updates."""
    def worst(sample: dict[str, Any], kind: str) -> float:
        return min((float(one["headroom"]) for one in sample[kind].values()), default=math.inf)

    def steps(values: list[float]) -> list[tuple[str, float]]:
        return [(f"step {one['step']}", value) for one, value in zip(samples, values, strict=True)
                if math.isfinite(value)]

    lost = [max(map(float, one["lost_updates"].values()), default=math.nan) for one in samples]
    scale = [math.log2(one["scale"]) if isinstance(one["scale"], int | float) else math.nan for one in samples]
    return "\n".join([
        _figure("headroom of outputs, in powers of two", steps([worst(one, "outputs") for one in samples])),
        _figure("headroom of gradients, in powers of two", steps([worst(one, "gradients") for one in samples])),
        _figure("loss scale, as a power of two", steps(scale)),
        _figure("share of updates that round to nothing, of the worst parameter", steps(lost)),
    ])


def _figure(caption: str, points: Sequence[tuple[str, float]]) -> str:
    """Values one after the other, each with its name; "" for fewer than two."""
    if len(points) < 2:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    places = [
        (1000 * place / (len(points) - 1), 200 - 190 * (value - low) / ((high - low) or 1.0))
        for place, (_, value) in enumerate(points)
    ]
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(name)}: {value:.3g}</title></circle>'
        for (x, y), (name, value) in zip(places, points, strict=True)
    )
    return (
        f"<figure><figcaption>{escape(caption)}: {low:.3g} to {high:.3g}</figcaption>\n"
        f'<svg viewBox="0 0 1000 200" preserveAspectRatio="none" role="img" aria-label="{escape(caption)}">'
        f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>{dots}</svg>\n'
        f'<div class="ends"><span>{escape(points[0][0])}</span><span>{escape(points[-1][0])}</span></div></figure>'
    )
