"""From non-finite values back to where they began, and on to where they show: pure functions over records.

A value that is not finite is no fault by itself. A mask of -inf ends in a softmax, `1 / (1 + exp(-x))` swallows the
inf of its exp, `where` drops a NaN on purpose. So an origin is named only where what it made can be followed to a
*symptom*: the loss, a gradient, a parameter, or a result that nothing reads any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


@dataclass(slots=True)
class Record:
    """What is known of one operator call, or of a tensor that was there before (`kind` "arrived")."""

    index: int
    phase: str
    inputs: tuple[int, ...] = ()    # the records whose values it read
    broken: frozenset[str] = frozenset()    # what its result has of "nan", "inf" and "-inf"
    shows: Literal["", "loss", "gradient", "parameter", "buffer"] = ""      # what its result is
    scalar: bool = False
    finding: Any = None             # what a report says of a broken one

    def mark(self, low: float, high: float) -> None:
        """Note what the least and the greatest value of its result say."""
        if not math.isfinite(high - low):       # of float16, too: these are Python's
            found = {"nan": low != low, "inf": high == math.inf, "-inf": low == -math.inf}
            self.broken |= {name for name, there in found.items() if there}

    @property
    def kind(self) -> str:
        """The kind of the cause of a broken value; "passed on" where it came from a broken input."""
        return self.finding.cause.kind if self.finding is not None else "passed on"

    @property
    def values(self) -> str:
        """What is broken about its result, in words."""
        return " and ".join(name for name in ("nan", "inf", "-inf") if name in self.broken)


class Trace(NamedTuple):
    """An origin, and the first symptom; `only_gradients`: it is in no loss and in no parameter. `constant`: its inf."""

    origin: Record
    symptom: Record
    only_gradients: bool
    constant: Record | None


def trace(records: Mapping[int, Record], *, complete: bool = True) -> list[Trace]:
    """The origins that matter among the records of a step, in the order in which they happened.

    Of a step that is not `complete`, an inf that nothing has read yet is no symptom.
    """
    broken = {index: record for index, record in records.items() if record.broken}
    readers: dict[int, list[Record]] = {index: [] for index in broken}
    read: set[int] = set()
    for record in records.values():
        for index in record.inputs:
            if index not in readers or index == record.index:
                continue
            readers[index].append(record)
            if record.broken or record.phase != "scaler":
                read.add(index)     # a scaler that counts what is broken absorbs nothing
    traces: list[Trace] = []
    # A constant is to blame where it reaches a loss, a gradient or a parameter, and nothing else explains it.
    for record in sorted(broken.values(), key=lambda one: (one.kind == "constant", one.index)):
        if record.kind in ("passed on", "skipped") or (record.kind == "constant" and traces):
            continue
        of_inf = record.kind == "from inf"
        behind = _with_all(record, lambda one: [broken[i] for i in one.inputs if i in broken])[1:] if of_inf else []
        if not all(map(_is_constant, behind)):
            continue        # the inf has an origin of its own
        # An inf that came with the data shows only where it does harm: it may be a bound, or a mask.
        soft = complete and (record.kind != "arrived" or "nan" in record.broken)
        reached = _with_all(record, lambda one: [reader for reader in readers[one.index] if reader.broken])
        symptoms = [one for one in reached if one.shows or (record.kind != "constant" and _is_left(one, read, soft))]
        if symptoms:
            only_gradients = all(one.shows in ("", "gradient") for one in reached)
            symptom = min(symptoms, key=lambda one: (one.shows != "loss", one.index))
            constant = next((one for one in behind if one.kind == "constant"), None)
            traces.append(Trace(record, symptom, only_gradients, constant))
    return traces


def _is_left(record: Record, read: set[int], soft: bool) -> bool:
    """Whether a broken result is a symptom though it is no loss, gradient or parameter: nothing reads it."""
    if record.index in read or record.phase == "recompute":
        return False        # a recompute stops where backward has what it needs
    return soft or "nan" in record.broken or record.scalar or record.phase in ("backward", "scaler")


def _with_all(record: Record, neighbors: Callable[[Record], Iterable[Record]]) -> list[Record]:
    """A record, and those that its neighbors lead to."""
    found = {record.index: record}
    pending = [record]
    while pending:
        for one in neighbors(pending.pop()):
            if one.index not in found:
                found[one.index] = one
                pending.append(one)
    return list(found.values())


def _is_constant(record: Record) -> bool:
    """Whether an inf was put there by a constant or passed on, or is a mask that came with the data."""
    masked = record.kind == "arrived" and record.broken == {"-inf"}
    return masked or record.kind in ("passed on", "constant", "from inf")
