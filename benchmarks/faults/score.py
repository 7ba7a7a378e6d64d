"""Scores reports of `ampkit debug` on cases: right place, cause and fix; no alarm on a healthy program.

The score needs no opinion: the edit of each fault is stored, so its lines and its reverse are known.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.faults.inject import HELPER, HERE, Case
from benchmarks.faults.run import runs

Finding = Mapping[str, Any]  # of the JSON of `ampkit debug`

HEALTHY, HARMLESS = "healthy", "harmless"
_FLOAT32 = r"float32|\.float\(\)|float64|double|wider|higher precision|full precision|dtype"
_NOT_FLOAT32 = r"(?s)\A(?!.*(float32|\.float\(\)|float64))."
_DEFAULT_FIXES = {"precision": _FLOAT32, "arithmetic": _NOT_FLOAT32}
_CASTS = "_to_copy to half bfloat16"
_FROM_THE_DATA = r"arriv|from the (data|loader)|in the batch|the batch"


@dataclass(frozen=True)
class Kind:
    """The truth about a kind of fault. `kinds.toml` describes the fields."""

    family: str
    operators: frozenset[str]
    cause: str
    fix: str


@cache
def kinds() -> dict[str, Kind]:
    """Return all kinds of faults by name."""
    table = tomllib.loads((HERE / "kinds.toml").read_text(encoding="utf-8"))
    return {name: _kind(**fields) for name, fields in table.items()}


def _kind(family: str, operators: str = "", cause: str = "", fix: str = "") -> Kind:
    names = frozenset(map(_base, operators.replace("cast", _CASTS).split()))
    return Kind(family, names, cause, fix.replace("{float32}", _FLOAT32) or _DEFAULT_FIXES[family])


@dataclass(frozen=True)
class Score:
    """The score of one report.

    Args:
        family: The family of the fault; "healthy", or "harmless" for a fault without a symptom.
        findings: The number of findings, notes included.
        place: Whether the first finding names a line of the fault.
        graded: Whether that finding is an error or a precision loss, not a note.
        cause: Whether that finding also names the cause.
        fix: Whether that finding also proposes the reverse of the fault.
        among_three: Whether one of the first three findings names a line of the fault.
        confidently_wrong: Whether the first finding has a verified fix and a wrong place.
        alarm: Whether a program without a symptom has an error or a precision loss that is not a line of its fault.
        seconds: Processor time.
        failed: Why there is no report; "" if there is one.
    """

    family: str
    findings: int = 0
    place: bool = False
    graded: bool = False
    cause: bool = False
    fix: bool = False
    among_three: bool = False
    confidently_wrong: bool = False
    alarm: bool = False
    seconds: float = 0.0
    failed: str = ""

    def __str__(self) -> str:
        if self.failed or self.family in (HEALTHY, HARMLESS):
            return self.failed or ("false alarm" if self.alarm else "names the line" if self.place else "silent")
        if self.confidently_wrong:
            return "confidently wrong"
        return ", ".join(name for name in ("place", "cause", "fix") if getattr(self, name)) or "missed"


def grade(case: Case, findings: Sequence[Finding], seconds: float = 0.0, failed: str = "") -> Score:
    """Score the ranked findings of a report."""
    family = HEALTHY if not case.kind else kinds()[case.kind].family if case.symptoms else HARMLESS
    there = [_is_there(case, finding) for finding in findings] if case.kind else [False] * len(findings)
    alarms = [is_there for is_there, finding in zip(there, findings, strict=True) if finding["grade"] != "note"]
    common: dict[str, Any] = {"findings": len(findings), "seconds": seconds, "failed": failed}
    if family in (HEALTHY, HARMLESS):
        return Score(family, place=any(alarms[:1]), alarm=not all(alarms), **common)
    place = any(there[:1])
    cause = place and _is_cause(case, findings[0])
    return Score(
        family,
        place=place,
        graded=place and findings[0]["grade"] != "note",
        cause=cause,
        fix=cause and re.search(kinds()[case.kind].fix, findings[0]["fix"], re.IGNORECASE) is not None,
        among_three=any(there[:3]),
        confidently_wrong=not place and any(finding["verified"] for finding in findings[:1]),
        **common,
    )


def _is_there(case: Case, finding: Finding) -> bool:
    """Return whether a finding names a line of the fault: its place, its caller, or the place that made its value."""
    if kinds()[case.kind].family == "data" and re.search(_FROM_THE_DATA, _words(finding)):
        return True
    producer = finding["producer"] or {"file": "", "line": 0}
    places = [(finding["file"], finding["line"]), tuple(finding["called_from"]), (producer["file"], producer["line"])]
    return any(_is_file(file, HELPER) or (_is_file(file, case.file) and line in case.lines) for file, line in places)


def _is_file(path: str, name: str) -> bool:
    return f"/{path}".endswith(f"/{name}")


def _is_cause(case: Case, finding: Finding) -> bool:
    kind = kinds()[case.kind]
    operators = (finding["op"], finding["backward_of"], (finding["producer"] or {"op": ""})["op"])
    named = {_base(operator) for operator in operators if operator}
    if kind.operators and (named or not kind.cause) and not named & kind.operators:
        return False  # a finding without an operator, such as updates that are rounded away, is scored by its words
    return re.search(kind.cause, f"{_words(finding)} {finding['fix']}", re.IGNORECASE) is not None


def _words(finding: Finding) -> str:
    return f"{finding['what']}; {finding['cause']}"


def _base(operator: str) -> str:
    name = operator.rpartition("::")[2].partition(".")[0]
    return name.removeprefix("_foreach_").strip("_").removesuffix("_backward").removesuffix("_backward_data")


def scores(cases: Iterable[Case], folder: Path) -> dict[str, Score]:
    """Return the scores of the cases that ran in a folder, by id."""
    ran = {str(entry["id"]): entry for entry in runs(folder)}
    found: dict[str, Score] = {}
    for case in cases:
        if case.id not in ran:
            continue
        path, entry = folder / f"{case.id}.json", ran[case.id]
        findings = json.loads(path.read_text(encoding="utf-8"))["findings"] if path.is_file() else []
        failed = "" if path.is_file() else f"no report, exit code {entry['exit']}"
        found[case.id] = grade(case, findings, float(entry["seconds"]), failed)
    return found


def summary(found: Iterable[Score]) -> dict[str, str]:
    """Return the figures of scores."""
    found = list(found)
    healthy = [score for score in found if score.family == HEALTHY]
    harmless = [score for score in found if score.family == HARMLESS]
    faults = [score for score in found if score.family not in (HEALTHY, HARMLESS)]
    figures = {
        "faults; healthy; without a symptom": f"{len(faults)}; {len(healthy)}; {len(harmless)}",
        "right place": _share(score.place for score in faults),
        "right place, graded as an error or a precision loss": _share(score.graded for score in faults),
        "right place among the first three findings": _share(score.among_three for score in faults),
        "right cause": _share(score.cause for score in faults),
        "right cause and fix": _share(score.fix for score in faults),
        "no finding": _share(not score.findings for score in faults),
        "confidently wrong": str(sum(score.confidently_wrong for score in faults)),
        "false alarms, healthy programs": str(sum(score.alarm for score in healthy)),
        "healthy programs with a note": str(sum(bool(score.findings) for score in healthy)),
        "false alarms, faults without a symptom": str(sum(score.alarm for score in harmless)),
        "no report": str(sum(bool(score.failed) for score in found)),
        "processor time": f"{sum(score.seconds for score in found):.0f} s",
    }
    for family in sorted({score.family for score in faults}):
        members = [score for score in faults if score.family == family]
        place, fix = _share(score.place for score in members), _share(score.fix for score in members)
        figures[f"{family}: place; cause and fix"] = f"{place}; {fix} of {len(members)}"
    return figures


def _share(values: Iterable[bool]) -> str:
    given = list(values)
    return f"{sum(given) / len(given):.1%}" if given else ""


def tables(runs: Mapping[str, Mapping[str, Score]]) -> str:
    """Return the figures and the cases of several runs as Markdown, with a column for each run.

    Args:
        runs: The scores by id, by the label of the run.
    """
    figures = {label: summary(found.values()) for label, found in runs.items()}
    names = dict.fromkeys(name for each in figures.values() for name in each)
    ids = dict.fromkeys(name for found in runs.values() for name in found)
    lines = [["", *runs], ["---", *["---:"] * len(runs)]]
    lines += [[name, *(each.get(name, "") for each in figures.values())] for name in names]
    lines += [[], ["case", *runs], ["---"] * (len(runs) + 1)]
    lines += [[name, *(str(found.get(name, "")) for found in runs.values())] for name in ids]
    return "\n".join(f"| {' | '.join(cells)} |" if cells else "" for cells in lines) + "\n"
