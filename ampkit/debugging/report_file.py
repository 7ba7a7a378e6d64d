"""Reports in files: JSON with a version number. `docs/reference/debugging.md` lists the keys.

JSON has no inf and no NaN: such numbers are the strings "inf", "-inf" and "nan".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

__all__ = ["Status", "document", "in_order", "line", "read", "text_of"]

Status = Literal["clean", "found", "inconclusive"]

VERSION = 1
_PREFIX = "ampkit.debugging."
_KINDS = ("nonfinite", "precision", "loop", "monitor")


def document(kind: str, status: Status, text: str, content: dict[str, Any]) -> dict[str, Any]:
    """A report as plain dicts, lists, strings and numbers; `text` is what the terminal shows."""
    return {"kind": _PREFIX + kind, "version": VERSION, "status": status, "text": text, **_plain(content)}


def line(kind: str, content: dict[str, Any]) -> str:
    """One line of a file that grows, with its newline."""
    return json.dumps({"kind": _PREFIX + kind, "version": VERSION, **_plain(content)}, allow_nan=False) + "\n"


def read(path: str | Path) -> list[dict[str, Any]]:
    """The report in a file, or the lines of one that grows. Raises `ValueError` for another file or version."""
    text = Path(path).read_text(encoding="utf-8")
    whole = _parsed(text)
    found = [whole] if whole is not None else [one for one in map(_parsed, text.splitlines()) if one is not None]
    if not found:
        raise ValueError(f"{path} holds no JSON object; expected a file that a tool of ampkit debug wrote")
    for one in found:
        if str(one.get("kind")).removeprefix(_PREFIX) not in _KINDS:
            raise ValueError(f"{path} has kind {one.get('kind')!r}; expected one of {', '.join(_KINDS)}, "
                             f"after {_PREFIX!r}")
        if one.get("version") != VERSION:
            raise ValueError(f"{path} has version {one.get('version')!r}; this ampkit reads {VERSION}: use the ampkit "
                             "that wrote it")
    return found


def text_of(report: list[dict[str, Any]]) -> str:
    """What the terminal shows of a report."""
    if "text" in report[0]:
        return str(report[0]["text"])
    steps = [one["step"] for one in report]
    return f"{len(steps)} samples, of steps {min(steps)} to {max(steps)}"


def in_order(reports: Iterable[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Reports of several ranks: first the rank that made what others received, then by step and rank."""
    def order(report: list[dict[str, Any]]) -> tuple[Any, ...]:
        head = report[0]
        rank = head.get("rank", 0)
        if not head.get("findings"):
            return math.inf, head.get("status") != "inconclusive", rank
        first = head["findings"][0]
        return first.get("step", 0), first.get("cause", {}).get("kind") == "received", rank

    return sorted(reports, key=order)


def _parsed(text: str) -> dict[str, Any] | None:
    """A JSON object; None for anything else, such as a line that was cut short."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
