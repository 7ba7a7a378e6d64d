"""Result files: a line of JSON per case, with the environment it was measured in, written as cases finish.

An interrupted run keeps its finished cases, and each line can be judged by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_NEEDED = ("family", "name", "environment")


def key(row: Row) -> tuple[str, str]:
    """Return the key of a row in a file."""
    return row["family"], row["name"]


def append(path: Path, row: Row) -> None:
    """Add a row to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_rounded(row)) + "\n")


def load(path: Path) -> list[Row]:
    """Return the rows of a file.

    An incomplete last line is ignored. Raises `ValueError`, naming the line, for anything that is no row of results,
    and for a file without rows.
    """
    rows = list(_rows(path.read_text(encoding="utf-8"), path))
    if not rows:
        raise ValueError(f"{path} holds no results; write some with python -m benchmarks --out FOLDER")
    return rows


def drop_incomplete_line(path: Path) -> None:
    """Remove an incomplete last line from a file, so that more can be appended."""
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")


def _rows(text: str, path: Path) -> Iterator[Row]:
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if not line.strip() or (number > 1 and not line.endswith("\n")):
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict) or any(name not in row for name in _NEEDED):
            raise ValueError(f"{path}, line {number}: not a row of results; expected {', '.join(_NEEDED)}")
        yield row


def measured(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that hold figures, not errors."""
    return [row for row in rows if "error" not in row]


def _rounded(tree: Any) -> Any:
    """Round floats in containers to six significant digits."""
    if isinstance(tree, float):
        return float(f"{tree:.6g}")
    if isinstance(tree, dict):
        return {name: _rounded(item) for name, item in tree.items()}
    if isinstance(tree, list | tuple):
        return [_rounded(item) for item in tree]
    return tree
