"""Reports in files: checked against the schemas that ship beside this module, read back, and merged.

JSON has no inf and no NaN: such numbers are the strings "inf", "-inf" and "nan". A file says its version as
"major.minor"; a reader refuses a major one that it does not know, and ignores what a later minor one added.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from ampkit.debugging.causes import Cause, InputSummary
from ampkit.debugging.hashes import HashedCall, HashLog
from ampkit.debugging.operator_stats import MatrixShape, OperatorStat, OperatorStats
from ampkit.debugging.policy_change import PolicyChange
from ampkit.debugging.precision_report import GradientError, OperatorError, PrecisionReport
from ampkit.debugging.report import KIND, VERSION, Finding, NonFiniteReport, Operation, Suggestion

__all__ = ["MonitorLog", "Report", "SearchLines", "from_dict", "merge", "read", "read_any", "schema", "validate"]

_PREFIX = "ampkit.debugging."
_KINDS = ("nonfinite", "precision", "operators", "hashes", "monitor", "search")


@dataclass(frozen=True)
class MonitorLog:
    """The samples that a monitor has written."""

    samples: list[dict[str, Any]]

    def __str__(self) -> str:
        steps = [one["step"] for one in self.samples]
        return f"{len(steps)} samples, of steps {min(steps)} to {max(steps)}"


@dataclass(frozen=True)
class SearchLines:
    """The log of a search: its head, what can be kept in float32, evaluations."""

    lines: list[dict[str, Any]]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """In the order in which they were made."""
        return [one for one in self.lines if "float32" in one]

    @property
    def best(self) -> dict[str, Any] | None:
        """The one that passed with the fewest rules."""
        passing = [one for one in self.evaluations if one["passes"]]
        return min(passing, key=lambda one: len(one["float32"]), default=None)

    def __str__(self) -> str:
        best = "none passed" if self.best is None else "best so far: " + named(self.best["float32"])
        return f"{len(self.evaluations)} evaluations; {best}"


def named(units: Iterable[Sequence[str]]) -> str:
    """What an evaluation kept in float32, in words."""
    return ", ".join(f"{op} in {path}" if op and path else op or path for path, op in units) or "nothing in float32"


Report = NonFiniteReport | PrecisionReport | OperatorStats | HashLog | MonitorLog | SearchLines

_TYPES = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}


@cache
def schema(kind: str = "nonfinite") -> dict[str, Any]:
    """The JSON schema of a tool's report; of "monitor" and "search", of a line in theirs."""
    return json.loads((Path(__file__).parent / "schemas" / f"{kind}.json").read_text(encoding="utf-8"))


def read_any(path: str | Path) -> Report:
    """The report of any tool that is in a file. Raises `ValueError` for what is none, or of a version to come."""
    text = Path(path).read_text(encoding="utf-8")
    lines = [one for one in map(_parsed, text.splitlines()) if one is not None]
    whole = _parsed(text)
    if whole is None and not lines:
        raise ValueError(f"{path} is no JSON, nor lines of it; expected what a tool of ampkit debug wrote")
    head = whole or next(iter(lines), {})
    kind = str(head.get("kind")).removeprefix(_PREFIX)
    if kind == "nonfinite":
        return from_dict(head, str(path))
    if kind not in _KINDS or not str(head.get("kind")).startswith(_PREFIX):
        raise ValueError(f"{path} is no report of ampkit debug; expected 'kind': one of {', '.join(_KINDS)}, after "
                         f"{_PREFIX!r}")
    _check_version(head, str(path))
    data = [head] if whole else lines
    for number, one in enumerate(data, 1):
        validate(one, schema(kind), str(path) if len(data) == 1 else f"{path}, line {number}")
    if kind == "precision":
        return _precision(head)
    if kind == "operators":
        return OperatorStats([_known(OperatorStat, one) for one in head["operators"]],
                             [_known(MatrixShape, one) for one in head["shapes"]])
    if kind == "hashes":
        return HashLog([HashedCall(*call) for call in head["calls"]])
    return MonitorLog(data) if kind == "monitor" else SearchLines(data)


