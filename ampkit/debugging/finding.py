"""One finding (kind, place, cause, fix, steps), and the report of an examination, as text and as JSON.

`docs/reference/debugging.md` lists the keys of the JSON. JSON has no inf and no NaN: such numbers are the strings
"inf", "-inf" and "nan".
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from ampkit.text_tables import terminal_width

Status = Literal["clean", "found", "inconclusive"]
Grade = Literal["error", "precision loss", "note"]
Losses = dict[tuple[str, int], dict[int, float]]  # unscaled, by line of backward and by step
GRADES: tuple[Grade, ...] = ("error", "precision loss", "note")
VERSION = 3
_COMPILED = (
    "compiled functions ran eagerly: if the loss of your compiled run is finite and right, this report does not apply "
    "to that run"
)
_MANY_SKIPS = 8  # the fewest that do not count as settling of a loss scale
_LABEL = 10  # characters of a label such as "cause"


@dataclass(frozen=True)
class Place:
    """An operator call, or a line: in the user's code, in the model, in the step.

    An operator of backward has the module and line of its forward operator. In a hook or a custom `backward` it has the
    line in that code.
    """

    file: str = ""
    line: int = 0
    op: str = ""  # "" for a line, and for a tensor that was there before the step
    module: str = ""  # path from the model, or the name of the class without one
    phase: str = ""  # "forward", "backward", "recompute", "optimizer", "scaler" or "before"
    backward_of: str = ""  # in backward, the forward operator
    call: int = 0  # number of the module's call in the step, from 1; 0 if unknown
    index: int = -1  # in the order of execution
    dtype: str = ""  # of the result
    shape: tuple[int, ...] = ()
    called_from: tuple[str, int] = ("", 0)  # file and line of the script that led there, if it is another file

    @property
    def site(self) -> tuple[str, int]:
        """File and line."""
        return self.file, self.line

    @property
    def operator(self) -> str:
        """The operator in words: with the dtype for a cast, and with the forward operator for one of backward."""
        if not self.op:
            return f"a tensor {self.dtype}{list(self.shape)}" if self.dtype else ""
        name = f"cast to {self.dtype}, {self.op}" if self.op == "aten::_to_copy" and self.dtype else self.op
        return (
            name if self.phase != "backward" else f"{name} in backward of {self.backward_of or 'an unknown operator'}"
        )

    def __str__(self) -> str:
        module = f'module "{self.module}"' + (f", call {self.call}" if self.call > 1 else "") if self.module else ""
        script = "called from {}:{}".format(*self.called_from) if self.called_from[0] else ""
        details = ", ".join(filter(None, (self.operator, module, script)))
        line = f"{self.file}:{self.line}" if self.file else ""
        return f"{line} ({details})" if line and details else line or details


@dataclass(frozen=True)
class Cause:
    """Why something is wrong. `kind` is the kind of the finding.

    Kinds of inf and NaN:

    - "overflow": the exact result is finite (`value` is its largest magnitude, `limit` the maximum of the dtype);
    - "intermediate": the exact result fits the dtype, but the operator overflowed inside;
    - "undefined": NaN or inf for these inputs in any precision;
    - "rounded": undefined for a 0 or inf that rounding made;
    - "from inf": an input has inf, and the result NaN;
    - "constant": written explicitly in the code;
    - "arrived": already in the tensor before the step;
    - "received": it came from another rank;
    - "uninitialized": memory of `torch.empty` was read;
    - "unknown": the operator could not be run again;
    - "propagated": an input is not finite;
    - "skipped": a scaler skipped a step because of it, and it is still in a gradient.
    """

    kind: str
    text: str = ""
    value: float | None = None
    limit: float | None = None
    is_exact: bool = False  # the result is the same if its inputs are also computed in float64
    is_of_data: bool = False  # the data overflows, so no precision helps
    is_number: bool = False  # numbers written in the code are the reason: one is rounded, or two masks are added
    is_minus_inf: bool = False  # the inputs have -inf and no inf


@dataclass(frozen=True)
class Fix:
    """Code that was verified in a run with it, or an untested recommendation."""

    code: str = ""
    verified: bool = False
    result: str = ""  # of the verification
    tried: tuple[str, ...] = ()  # fixes that were tried without success


class Operand(NamedTuple):
    """An input of an operator."""

    dtype: str
    text: str  # name, dtype, shape and largest magnitude


@dataclass(kw_only=True)
class Finding:
    """One problem: its grade, place, cause and fix, and the steps with it."""

    grade: Grade  # "error" is certain, "precision loss" has an effect on numbers or the loss, "note" raises no alarm
    check: str  # the check that found it
    cause: Cause
    what: str  # the symptom in the user's words
    place: Place = Place()
    producer: Place | None = None  # the operator that computed the value that is the cause
    rounding_sources: tuple[Place, ...] = ()  # all whose rounding made such a value, by their share
    fix: Fix = Fix()
    step: int = 0  # number of iterations before it, skipped steps included
    last: int = 0
    times: int = 1
    # Of inf and NaN:
    elements: str = ""  # how many are not finite, and in which rows
    inputs: tuple[Operand, ...] = ()  # of the operator, as they were before the call
    device: str = "cpu"
    micro_batch: int = 1  # number of the backward call in the step
    scale: float | None = None  # the loss scale
    parameter: str = ""  # whose gradient or value the symptom is
    nonfinite: tuple[str, ...] = ()  # which of "nan", "inf" and "-inf" the result contains
    unused: bool = False  # no loss, gradient, parameter or number that the program reads depends on it

    @property
    def kind(self) -> str:
        """The kind of its cause."""
        return self.cause.kind

    def is_like(self, other: Finding) -> bool:
        """Return whether another finding is the same problem at the same place, whatever its numbers are."""
        if self.check == other.check == "nonfinite" and self.place.file and self.place.site == other.place.site:
            return True  # as of forward and backward of an operator
        casts = {self.place.op, other.place.op} <= {"aten::_to_copy", "aten::copy_"}
        if casts and self.place.file and "nonfinite" not in (self.check, other.check):
            keys = ("file", "line", "phase", "backward_of")  # one fault, whatever the cast does to the values
            return all(getattr(self.place, key) == getattr(other.place, key) for key in keys)
        if (self.check, self.kind) != (other.check, other.kind):
            return False
        if not self.place.file and not self.place.op:
            return self.what == other.what
        # The layers of a model share their lines.
        keys = ("file", "line", "op", "backward_of") if self.place.file else ("op", "module", "backward_of")
        return all(getattr(self.place, key) == getattr(other.place, key) for key in keys)

    def merge(self, other: Finding) -> None:
        """Count another finding that is like this one, and take its words if its grade is worse."""
        if GRADES.index(other.grade) < GRADES.index(self.grade):
            kept = {"step": self.step, "times": self.times, "last": self.last, "unused": self.unused}
            vars(self).update(vars(replace(other, **kept)))
        self.times += other.times
        self.last = max(self.last, other.last, other.step)
        self.unused &= other.unused

    def lines(self, width: int | None = None) -> list[str]:
        """Return the lines for a terminal of this width."""
        when = f"step {self.step}" if self.last <= self.step else f"steps {self.step}-{self.last}"
        micro_batch = f", micro-batch {self.micro_batch}" if self.micro_batch > 1 else ""
        head = ": ".join(filter(None, (str(self.place), f"{self.what} in {when}{micro_batch}")))
        more = f", {len(self.inputs) - 3} more" if len(self.inputs) > 3 else ""
        details = [
            ("cause", "; ".join(filter(None, (self.cause.text, self.elements)))),
            ("inputs", ", ".join([each.text for each in self.inputs[:3]]) + more),
            ("producer", str(self.producer or "")),
            ("fix" if self.fix.verified else "untested", self.fix.code),
            ("verified", self.fix.result),
            *(("tried", f"without success: {each}") for each in self.fix.tried),
        ]
        lines = _wrapped(f"{self.grade}: {head}", "  ", width)
        for label, text in details:
            if text:
                lines += _wrapped(f"  {label:{_LABEL}}{text}", " " * (_LABEL + 2), width)
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of the JSON."""
        own = {key: value for key, value in vars(self).items() if not isinstance(value, (Cause, Fix, Place, tuple))}
        return {
            **own,
            **vars(self.place),
            "fix": self.fix.code,
            "verified": self.fix.verified,
            "result": self.fix.result,
            "tried": self.fix.tried,
            "kind": self.kind,
            "cause": self.cause.text,
            "inputs": [each.text for each in self.inputs],
            "producer": None if self.producer is None else vars(self.producer),
        }


