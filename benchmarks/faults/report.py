"""Tables of scores: the figures of one or more tools side by side, then every case."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIGURES = {
    "place": "right place",
    "place_as_fault": "right place, graded as a fault, not only as worth knowing",
    "among_three": "right place among the first three findings",
    "cause_and_cure": "right cause and cure",
    "missed": "no finding",
    "confidently_wrong": "confidently wrong",
    "false_alarms": "false alarms, healthy programs",
    "healthy_with_notes": "healthy programs with anything worth knowing",
    "false_alarms_of_harmless": "false alarms, programs with a fault that has no symptom",
    "failed": "no report",
}


def report(paths: Sequence[Path]) -> str:
    """Return the tables as Markdown.

    Args:
        paths: Files of scores, which `score --out` wrote.
    """
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    labels = [run["label"] for run in runs]
    lines = [_row("", *labels), _row("---", *["---:"] * len(runs))]
    lines.append(_row("faults", *[run["summary"]["faults"] for run in runs]))
    lines += [_row(name, *[_value(key, run["summary"]) for run in runs]) for key, name in FIGURES.items()]
    for family in sorted({family for run in runs for family in run["summary"]["families"]}):
        for key in ("place", "cause and cure"):
            lines.append(_row(f"{family}: {key}", *[_of_family(run, family, key) for run in runs]))
    lines += ["", _row("case", "kind of fault", *labels), _row(*["---"] * (len(runs) + 2))]
    found = [{score["id"]: score for score in run["scores"]} for run in runs]
    for name in dict.fromkeys(name for scores in found for name in scores):
        lines.append(
            _row(name, next(s[name]["family"] for s in found if name in s), *[_said(s.get(name)) for s in found])
        )
    return "\n".join(lines) + "\n"


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _value(key: str, figures: dict[str, Any]) -> str:
    value = figures[key]
    of = {"false_alarms": "healthy", "healthy_with_notes": "healthy", "false_alarms_of_harmless": "harmless"}.get(key)
    return f"{value:.0%}" if isinstance(value, float) else f"{value} of {figures[of]}" if of else str(value)


def _of_family(run: dict[str, Any], family: str, key: str) -> str:
    figures = run["summary"]["families"].get(family)
    return f"{figures[key]:.0%} of {figures['faults']}" if figures else ""


def _said(score: dict[str, Any] | None) -> str:
    if score is None:
        return ""
    if score["family"] in {"healthy", "harmless"}:
        return "false alarm" if score.get("alarm") else "silent" if not score.get("place") else "names the line"
    said = [name for name in ("place", "cause", "cure", "confident") if score.get(name)]
    return score.get("failed") or ", ".join(said).replace("confident", "confidently wrong") or "missed"
