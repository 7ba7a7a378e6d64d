"""The evaluations of a search, one JSON line each, written as they are made: from there, a search goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampkit.debugging.report import plain
from ampkit.debugging.search_units import Unit
from ampkit.policy.policy import Policy

__all__ = ["Evaluation", "SearchLog"]

KIND, VERSION = "ampkit.debugging.search", "1.0"


@dataclass(frozen=True)
class Evaluation:
    """One run of the user's metric."""

    units: tuple[Unit, ...]     # in float32
    value: Any                  # what the metric gave; as text where JSON has nothing like it
    passes: bool
    seconds: float


class SearchLog:
    """What a search has done so far. With a path, in a file too."""

    def __init__(self, path: str | Path | None, policy: Policy, *, resume: bool) -> None:
        """Raises `FileExistsError` for a file that is there, `ValueError` with `resume` for one of another search."""
        self.evaluations: list[Evaluation] = []
        self.units: list[Unit] = []     # the likeliest culprit first
        self.inside: list[Unit] = []    # operators in modules
        self.shares: dict[Unit, float] = {}     # of what computes in low precision
        self._path = None if path is None else Path(path)
        if self._path is not None and self._path.exists():
            if not resume:
                raise FileExistsError(f"{path} is there already; expected a new file, or resume=True to go on from it")
            self._read(self._path, policy)
        elif self._path is not None:
            self._write({"kind": KIND, "version": VERSION, "policy": policy.to_dict()})

    def add_units(self, units: Sequence[Unit], inside: Sequence[Unit], shares: dict[Unit, float]) -> None:
        """Note what can be kept in float32."""
        self.units, self.inside, self.shares = list(units), list(inside), shares
        self._write({
            "units": [[one.path, one.op, shares.get(one)] for one in units],
            "inside": [[one.path, one.op] for one in inside],
        })

    def add(self, made: Evaluation) -> None:
        """Note an evaluation."""
        self.evaluations.append(made)
        self._write({
            "float32": [[one.path, one.op] for one in made.units], "value": _storable(made.value),
            "passes": made.passes, "seconds": round(made.seconds, 3),
        })

    @property
    def best(self) -> Evaluation | None:
        """The evaluation that passed with the fewest rules."""
        return min((one for one in self.evaluations if one.passes), key=lambda one: len(one.units), default=None)

    def _write(self, line: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")

    def _read(self, path: Path, policy: Policy) -> None:
        text = path.read_text(encoding="utf-8")
        head, *rest = [*filter(None, map(_parsed, text.splitlines())), {}]
        if head.get("kind") != KIND or head["version"].partition(".")[0] != VERSION.partition(".")[0]:
            raise ValueError(f"{path} is no log of a search, version {VERSION}")
        if head["policy"] != policy.to_dict():
            raise ValueError(f"{path} is of a search that began with another policy; expected the same, to go on")
        for line in filter(None, rest):
            if "units" in line:
                self.units = [Unit(path, op) for path, op, _ in line["units"]]
                self.inside = [Unit(path, op) for path, op in line["inside"]]
                self.shares = {Unit(path, op): share for path, op, share in line["units"] if share is not None}
            else:
                units = tuple(Unit(path, op) for path, op in line["float32"])
                self.evaluations.append(Evaluation(units, line["value"], line["passes"], line["seconds"]))
        if not text.endswith("\n"):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")


def _parsed(line: str) -> dict[str, Any]:
    """A line; nothing where it was cut short."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _storable(value: Any) -> Any:
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "numel", lambda: 1)() == 1:
        value = item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    try:
        json.dumps(plain(value), allow_nan=False)
    except (TypeError, ValueError):
        return repr(value)
    return plain(value)
