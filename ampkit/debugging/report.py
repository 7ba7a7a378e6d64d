"""What a search for non-finite values found: five lines each to read, plain dicts to keep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ampkit.debugging.causes import Cause, InputSummary
from ampkit.debugging.loop import LoopFinding
from ampkit.debugging.report_file import Status, document

__all__ = ["Finding", "NonFiniteError", "NonFiniteReport", "Operation", "Suggestion"]

COMPILED = ("compiled functions run eagerly here: where the loss of your own run is finite and right, what follows is "
            "not of that run")


class NonFiniteError(FloatingPointError):
    """A step made inf or NaN that reached its loss, a gradient, a parameter or a result. `report` has it all."""

    def __init__(self, report: NonFiniteReport) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class Operation:
    """One operator call, or (`op` "") a tensor that was there before. Of backward the place is its forward's, but the
    line where code of the user's runs in it."""

    index: int              # in the order of execution; -1 for a tensor
    op: str
    phase: str              # "forward", "backward", "recompute", "optimizer", "scaler" or "before"
    module: str             # path from the model; a class for what has none, as the model itself; "" outside any
    path: str               # the same where `Policy.for_modules` knows it by that, else ""
    call: int               # which call of the module in the step, from 1; 0 if not known
    file: str
    line: int
    backward_of: str        # in backward, the forward operator
    dtype: str
    shape: tuple[int, ...]
    values: str             # "nan", "inf", "-inf", or several, of its result

    def __str__(self) -> str:
        return f"{self.what()}{self.where()}"

    def what(self) -> str:
        """The operator, and what kind of value it computed."""
        if not self.op:
            return f"a tensor, {self.dtype}{list(self.shape)}"
        name = f"the cast to {self.dtype} ({self.op})" if self.op == "aten::_to_copy" else self.op
        backward = "" if self.phase != "backward" else f" in backward of {self.backward_of or 'an unseen operator'}"
        return f"{name}{backward}"

    def where(self) -> str:
        """The module, its call and the line, as far as they are known."""
        number = f" ({_ordinal(self.call)} call)" if self.call > 1 else ""
        module = f", {self.module}{number}" if self.module else ""
        return module + (f", {self.file}:{self.line}" if self.file else "")


@dataclass(frozen=True)
class Suggestion:
    """What to change. `kind`: "change" (code), or "advice" (what helps such operators, in the user's own code).

    A change that was tried and failed is none: it is only named in `tried`.
    """

    code: str
    kind: Literal["change", "advice"] = "advice"
    verified: bool = False          # steps with it were finite
    evidence: str = ""
    tried: tuple[str, ...] = ()     # what did not help


@dataclass(frozen=True)
class Finding:
    """One origin of non-finite values, and the symptom that it leads to."""

    symptom: str                    # "the loss is nan"
    origin: Operation
    cause: Cause
    inputs: tuple[InputSummary, ...]
    chain: tuple[Operation, ...]    # from the origin to where it shows
    parameter: str                  # whose gradient or value the symptom is, or the parameter that arrived broken
    step: int                       # optimizer steps before it, skipped ones counted
    device: str
    scale: float | None             # the loss scale
    skipped: bool                   # a scaler met it and skips the step, as it should
    times: int = 1                  # further findings at the same place are counted
    suggestion: Suggestion | None = None
    elements: str = ""              # how many are broken, and in which rows
    micro_batch: int = 1            # by calls of backward in the step
    made: Operation | None = None   # what computed the 0 or inf that the origin cannot take

    def __str__(self) -> str:
        shown = [str(one) for one in self.inputs[:3]] + [f"{len(self.inputs) - 3} more"] * (len(self.inputs) > 3)
        inputs = "; inputs " + ", ".join(shown) if shown else ""
        micro_batch = f", micro-batch {self.micro_batch}" if self.micro_batch > 1 else ""
        lines = [
            f"{self.symptom} in step {self.step}{micro_batch}"
            + (f", {self.times} times alike" if self.times > 1 else ""),
            f"  origin    {self.origin}" + (f": {self.elements}" if self.elements else ""),
            f"  why       {self.why()}{inputs}",
        ]
        if self.suggestion is not None:
            lines.append(f"  {self.suggestion.kind:9} {self.suggestion.code}")
            lines.append(f"  evidence  {self.suggestion.evidence}")
            lines += [f"  in vain   {one}" for one in self.suggestion.tried]
        return "\n".join(lines)

    def why(self) -> str:
        """The cause, with the place where the value was made that it is about."""
        if self.made is None:
            return self.cause.text
        made = f"{self.made.op}{self.made.where()}"
        return f"{self.cause.text}, in {made}" if self.cause.kind == "rounded" else f"{self.cause.text}; from {made}"

    def way(self) -> str:
        """The chain in one line, without its middle where it is long."""
        steps = [one.op or "arrived" for one in self.chain]
        if len(steps) > 8:
            steps = [*steps[:4], f"{len(steps) - 7} more", *steps[-3:]]
        return " -> ".join(steps)