def read(path: str | Path) -> NonFiniteReport:
    """The report in a file. Raises `ValueError` for what is no report, or one of a version to come."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    return from_dict(data, str(path))


def from_dict(data: Any, name: str = "the report") -> NonFiniteReport:
    """The report that `to_dict` wrote. Raises `ValueError` that says what is wrong, and where."""
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise ValueError(f"{name} is no report of ampkit debug; expected 'kind': {KIND!r}")
    _check_version(data, name)
    validate(data, schema(), name)
    report = NonFiniteReport(**{
        key: data[key] for key in ("steps", "operators", "rank", "world_size", "notes")
    })
    report.findings = [_finding(one) for one in data["findings"]]
    report.skipped = [_finding(one) for one in data["skipped"]]
    return report


def _check_version(data: Mapping[str, Any], name: str) -> None:
    major = str(data.get("version")).partition(".")[0]
    if major != VERSION.partition(".")[0]:
        raise ValueError(
            f"{name} has version {data.get('version')!r}; this ampkit reads {VERSION.partition('.')[0]}.x: use the "
            "ampkit that wrote it, or a later one"
        )


def merge(reports: Iterable[NonFiniteReport]) -> list[NonFiniteReport]:
    """Reports of several ranks, those first that made what the others only received; then by step and rank."""
    def order(report: NonFiniteReport) -> tuple[Any, ...]:
        if not report.findings:
            return math.inf, True, report.rank
        first = report.findings[0]
        return first.step, first.cause.kind == "received", report.rank

    return sorted(reports, key=order)


def validate(value: Any, rule: Mapping[str, Any], where: str, whole: Mapping[str, Any] | None = None) -> None:
    """Check a value against the part of JSON Schema that ours use; `whole` has definitions. Raises `ValueError`."""
    whole = rule if whole is None else whole
    if "$ref" in rule:
        rule = whole["$defs"][rule["$ref"].rpartition("/")[2]]
    if "anyOf" in rule:
        problems = []
        for option in rule["anyOf"]:
            try:
                return validate(value, option, where, whole)
            except ValueError as error:
                problems.append(str(error))
        raise ValueError("; ".join(problems))
    if "enum" in rule and value not in rule["enum"]:
        raise ValueError(f"{where} is {value!r}; expected one of {rule['enum']}")
    wanted = rule.get("type")
    if wanted and (not isinstance(value, _TYPES[wanted]) or (isinstance(value, bool) and wanted != "boolean")):
        raise ValueError(f"{where} is {type(value).__name__}; expected {wanted}")
    if "pattern" in rule and not re.search(rule["pattern"], str(value)):
        raise ValueError(f"{where} is {value!r}; expected the form {rule['pattern']}")
    if isinstance(value, dict):
        missing = [key for key in rule.get("required", ()) if key not in value]
        if missing:
            raise ValueError(f"{where} lacks {', '.join(map(repr, missing))}")
        for key, item in value.items():
            if key in rule.get("properties", {}):
                validate(item, rule["properties"][key], f"{where}.{key}", whole)
            elif "additionalProperties" in rule:
                validate(item, rule["additionalProperties"], f"{where}.{key}", whole)
    if isinstance(value, list) and "items" in rule:
        for place, item in enumerate(value):
            validate(item, rule["items"], f"{where}[{place}]", whole)
    return None


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def _parsed(text: str) -> dict[str, Any] | None:
    """A JSON object; None for what is none, such as a line that was cut short."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _precision(data: Mapping[str, Any]) -> PrecisionReport:
    def numbers(one: Mapping[str, Any]) -> dict[str, Any]:
        return {key: float(item) if item in ("inf", "-inf", "nan") else item for key, item in one.items()}

    return _known(
        PrecisionReport, numbers({key: item for key, item in data.items() if not isinstance(item, list | dict)}),
        operators=[
            _known(OperatorError, numbers({**one, "shape": ""}), shape=tuple(one["shape"])) for one in data["operators"]
        ],
        parameters=[_known(GradientError, numbers(one)) for one in data["parameters"]],
        opaque=dict(data["opaque"]),
    )


def _known(cls: type, data: Mapping[str, Any], **special: Any) -> Any:
    """A dataclass from the fields that it has; a later version may have added others."""
    names = {field.name for field in fields(cls)}
    return cls(**{key: value for key, value in data.items() if key in names and key not in special}, **special)


def _finding(data: Mapping[str, Any]) -> Finding:
    cause, suggestion = data["cause"], data["suggestion"]
    return _known(
        Finding, data,
        origin=_operation(data["origin"]),
        cause=_known(Cause, cause, value=_number(cause["value"]), limit=_number(cause["limit"])),
        inputs=tuple(
            _known(InputSummary, one, shape=tuple(one["shape"]), largest=_number(one["largest"]))
            for one in data["inputs"]
        ),
        chain=tuple(_operation(one) for one in data["chain"]),
        scale=_number(data["scale"]),
        suggestion=None if suggestion is None else _known(
            Suggestion, suggestion, scale=_number(suggestion["scale"]),
            change=None if suggestion["change"] is None else PolicyChange(
                suggestion["change"]["device"], tuple(suggestion["change"]["modules"]),
                tuple(suggestion["change"]["operators"]),
            ),
        ),
    )


def _operation(data: Mapping[str, Any]) -> Operation:
    return _known(Operation, data, shape=tuple(data["shape"]))
