"""The non-finite values of a step that are problems: pure functions that track each from its origin to a symptom.

A non-finite value may be intended. A softmax masks -inf, `1 / (1 + exp(-x))` masks the inf of its exp, and `where`
drops a NaN. So an origin is reported only if its value propagates to a *symptom*: the loss, a gradient, a parameter, or
a result that nothing reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ampkit.debugging.finding import Cause, Finding
from ampkit.debugging.observe.tensor_values import nonfinite_kinds


@dataclass(slots=True)
class Event:
    """One operator call, or a tensor that was there before the step (`kind` "arrived")."""

    index: int
    phase: str
    inputs: tuple[int, ...] = ()  # the indices of the events whose values it read
    nonfinite: frozenset[str] = frozenset()  # which of "nan", "inf" and "-inf" its result contains
    role: Literal["", "loss", "gradient", "parameter", "buffer"] = ""  # the kind of tensor that its result is
    scalar: bool = False
    finding: Finding | None = None  # of a non-finite result
    rounded: Cause | None = None  # if rounding produced its operands
    is_auxiliary: bool = False  # the operator's first result is finite, such as a CTC loss, not its alignments
    is_mask: bool = False  # a number of the code overflowed, as in a mask: like a constant inf

    def note_range(self, low: float, high: float) -> None:
        """Note which non-finite values its result contains, given its smallest and its largest value."""
        self.nonfinite |= nonfinite_kinds(low, high)

    @property
    def known(self) -> Finding:
        """Its finding, which each event with inf or NaN has."""
        assert self.finding is not None
        return self.finding

    @property
    def kind(self) -> str:
        """The kind of the cause of a non-finite value; "propagated" if a non-finite input is the cause."""
        return self.finding.cause.kind if self.finding is not None else "propagated"

    @property
    def is_used(self) -> bool:
        """Whether its result is a loss, a gradient, a parameter, or a number."""
        return bool(self.role) or self.scalar or self.phase in ("backward", "scaler")

    @property
    def is_constant(self) -> bool:
        """Whether its inf is written explicitly in the code."""
        return self.kind == "constant" or self.is_mask

    @property
    def values(self) -> str:
        """The non-finite values of its result, in words."""
        return " and ".join(name for name in ("NaN", "inf", "-inf") if name.lower() in self.nonfinite)


class Origin(NamedTuple):
    """The event that produced non-finite values, and their first symptom."""

    event: Event
    symptom: Event
    only_gradients: bool  # the values propagate to no loss, parameter or buffer
    constant: Event | None  # the constant whose inf the event turned into NaN
    is_used: bool  # a loss, a gradient, a parameter or a number that the program reads depends on the values


def find_origins(events: Mapping[int, Event], *, complete: bool = True) -> list[Origin]:
    """Return the origins of non-finite values among the events of a step that lead to a symptom, constants last.

    If an exception ended the step (not `complete`), an inf that nothing has read yet is not a symptom.
    """
    nonfinite = {index: event for index, event in events.items() if event.nonfinite}
    readers: dict[int, list[Event]] = {index: [] for index in nonfinite}
    read: set[int] = set()
    for event in events.values():
        for index in event.inputs:
            if index not in readers or index == event.index:
                continue
            readers[index].append(event)
            if event.nonfinite or event.phase != "scaler":
                read.add(index)  # a scaler that checks gradients masks nothing
    origins: list[Origin] = []
    # A constant is the origin only if it reaches a loss, a gradient or a parameter, and nothing else is an origin.
    for event in sorted(nonfinite.values(), key=lambda each: (each.is_constant, each.index)):
        if event.kind in ("propagated", "skipped") or (event.is_constant and origins):
            continue
        sources: list[Event] = []
        if event.kind == "from inf":
            sources = _reachable(event, lambda each: [nonfinite[i] for i in each.inputs if i in nonfinite])[1:]
        if not all(map(_is_constant, sources)):
            continue  # the inf has an origin of its own
        # An inf in the data may be a bound or a mask: it is not a symptom if nothing reads it.
        inf_is_symptom = complete and (event.kind != "arrived" or "nan" in event.nonfinite)
        reached = _reachable(event, lambda each: [reader for reader in readers[each.index] if reader.nonfinite])
        symptoms = [
            each
            for each in reached
            if each.role or (not event.is_constant and _is_unread_symptom(each, read, inf_is_symptom))
        ]
        if symptoms:
            only_gradients = all(each.role in ("", "gradient") for each in reached)
            scaler = [each for each in reached if each.phase == "scaler"]
            symptoms = [each for each in symptoms if each.is_used] or scaler or symptoms
            symptom = min(symptoms, key=lambda each: (each.role != "loss", each.index))
            constant = next((each for each in sources if each.is_constant), None)
            is_used = any(each.is_used for each in reached)
            origins.append(Origin(event, symptom, only_gradients, constant, is_used))
    return origins


def masked(events: Mapping[int, Event], origins: list[Origin]) -> list[Event]:
    """Return the events that produced inf which a later operator masks, in a step whose used values are finite."""
    if any(origin.is_used for origin in origins):
        return []
    reported = {origin.event.index for origin in origins}
    kinds = ("overflow", "intermediate", "undefined")
    return [
        each
        for each in events.values()
        if each.nonfinite and "nan" not in each.nonfinite and each.phase == "forward" and each.kind in kinds
        if not (each.is_mask or each.is_auxiliary or each.index in reported)
    ]


def _is_unread_symptom(event: Event, read: set[int], inf_is_symptom: bool) -> bool:
    """Return whether a non-finite result without a role is a symptom because nothing reads it."""
    if event.index in read or event.phase == "recompute":
        return False  # a recompute stops once backward has the tensors that it needs
    return inf_is_symptom or "nan" in event.nonfinite or event.scalar or event.phase in ("backward", "scaler")


def _reachable(event: Event, neighbors: Callable[[Event], Iterable[Event]]) -> list[Event]:
    """Return an event, and all events that can be reached from it through `neighbors`."""
    reached = {event.index: event}
    pending = [event]
    while pending:
        for neighbor in neighbors(pending.pop()):
            if neighbor.index not in reached:
                reached[neighbor.index] = neighbor
                pending.append(neighbor)
    return list(reached.values())


def _is_constant(event: Event) -> bool:
    """Return whether an inf is a constant, propagated, or a mask in the data."""
    is_mask = event.kind == "arrived" and event.nonfinite == {"-inf"}
    return is_mask or event.is_constant or event.kind in ("propagated", "from inf")
