"""The reports of the debugging tools: what they found, as text for the terminal, as a status and as JSON.

`docs/reference/debugging.md` lists the keys of the JSON. JSON has no inf and no NaN: such numbers are the strings
"inf", "-inf" and "nan".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

from ampkit.debugging.causes import PASSED_ON, Cause
from ampkit.text_tables import table

Status = Literal["clean", "found", "inconclusive"]
Grade = Literal["wrong", "lost", "note"]
_GRADES: dict[str, str] = {"wrong": "certainly wrong", "lost": "numbers are lost", "note": "worth knowing"}
VERSION = 1
LARGEST_HARMLESS_CHANGE = 0.01  # a share of the loss, expected from the rounding of one module
COMPILED = (
    "compiled functions run eagerly here: if the loss of your compiled run is finite and right, this report "
    "does not apply to that run"
)


@dataclass
class LoopFinding:
    """A mistake of a training loop, the line that makes it, and the change."""

    what: str
    file: str
    line: int
    change: str
    first: int  # iteration: the number of optimizer steps before it, skipped steps included
    last: int
    grade: Grade = "wrong"
    called_from: tuple[str, int] = ("", 0)  # file and line of the script that led there, if it is another file

    def __str__(self) -> str:
        when = f"iteration {self.first}" if self.first == self.last else f"iterations {self.first} to {self.last}"
        line = f"{self.file}:{self.line}{_called_from(self.called_from)}"
        return f"{self.what}, in {when}\n  line      {line}\n  change    {self.change}"


@dataclass(kw_only=True)
class Report:
    """The findings of a tool; falsy without any. `str` is the text for the terminal."""

    kind: ClassVar[str]
    incomplete: str = ""  # why the steps did not run to their end; "" where they did
    compiled: bool = False  # compiled functions ran, eagerly
    loop: list[LoopFinding] = field(default_factory=list)  # mistakes of the loop

    @property
    def status(self) -> Status:
        """ "found" with findings; without, "inconclusive" if the steps did not run to their end, else "clean"."""
        if self:
            return "found"
        return "inconclusive" if self.incomplete else "clean"

    def __bool__(self) -> bool:
        return bool(self.loop)

    def first_lines(self) -> list[str]:
        """Return the lines that every report begins with: about compiled functions, and mistakes of the loop."""
        return [*([COMPILED] if self.compiled else []), *map(str, self.loop)]

    def to_json(self) -> str:
        """Return the whole report as JSON text."""
        head = {"kind": f"ampkit.debugging.{self.kind}", "version": VERSION, "status": self.status, "text": str(self)}
        return json.dumps(plain({**head, **asdict(self)}), indent=1, allow_nan=False)


@dataclass
class LoopReport(Report):
    """The report of `check_loop`."""

    kind = "loop"
    iterations: int = 0

    def __str__(self) -> str:
        if self.loop:
            return "\n".join(self.first_lines())
        iterations = _counted(self.iterations, "iteration")
        if self.status == "inconclusive":
            return f"inconclusive: {self.incomplete}. Nothing was found until then: {iterations}"
        return (
            f"nothing found in {iterations}. Checked are the order of scale, backward, unscale_, clipping, steps, "
            "update, clearing of gradients and schedulers, and whether summed losses are divided"
        )


@dataclass(frozen=True)
class Operation:
    """One operator call, or (`op` "") a tensor that was there before the step.

    For an operator of backward, module and line are those of its forward operator. Where the user's code runs in
    backward, as in a hook, the line is the one there.
    """

    index: int  # in the order of execution; -1 for a tensor
    op: str
    phase: str  # "forward", "backward", "recompute", "optimizer", "scaler" or "before"
    module: str  # path from the model; a class name where it has no path, as the model; "" outside of all
    call: int  # number of the module's call in the step, from 1; 0 if not known
    file: str
    line: int
    backward_of: str  # in backward, the forward operator
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name()}{self.where()}"

    def name(self) -> str:
        """The operator; with the dtype for a cast, and with the forward operator for an operator of backward."""
        if not self.op:
            return f"a tensor, {self.dtype}{list(self.shape)}"
        name = f"the cast to {self.dtype} ({self.op})" if self.op == "aten::_to_copy" else self.op
        backward = "" if self.phase != "backward" else f" in backward of {self.backward_of or 'an unseen operator'}"
        return f"{name}{backward}"

    def where(self) -> str:
        """The module, the number of its call and the line, as far as they are known."""
        number = f" (call {self.call})" if self.call > 1 else ""
        module = f", {self.module}{number}" if self.module else ""
        return module + (f", {self.file}:{self.line}" if self.file else "")


@dataclass(frozen=True)
class Suggestion:
    """A suggested edit. `kind`: "change" is code, "advice" is what helps such operators in the user's own code.

    A change that was tried and failed is never suggested: it is listed in `tried`.
    """

    code: str
    kind: Literal["change", "advice"] = "advice"
    verified: bool = False  # steps with the change were finite
    evidence: str = ""
    tried: tuple[str, ...] = ()  # changes that did not help

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        return [
            f"  {self.kind:9} {self.code}",
            f"  evidence  {self.evidence}",
            *(f"  tried     did not help: {change}" for change in self.tried),
        ]


@dataclass
class Finding:
    """One origin of non-finite values, and the symptom that it leads to."""

    origin: Operation
    device: str
    micro_batch: int  # number of the backward call in the step
    symptom: str = ""  # "the loss is nan"
    parameter: str = ""  # whose gradient or value the symptom is, or the parameter that arrived broken
    cause: Cause = PASSED_ON
    inputs: tuple[str, ...] = ()  # of the origin, as they were before the call
    step: int = 0  # number of optimizer steps before it, skipped steps included
    scale: float | None = None  # the loss scale
    skipped: bool = False  # a scaler skips the step because of it, as it should
    times: int = 1  # how often it was found at the same place
    suggestion: Suggestion | None = None
    elements: str = ""  # how many are broken, and in which rows
    made: Operation | None = None  # the operator that computed the 0 or inf that the origin cannot take
    makers: tuple[Operation, ...] = ()  # all that rounded such a value, by their share
    last: int = 0  # the last step in which it was found
    unused: bool = False  # no loss, gradient, parameter or number that the program reads depends on it

    def __str__(self) -> str:
        shown = list(self.inputs[:3])
        if len(self.inputs) > 3:
            shown.append(f"{len(self.inputs) - 3} more")
        inputs = "; inputs " + ", ".join(shown) if shown else ""
        micro_batch = f", micro-batch {self.micro_batch}" if self.micro_batch > 1 else ""
        times = f", found {self.times} times" if self.times > 1 else ""
        return "\n".join(
            [
                f"{self.symptom} in step {self.step}{micro_batch}{times}",
                f"  origin    {self.origin}" + (f": {self.elements}" if self.elements else ""),
                f"  why       {self.why()}{inputs}",
                *(self.suggestion.lines() if self.suggestion is not None else ()),
            ]
        )

    def why(self) -> str:
        """Return the cause in words, with the operator that made the value that the cause is about."""
        if self.made is None:
            return self.cause.text
        made = f"{self.made.op}{self.made.where()}"
        return f"{self.cause.text}, in {made}" if self.cause.kind == "rounded" else f"{self.cause.text}; from {made}"

    def is_like(self, other: Finding) -> bool:
        """Whether another finding has the same operator, place and kind of cause."""
        place, other_place = (
            replace(finding.origin, index=0, phase="", call=0, dtype="", shape=()) for finding in (self, other)
        )
        return place == other_place and self.cause.kind == other.cause.kind


@dataclass
class NonFiniteReport(Report):
    """The report of `detect_nonfinite` and `find_nonfinite`."""

    kind = "nonfinite"
    findings: list[Finding] = field(default_factory=list)
    skipped: list[Finding] = field(default_factory=list)  # a scaler skips these: normal while its scale settles
    steps: int = 0
    operators: int = 0
    rank: int | None = None  # of this process; None where it is alone
    note: str = ""

    def __bool__(self) -> bool:
        return bool(self.findings or self.loop)

    def __str__(self) -> str:
        rank = f"rank {self.rank}: " if self.rank is not None else ""
        checked = f"{self.operators} operators in {_counted(self.steps, 'step')}"
        blocks = self.first_lines() + [f"{rank}{finding}" for finding in self.findings[:1]]
        blocks += [
            f"{rank}then {finding.symptom} in step {finding.step}: {finding.origin}: {finding.why()}"
            for finding in self.findings[1:]
        ]
        if self.incomplete and not self.findings:
            blocks.append(f"{rank}inconclusive: {self.incomplete}. Nothing was found until then: {checked}")
        elif not self.findings:
            blocks.append(f"{rank}no inf or NaN reached a loss, a gradient, a parameter or a result: {checked}")
        blocks += [
            f"{rank}the loss scaler skips step {finding.step}: {finding.cause.text} "
            f"at a scale of {finding.scale or 0:g}, in {finding.origin}"
            for finding in self.skipped
        ]
        if self.note:
            blocks.append(f"note: {self.note}")
        return "\n".join(blocks)

    def add(self, finding: Finding) -> bool:
        """Add a finding, or count it with an earlier finding at the same place. Returns whether it is new."""
        findings = self.skipped if finding.skipped else self.findings
        for earlier in findings:
            if earlier.is_like(finding) or (finding.cause.kind == "arrived" and self.findings):
                earlier.times, earlier.last = earlier.times + 1, finding.step
                earlier.unused = earlier.unused and finding.unused
                return False
        finding.last = finding.step
        findings.append(finding)
        return True


@dataclass
class Problem:
    """One entry of the ranked report: a place in the user's code, why, and what to change.

    `grade` is "wrong" (certain), "lost" (numbers are lost) or "note" (worth knowing, no alarm). `look` is the look that
    found it, `kind` the kind of its cause.
    """

    grade: Grade
    look: str
    kind: str
    what: str  # the symptom in the user's words
    why: str = ""
    file: str = ""
    line: int = 0
    op: str = ""
    module: str = ""
    phase: str = ""
    backward_of: str = ""
    suggestion: Suggestion | None = None
    step: int = 0
    last: int = 0
    times: int = 1
    finding: Finding | None = None  # of inf and NaN
    made: Operation | None = None  # the operator that computed the value that is the cause
    called_from: tuple[str, int] = ("", 0)  # file and line of the script that led to the line, if known

    @classmethod
    def at(cls, operation: Operation, **fields: Any) -> Problem:
        """Return the problem of an operator, with its place."""
        keys = ("file", "line", "op", "module", "phase", "backward_of")
        return cls(**{key: getattr(operation, key) for key in keys}, **fields)

    @classmethod
    def of_finding(cls, finding: Finding) -> Problem:
        """Return the problem of inf or NaN."""
        data = finding.cause.kind == "arrived" and not finding.parameter
        is_harmless = finding.unused and finding.cause.kind == "undefined"  # NeRF's disparity where no ray hits is 0/0
        elements = f"; {finding.elements}" if finding.elements else ""
        inputs = "; inputs " + ", ".join(finding.inputs[:3]) if finding.inputs else ""
        return cls.at(
            finding.origin,
            grade="note" if is_harmless else "wrong",
            look="data" if data else "nonfinite",
            kind=finding.cause.kind,
            what=finding.symptom,
            why=finding.why() + elements + inputs,
            suggestion=finding.suggestion,
            step=finding.step,
            last=finding.last,
            times=finding.times,
            finding=finding,
            made=finding.made,
        )

    @classmethod
    def of_loop(cls, mistake: LoopFinding) -> Problem:
        """Return the problem of a mistake of the loop."""
        return cls(
            mistake.grade,
            "loop",
            "loop",
            mistake.what,
            file=mistake.file,
            line=mistake.line,
            suggestion=Suggestion(mistake.change, "advice"),
            step=mistake.first,
            last=mistake.last,
            called_from=mistake.called_from,
        )

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What tells it from other problems of a report."""
        return self.look, self.what, self.file, self.line

    def is_like(self, other: Problem) -> bool:
        """Whether another problem has the same place and kind."""
        keys = ("look", "kind", "what", "file", "line", "op")
        return all(getattr(self, key) == getattr(other, key) for key in keys)

    def place(self) -> str:
        """Return the file and the line, the module, and the operator, as far as they are known."""
        op = self.op.removeprefix("aten::") + (" in backward" if self.phase == "backward" else "")
        line = f"{self.file}:{self.line}{_called_from(self.called_from)}" if self.file else ""
        return ", ".join(part for part in (line, self.module, op) if part)

    def __str__(self) -> str:
        when = f"step {self.step}" if self.last <= self.step else f"steps {self.step} to {self.last}"
        lines = [f"{self.place() or 'the whole run'}: {self.what}, in {when}"]
        if self.why:
            lines.append(f"  why     {self.why}")
        if self.suggestion is not None and self.suggestion.code:
            verified = "" if self.suggestion.kind == "advice" else f"    # {self.suggestion.evidence}"
            lines.append(f"  {self.suggestion.kind:7} {self.suggestion.code}{verified}")
        return "\n".join(lines)

    def to_dict(self, rank: int) -> dict[str, Any]:
        """Return the keys of the JSON."""
        data = {key: value for key, value in vars(self).items() if key not in ("finding", "suggestion", "kind", "made")}
        change = self.suggestion or Suggestion("")
        return {
            "rank": rank,
            **data,
            "cause": self.kind,
            "made": self.made and {key: getattr(self.made, key) for key in ("file", "line", "op", "module")},
            "change": change.code if change.kind == "change" else "",
            "advice": change.code if change.kind == "advice" else "",
            "verified": change.verified,
            "evidence": change.evidence,
            "tried": list(change.tried),
        }