@dataclass
class NonFiniteReport:
    """What `detect_nonfinite` and `find_nonfinite` found; falsy if nothing. `str` is what the terminal shows."""

    findings: list[Finding] = field(default_factory=list)
    skipped: list[Finding] = field(default_factory=list)    # what a scaler met: normal while its scale settles
    steps: int = 0
    operators: int = 0
    rank: int = 0
    world_size: int = 1
    notes: list[str] = field(default_factory=list)
    incomplete: str = ""        # why the steps did not run to their end
    compiled: bool = False      # compiled functions ran, eagerly
    loop: list[LoopFinding] = field(default_factory=list)       # what the loop does in the wrong order

    @property
    def status(self) -> Status:
        """Whether something was found; "inconclusive" where nothing was, and steps did not run to their end."""
        return "found" if self.findings or self.loop else "inconclusive" if self.incomplete else "clean"

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        rank = f"rank {self.rank}: " if self.world_size > 1 else ""
        looked = f"{self.operators} operators in {self.steps} {'step' if self.steps == 1 else 'steps'}"
        blocks = [COMPILED] if self.compiled else []
        blocks += map(str, self.loop)
        for finding in self.findings[:1]:
            blocks.append(f"{rank}{finding}\n  way       {finding.way()}")
        for finding in self.findings[1:]:
            blocks.append(
                f"{rank}then {finding.symptom} in step {finding.step}: {finding.origin}: {finding.why()}"
            )
        if self.incomplete and not self.findings:
            blocks.append(f"{rank}inconclusive: {self.incomplete}. Nothing was found until then: {looked}")
        elif not self.findings:
            blocks.append(f"{rank}no inf or NaN reached a loss, a gradient, a parameter or a result: {looked}")
        for finding in self.skipped:
            blocks.append(
                f"{rank}step {finding.step} was left to the loss scaler, which skips it: {finding.cause.text} "
                f"at a scale of {finding.scale or 0:g}, in {finding.origin}"
            )
        return "\n".join([*blocks, *(f"note: {note}" for note in self.notes)])

    def add(self, finding: Finding) -> bool:
        """Add a finding, or count it with one at the same place. Returns whether it is new."""
        into = self.skipped if finding.skipped else self.findings
        for place, other in enumerate(into):
            if _place(other) == _place(finding) or (finding.cause.kind == "arrived" and self.findings):
                into[place] = replace(other, times=other.times + 1)
                return False
        into.append(finding)
        return True

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; inf and NaN among the numbers as strings."""
        return document("nonfinite", self.status, str(self), asdict(self))

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)


def _place(finding: Finding) -> tuple[Any, ...]:
    origin = finding.origin
    return origin.op, origin.module, origin.file, origin.line, origin.backward_of, finding.cause.kind


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
