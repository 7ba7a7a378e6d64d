"""Reports in files: checked against the schema that ships beside this module, read back, and merged.

JSON has no inf and no NaN: such numbers are the strings "inf", "-inf" and "nan". A file says its version as
"major.minor"; a reader refuses a major one that it does not know, and ignores what a later minor one added.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from ampkit.debugging.causes import Cause, InputSummary
from ampkit.debugging.policy_change import PolicyChange
from ampkit.debugging.report import KIND, VERSION, Finding, NonFiniteReport, Operation, Suggestion

__all__ = ["from_dict", "merge", "read", "schema", "validate"]

_TYPES = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of a report."""
    return json.loads(Path(__file__).with_name("report_schema.json").read_text(encoding="utf-8"))


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
    major = str(data.get("version")).partition(".")[0]
    if major != VERSION.partition(".")[0]:
        raise ValueError(
            f"{name} has version {data.get('version')!r}; this ampkit reads {VERSION.partition('.')[0]}.x: use the "
            "ampkit that wrote it, or a later one"
        )
    validate(data, schema(), name)
    report = NonFiniteReport(**{
        key: data[key] for key in ("steps", "operators", "rank", "world_size", "notes")
    })
    report.findings = [_finding(one) for one in data["findings"]]
    report.skipped = [_finding(one) for one in data["skipped"]]
    return report


def merge(reports: Iterable[NonFiniteReport]) -> list[NonFiniteReport]:
    """Reports of several ranks, those first that made what the others only received; then by step and rank."""
    def order(report: NonFiniteReport) -> tuple[Any, ...]:
        if not report.findings:
            return math.inf, True, report.rank
        first = report.findings[0]
        return first.step, first.cause.kind == "received", report.rank

    return sorted(reports, key=order)


def validate(value: Any, rule: Mapping[str, Any], where: str) -> None:
    """Check a value against the part of JSON Schema that ours uses. Raises `ValueError`."""
    if "$ref" in rule:
        rule = schema()["$defs"][rule["$ref"].rpartition("/")[2]]
    if "anyOf" in rule:
        problems = []
        for option in rule["anyOf"]:
            try:
                return validate(value, option, where)
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
                validate(item, rule["properties"][key], f"{where}.{key}")
    if isinstance(value, list) and "items" in rule:
        for place, item in enumerate(value):
            validate(item, rule["items"], f"{where}[{place}]")
    return None


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


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