def _wrapped(text: str, indent: str, width: int | None) -> list[str]:
    if width is None:
        return [text]
    return textwrap.wrap(text, max(width, 40), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


@dataclass
class Report:
    """All findings of an examination. Truthy with an error or a precision loss; `str` is the text for the terminal."""

    findings: list[Finding] = field(default_factory=list)
    skipped: list[Finding] = field(default_factory=list)  # a scaler skips these: normal while its scale settles
    incomplete: str = ""  # why the run did not reach its end; "" if it did
    compiled: bool = False  # compiled functions ran, eagerly
    steps: int = 0
    operators: int = 0
    rank: int | None = None  # of this process; None without other ranks
    not_checked: list[str] = field(default_factory=list)
    losses: Losses = field(default_factory=dict)
    comparison: str = ""  # of the training with the same in float32, in words; "" if nothing was compared
    trains_as_well: bool = False  # the comparison found no difference
    skips: int = 0  # steps that a scaler skipped
    last_skip: int = 0

    def __bool__(self) -> bool:
        return any(finding.grade != "note" for finding in self.findings)

    @property
    def skips_many(self) -> bool:
        """Whether a scaler skipped more steps than while its scale settles."""
        return self.skips >= _MANY_SKIPS and self.skips >= 0.3 * self.steps

    @property
    def status(self) -> Status:
        """ "found", "inconclusive" if nothing was found and the run did not reach its end, or "clean"."""
        return "found" if self else "inconclusive" if self.incomplete else "clean"

    @property
    def nonfinite(self) -> list[Finding]:
        """The findings of inf and NaN, in the order in which they were found."""
        return [finding for finding in self.findings if finding.check in ("nonfinite", "data")]

    def add(self, finding: Finding, *, skipped: bool = False) -> bool:
        """Add a finding, or count it with an earlier one that is like it. Return whether it is new."""
        findings = self.skipped if skipped else self.findings
        for earlier in findings:
            # Inf and NaN from before a step follow from the first ones that were found.
            is_old = finding.kind == "arrived" and earlier.check in ("nonfinite", "data") and earlier.grade == "error"
            if is_old or earlier.is_like(finding):
                earlier.merge(finding)
                return False
        finding.last = max(finding.last, finding.step)
        findings.append(finding)
        return True

    def ranked(self) -> list[Finding]:
        """Return all findings: causes before their consequences, then by grade and step.

        Errors of the loop and verified fixes come first.
        """

        def order(finding: Finding) -> tuple[int, int, bool, int]:
            grade = GRADES.index(finding.grade)
            is_certain = finding.check == "loop order" and grade == 0
            certain = 0 if is_certain else 1 if finding.fix.verified and grade < 2 else 2
            return certain, grade, finding.unused, finding.step

        return sorted(self.findings, key=order)

    def text(self, width: int | None = None) -> str:
        """Return the report as text, in lines of at most `width` characters."""
        rank = f"rank {self.rank}: " if self.rank is not None else ""
        before = [_COMPILED] if self.compiled else []
        before += [f"{rank}the run did not reach its end: {self.incomplete}"] if self.incomplete else []
        findings: list[str] = []
        for finding in self.ranked():
            first, *rest = finding.lines(None if width is None else width - len(rank))
            findings += [rank + first, *rest]
        counts = [(grade, sum(each.grade == grade for each in self.findings)) for grade in GRADES]
        found = ", ".join(_counted(count, grade) for grade, count in counts if count)
        nothing = "no problems found" if self.trains_as_well else "no findings"
        after = [f"checked {self.operators} operators in {_counted(self.steps, 'step')}: {found or nothing}"]
        if self.skips:
            after.append(f"the scaler skipped {self.skips} of {self.steps} steps, the last in step {self.last_skip}")
        after += [self.comparison] if self.comparison else []
        after += [f"not checked: {text}" for text in self.not_checked]

        def wrapped(texts: Iterable[str]) -> list[str]:
            return [line for text in texts for line in _wrapped(text, "  ", width)]

        return "\n".join([*wrapped(before), *findings, *wrapped(rank + text for text in after)])

    def __str__(self) -> str:
        return self.text(terminal_width())

    def to_json(self) -> str:
        """Return the report as JSON text."""
        head = {"kind": "ampkit.debugging.report", "version": VERSION, "status": self.status, "text": self.text()}
        body = {each.name: getattr(self, each.name) for each in fields(self)}
        body["findings"] = [{"rank": i, **each.to_dict()} for i, each in enumerate(self.ranked(), 1)]
        body["skipped"] = [each.to_dict() for each in self.skipped]
        body["losses"] = [
            {"file": file, "line": line, "steps": list(steps), "losses": list(steps.values())}
            for (file, line), steps in self.losses.items()
        ]
        return json.dumps(plain({**head, **body}), indent=1, allow_nan=False)


class NonFiniteError(FloatingPointError):
    """The error of `Examination(on_nonfinite="raise")`: a step has inf or NaN. Its message is the report as text.

    Attributes:
        report: the `Report`.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(report.text())
        self.report = report


def _counted(count: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{plural}"


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