@dataclass
class ExaminationReport(NonFiniteReport):
    """The report of `examine`: one ranked list of all that was found.

    Truthy with a problem that is certainly wrong or loses numbers; what is only worth knowing is no finding.
    """

    kind = "examination"
    problems: list[Problem] = field(default_factory=list)  # without those of `findings` and `loop`
    unseen: list[str] = field(default_factory=list)  # what was not looked at
    suggestions: dict[Any, Suggestion] = field(default_factory=dict)  # by key of a problem, where one was tried
    losses: list[float] = field(default_factory=list)  # unscaled, one for each call of backward

    def ranked(self) -> list[Problem]:
        """Return all problems: causes before what follows from them, then by grade and step.

        Mistakes of the loop and changes that removed the symptom come first: the run with such a change had no alarm
        left. Differences to float32 come after what explains them.
        """
        places = {(each.origin.file, each.origin.line): each for each in reversed(self.findings)}
        findings = [each for each in self.findings if places[each.origin.file, each.origin.line] is each]
        for each in self.findings:
            first = places[each.origin.file, each.origin.line]
            first.last = max(first.last, each.last)
        problems = [*map(Problem.of_loop, self.loop), *map(Problem.of_finding, findings), *self.problems]
        for problem in problems:
            problem.suggestion = self.suggestions.get(problem.key, problem.suggestion)

        def order(problem: Problem) -> tuple[int, int, bool, int]:
            grade = list(_GRADES).index(problem.grade)
            verified = problem.suggestion is not None and problem.suggestion.verified
            certain = 0 if problem.look == "loop" and grade == 0 else 1 if verified and grade < 2 else 2
            is_unused = problem.finding is not None and problem.finding.unused
            return certain, grade, problem.look == "precision" or is_unused, problem.step

        return sorted(problems, key=order)

    def add_problem(self, problem: Problem) -> None:
        """Add a problem, or count it with an earlier one of the same place and kind."""
        for earlier in self.problems:
            if earlier.is_like(problem):
                earlier.times, earlier.last = earlier.times + 1, problem.step
                return
        problem.last = max(problem.last, problem.step)
        self.problems.append(problem)

    def __bool__(self) -> bool:
        return any(problem.grade != "note" for problem in self.ranked())

    def __str__(self) -> str:
        rank = f"rank {self.rank}: " if self.rank is not None else ""
        lines = [COMPILED] if self.compiled else []
        if self.incomplete:
            lines.append(f"{rank}the run did not reach its end: {self.incomplete}")
        previous = ""
        for problem in self.ranked():
            if problem.grade != previous:
                lines.append(f"{_GRADES[problem.grade]}:")
                previous = problem.grade
            lines.append(rank + str(problem))
        if not self:
            lines.append(f"{rank}no fault found")
        checked = f"{self.operators} operators in {_counted(self.steps, 'step')}"
        if self.skipped:
            checked += (
                f"; the scaler skipped {_counted(sum(each.times for each in self.skipped), 'step')}, as it should"
            )
        lines.append(f"looked at {checked}" + "".join(f"; not at {text}" for text in self.unseen))
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the whole report as JSON text."""
        keys = ("incomplete", "steps", "operators", "rank", "compiled", "unseen")
        head = {"kind": f"ampkit.debugging.{self.kind}", "version": 2, "status": self.status, "text": str(self)}
        findings = [problem.to_dict(i) for i, problem in enumerate(self.ranked(), 1)]
        body = {key: getattr(self, key) for key in keys}
        body["loss"] = [self.losses[0], self.losses[-1]] if self.losses else [None, None]
        return json.dumps(plain({**head, **body, "findings": findings}), indent=1, allow_nan=False)


class NonFiniteError(FloatingPointError):
    """The error of `detect_nonfinite`: a step's inf or NaN reached its loss, a gradient, a parameter or a result.

    Its message is the report as text.

    Attributes:
        report: the `NonFiniteReport`.
    """

    def __init__(self, report: NonFiniteReport) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True, kw_only=True)
class OperatorError(Operation):
    """The errors of one operator call: 2-norms of differences as shares of the reference's norm, inf after an overflow.

    `total` is the error against the reference run. `local` is the operator's own rounding: against the same operator
    in the reference's dtype on the same inputs. `propagated` is the error that came in with the inputs, and
    `amplification` its ratio to the largest error of an input, most of which the call with the index `error_from` made
    (-1 without such a call). `lost` is the share of elements that the operator makes zero and that are not zero in the
    reference. `largest` is the largest magnitude in the reference, `norm` the reference's 2-norm.
    """

    total: float
    local: float
    propagated: float
    amplification: float
    error_from: int
    lost: float
    largest: float
    norm: float


@dataclass(frozen=True)
class GradientError:
    """The error of a parameter's gradient: `error` relative to its own norm, `share` to the norm of all gradients.

    `lost` is the share of elements that are 0 and not 0 in the reference. A gradient that is zero in exact arithmetic
    is nothing but rounding: its `error` means nothing, its `share` does.
    """

    error: float
    share: float
    lost: float
    norm: float


@dataclass(frozen=True)
class LostUpdate:
    """A tensor in 16 bits where more than half of the elements of an update are rounded away."""

    what: str  # the name of the parameter that an optimizer updates, or the operator that updates in place
    share: float  # of the elements that the update should change
    dtype: str
    file: str
    line: int
    by_optimizer: bool


@dataclass
class PrecisionReport(Report):
    """The report of `compare_precision`.

    Truthy with mistakes of the loop, where gradients over- or underflowed, and where a module's rounding is expected to
    change the loss.
    """

    kind = "precision"
    reference: str
    operators: list[OperatorError] = field(default_factory=list)
    gradients: dict[str, GradientError] = field(default_factory=dict)  # by parameter
    results: list[float] = field(default_factory=list)  # the errors of the tensors that the step returned
    loss_changes: dict[str, float] = field(
        default_factory=dict
    )  # shares of the loss, expected from the rounding of modules
    lost_updates: list[LostUpdate] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)  # operators that have no reference of their own, and why
    given: dict[str, str] = field(default_factory=dict)  # tensors in 16 bits from before the step: dtype by name
    suggestion: Suggestion | None = None
    scale: float = 1.0  # the loss scale
    loss: float | None = None
    reference_loss: float | None = None
    step: int = 0  # number of optimizer steps before it

    def __bool__(self) -> bool:
        overflowed = not (math.isfinite(self.gradient_error) or self.is_left_to_scaler)
        return bool(self.loop or self.gone or overflowed or self.fragile)

    @property
    def fragile(self) -> dict[str, float]:
        """The expected changes of the loss that are large, by module.

        Code outside of modules has no name. Its change is one sample and no expectation: it counts from 5 % on.
        """
        limit = LARGEST_HARMLESS_CHANGE
        return {name: change for name, change in self.loss_changes.items() if change > (limit if name else 0.05)}

    @property
    def gradient_error(self) -> float:
        """The error of all gradients together."""
        return math.hypot(*(gradient.share for gradient in self.gradients.values()))

    @property
    def error(self) -> float:
        """The largest error among those of all gradients together, of the loss, and of the step's results."""
        errors = [self.gradient_error, *self.results]
        if self.loss is not None and self.reference_loss is not None:
            errors.append(abs(self.loss - self.reference_loss) / (abs(self.reference_loss) or 1.0))
        return max(errors)

    @property
    def is_far_off(self) -> bool:
        """Whether something should change: the loss would change, gradients are far off, or updates are lost.

        Without gradients the results are compared instead.
        """
        error, limit = (self.gradient_error, 1 / 3) if self.gradients and not self.accumulates else (self.error, 0.05)
        return bool(self.lost_updates) or not (self.is_left_to_scaler or (error < limit and not self.fragile))

    @property
    def accumulates(self) -> bool:
        """Whether the largest error began where backward adds up gradients of 16 bits."""
        origin = self.error_origin()
        return origin is not None and (origin.op, origin.phase, origin.backward_of) == (
            "aten::add_.Tensor",
            "backward",
            "",
        )

    @property
    def gone(self) -> list[str]:
        """Parameters whose gradient is 0 almost everywhere, though not negligible in the reference."""
        norm = math.hypot(*(gradient.norm for gradient in self.gradients.values()))
        return [
            name for name, gradient in self.gradients.items() if gradient.lost > 0.99 and gradient.norm > 1e-6 * norm
        ]

    @property
    def is_left_to_scaler(self) -> bool:
        """Whether gradients overflow only because of the loss scale: a scaler skips the step and halves the scale."""
        return not math.isfinite(self.gradient_error) and 1 <= (self.recommended_scale or 0) < self.scale

    @property
    def recommended_scale(self) -> float | None:
        """The largest power of two times `scale` with which no float16 result of backward overflows."""
        largest = [call.largest for call in self.operators if call.phase == "backward" and call.dtype == "float16"]
        return self.scale * 2.0 ** math.floor(math.log2(65504 / max(largest))) if any(largest) else None

    @property
    def underflows(self) -> bool:
        """Whether gradients are 0 because they underflow in float16 in backward."""
        return bool(self.gone) and any(
            call.phase == "backward" and call.dtype == "float16" and call.lost > 0.5 for call in self.operators
        )

    @property
    def amplified(self) -> OperatorError | None:
        """The call that amplifies an error most; None if no call does."""
        worst = _worst(filter(self._matters, self.operators), lambda call: call.amplification)
        return worst if worst is not None and worst.amplification > 1 else None

    def error_origin(self) -> OperatorError | None:
        """Return the call where the largest error began: the one that is amplified later, else the largest rounding.

        Where the rounding of modules changes the loss, it is a call of one of them.
        """
        made = None if self.amplified is None else self._made_input_error(self.amplified)
        origin = made or _worst(self.operators, lambda call: call.local)
        if origin is not None and self.fragile and origin.module not in self.fragile:
            module = next(iter(self.fragile))
            return _worst((call for call in self.operators if call.module == module), lambda call: call.local) or origin
        return origin

    def _made_input_error(self, call: OperatorError) -> OperatorError | None:
        """The call that made most of the error of another call's inputs."""
        return next((earlier for earlier in self.operators if earlier.index == call.error_from), None)

    def _matters(self, call: OperatorError) -> bool:
        """Whether a call's error reaches anything: a gradient that is zero in exact arithmetic is nothing but error."""
        gradients = self.scale * math.hypot(*(gradient.norm for gradient in self.gradients.values()))
        return call.propagated > 1e-3 and (call.phase != "backward" or call.total * call.norm > 1e-3 * gradients)

    def __str__(self) -> str:
        return "\n".join([*self.first_lines(), *self._own_lines()])

    def _own_lines(self) -> list[str]:
        if self.incomplete and not self.operators:
            return [f"inconclusive: {self.incomplete}"]
        if not self.operators:
            return [f"no operator of step {self.step} computed in less than {self.reference}"]
        lines = [f"{self._symptom()} in step {self.step}, against the same step in {self.reference}"]
        if self.fragile:
            first = list(self.fragile.items())[:3]
            changes = [f"{100 * change:.2g} % by the rounding in {name or 'no module'}" for name, change in first]
            lines.append(f"  loss      rises by about {', '.join(changes)}")
        rounded = _worst(self.operators, lambda call: call.local)
        if rounded is not None:
            how = "overflow  by" if math.isinf(rounded.local) else f"rounded   {rounded.local:.2g} by"
            lines.append(f"  {how} {rounded}, {rounded.dtype}")
        amplified = self.amplified
        if amplified is not None:
            times, error = amplified.amplification, amplified.propagated
            lines.append(f"  amplified {times:.3g} times, to {error:.2g}, by {amplified}")
            made = self._made_input_error(amplified)
            if made is not None:
                lines.append(f"  made      by {made}, {made.dtype}")
        lost = _worst(self.operators, lambda call: call.lost)
        if lost is not None:
            lines.append(f"  to zero   {lost.lost:.2%} by {lost}, {lost.dtype}")
        if self.lost_updates:
            most = max(self.lost_updates, key=lambda update: update.share)
            more = f" and {len(self.lost_updates) - 1} more" if len(self.lost_updates) > 1 else ""
            lines.append(
                f"  updates   {most.share:.0%} lost {'of' if most.by_optimizer else 'by'} {most.what}{more}: "
                f"rounded away in {most.dtype}, {most.file}:{most.line}"
            )
        if self.recommended_scale is not None:
            lines.append(f"  scale     {self.scale:g}; up to {self.recommended_scale:g} nothing overflows in backward")
        lines += [f"  unseen    {op}: {why}" for op, why in self.opaque.items()]
        if self.given:
            names = list(self.given)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  given     {', '.join(names[:3])}{more}: in 16 bits before the step, and not compared")
        return lines + (self.suggestion.lines() if self.suggestion is not None else [])

    def _symptom(self) -> str:
        parts = []
        if self.gone:
            parts.append(f"the gradients of {len(self.gone)} of {len(self.gradients)} parameters underflow to 0")
        elif self.is_left_to_scaler:
            parts.append(f"gradients overflow at a loss scale of {self.scale:g}, and a scaler skips the step")
        elif self.gradients:
            parts.append(f"gradients are {self.gradient_error:.2g} off")
        elif self.results:
            parts.append(f"results are {max(self.results):.2g} off")
        if self.loss is not None and self.reference_loss is not None:
            parts.append(f"the loss is {self.loss:.6g} instead of {self.reference_loss:.6g}")
        return ", ".join(parts) or f"{len(self.operators)} operators were compared"

    def table(self, rows: int = 20) -> str:
        """Return a table of the call with the largest rounding in each module, forward and backward apart.

        Args:
            rows: the most rows, without the header.
        """
        worst: dict[tuple[str, str], OperatorError] = {}
        for call in sorted(self.operators, key=lambda call: call.local, reverse=True):
            worst.setdefault((call.module, call.phase), call)
        numbers = ("local", "total", "amplified", "to zero")
        cells = [(*numbers, "phase", "module", "operator")]
        cells += [
            (
                f"{call.local:.2g}",
                f"{call.total:.2g}",
                f"{call.amplification:.3g}",
                f"{call.lost:.2%}",
                call.phase,
                call.module or "(none)",
                call.op,
            )
            for call in list(worst.values())[:rows]
        ]
        return "\n".join(table(cells, flush_right=numbers))


def _worst(calls: Iterable[OperatorError], by: Callable[[OperatorError], float]) -> OperatorError | None:
    worst = max(calls, key=by, default=None)
    return worst if worst is not None and by(worst) > 0 else None


def _called_from(line: tuple[str, int]) -> str:
    return f" (called from {line[0]}:{line[1]})" if line[0] else ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def plain(value: Any) -> Any:
    """`value` as JSON can hold it."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
