"""What the tools report: text for the terminal, a status, JSON.

`docs/reference/debugging.md` lists the keys of the JSON. It has no inf and no NaN: such numbers are the strings "inf",
"-inf" and "nan".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

from ampkit.debugging.causes import PASSED_ON, Cause

Status = Literal["clean", "found", "inconclusive"]
VERSION = 1
COMPILED = ("compiled functions run eagerly here: where the loss of your own run is finite and right, what follows is "
            "not of that run")


@dataclass
class LoopFinding:
    """Something that a loop does wrong, the line that does it, and the change."""

    what: str
    file: str
    line: int
    change: str
    first: int      # iteration, by steps of optimizers before it, skipped ones counted
    last: int

    def __str__(self) -> str:
        when = f"iteration {self.first}" if self.first == self.last else f"iterations {self.first} to {self.last}"
        return f"{self.what}, in {when}\n  line      {self.file}:{self.line}\n  change    {self.change}"


@dataclass(kw_only=True)
class Report:
    """What a tool found; falsy if nothing. `str` is what the terminal shows."""

    kind: ClassVar[str]
    incomplete: str = ""        # why the steps did not run to their end
    compiled: bool = False      # compiled functions ran, eagerly
    loop: list[LoopFinding] = field(default_factory=list)       # what the loop does in the wrong order

    @property
    def status(self) -> Status:
        """"found"; "inconclusive" where nothing was, and the steps did not run to their end; or "clean"."""
        return "found" if self else "inconclusive" if self.incomplete else "clean"

    def __bool__(self) -> bool:
        return bool(self.loop)

    def first_lines(self) -> list[str]:
        """What is said before anything else."""
        return [*([COMPILED] if self.compiled else []), *map(str, self.loop)]

    def to_json(self) -> str:
        """All of it as JSON text."""
        head = {"kind": f"ampkit.debugging.{self.kind}", "version": VERSION, "status": self.status, "text": str(self)}
        return json.dumps(plain({**head, **asdict(self)}), indent=1, allow_nan=False)


@dataclass
class LoopReport(Report):
    """What `check_loop` found."""

    kind = "loop"
    iterations: int = 0

    def __str__(self) -> str:
        if self.loop:
            return "\n".join(self.first_lines())
        looked = "1 iteration" if self.iterations == 1 else f"{self.iterations} iterations"
        if self.status == "inconclusive":
            return f"inconclusive: {self.incomplete}. Nothing was found until then: {looked}"
        return (f"nothing found in {looked}, of what is looked at: the order of scale, backward, unscale_, clipping, "
                "steps, update, clearing and schedulers, and losses that are summed undivided")


@dataclass(frozen=True)
class Operation:
    """One operator call, or (`op` "") a tensor that was there before. Of backward the place is its forward's, but the
    line where code of the user's runs in it."""

    index: int              # in the order of execution; -1 for a tensor
    op: str
    phase: str              # "forward", "backward", "recompute", "optimizer", "scaler" or "before"
    module: str             # path from the model; a class for what has none, as the model itself; "" outside any
    call: int               # which call of the module in the step, from 1; 0 if not known
    file: str
    line: int
    backward_of: str        # in backward, the forward operator
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.what()}{self.where()}"

    def what(self) -> str:
        """The operator; of a cast, its dtype too, and of backward, its forward."""
        if not self.op:
            return f"a tensor, {self.dtype}{list(self.shape)}"
        name = f"the cast to {self.dtype} ({self.op})" if self.op == "aten::_to_copy" else self.op
        backward = "" if self.phase != "backward" else f" in backward of {self.backward_of or 'an unseen operator'}"
        return f"{name}{backward}"

    def where(self) -> str:
        """The module, its call and the line, as far as they are known."""
        number = f" (call {self.call})" if self.call > 1 else ""
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

    def lines(self) -> list[str]:
        """For the terminal."""
        return [f"  {self.kind:9} {self.code}", f"  evidence  {self.evidence}",
                *(f"  in vain   {one}" for one in self.tried)]


@dataclass
class Finding:
    """One origin of non-finite values, and the symptom that it leads to."""

    origin: Operation
    device: str
    micro_batch: int                # by calls of backward in the step
    symptom: str = ""               # "the loss is nan"
    parameter: str = ""             # whose gradient or value the symptom is, or the parameter that arrived broken
    cause: Cause = PASSED_ON
    inputs: tuple[str, ...] = ()    # of the origin, as they were before the call
    step: int = 0                   # optimizer steps before it, skipped ones counted
    scale: float | None = None      # the loss scale
    skipped: bool = False           # a scaler met it and skips the step, as it should
    times: int = 1                  # further findings at the same place are counted
    suggestion: Suggestion | None = None
    elements: str = ""              # how many are broken, and in which rows
    made: Operation | None = None   # what computed the 0 or inf that the origin cannot take

    def __str__(self) -> str:
        shown = [*self.inputs[:3]] + [f"{len(self.inputs) - 3} more"] * (len(self.inputs) > 3)
        inputs = "; inputs " + ", ".join(shown) if shown else ""
        micro_batch = f", micro-batch {self.micro_batch}" if self.micro_batch > 1 else ""
        times = f", {self.times} times alike" if self.times > 1 else ""
        return "\n".join([
            f"{self.symptom} in step {self.step}{micro_batch}{times}",
            f"  origin    {self.origin}" + (f": {self.elements}" if self.elements else ""),
            f"  why       {self.why()}{inputs}",
            *(self.suggestion.lines() if self.suggestion is not None else ()),
        ])

    def why(self) -> str:
        """The cause, with the place where the value was made that it is about."""
        if self.made is None:
            return self.cause.text
        made = f"{self.made.op}{self.made.where()}"
        return f"{self.cause.text}, in {made}" if self.cause.kind == "rounded" else f"{self.cause.text}; from {made}"

    def is_like(self, other: Finding) -> bool:
        """Whether another one is of the same operator, place and kind."""
        one, two = (replace(it.origin, index=0, phase="", call=0, dtype="", shape=()) for it in (self, other))
        return one == two and self.cause.kind == other.cause.kind


@dataclass
class NonFiniteReport(Report):
    """What `detect_nonfinite` and `find_nonfinite` found."""

    kind = "nonfinite"
    findings: list[Finding] = field(default_factory=list)
    skipped: list[Finding] = field(default_factory=list)    # what a scaler met: normal while its scale settles
    steps: int = 0
    operators: int = 0
    rank: int | None = None     # of several processes
    note: str = ""

    def __bool__(self) -> bool:
        return bool(self.findings or self.loop)

    def __str__(self) -> str:
        rank = f"rank {self.rank}: " if self.rank is not None else ""
        looked = f"{self.operators} operators in {self.steps} {'step' if self.steps == 1 else 'steps'}"
        blocks = self.first_lines() + [f"{rank}{finding}" for finding in self.findings[:1]]
        blocks += [
            f"{rank}then {finding.symptom} in step {finding.step}: {finding.origin}: {finding.why()}"
            for finding in self.findings[1:]
        ]
        if self.incomplete and not self.findings:
            blocks.append(f"{rank}inconclusive: {self.incomplete}. Nothing was found until then: {looked}")
        elif not self.findings:
            blocks.append(f"{rank}no inf or NaN reached a loss, a gradient, a parameter or a result: {looked}")
        blocks += [
            f"{rank}step {finding.step} was left to the loss scaler, which skips it: {finding.cause.text} "
            f"at a scale of {finding.scale or 0:g}, in {finding.origin}" for finding in self.skipped
        ]
        return "\n".join([*blocks, *([f"note: {self.note}"] if self.note else [])])

    def add(self, finding: Finding) -> bool:
        """Add a finding, or count it with one at the same place. Returns whether it is new."""
        into = self.skipped if finding.skipped else self.findings
        for other in into:
            if other.is_like(finding) or (finding.cause.kind == "arrived" and self.findings):
                other.times += 1
                return False
        into.append(finding)
        return True


class NonFiniteError(FloatingPointError):
    """A step made inf or NaN that reached its loss, a gradient, a parameter or a result. `report` has it all."""

    def __init__(self, report: NonFiniteReport) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True, kw_only=True)
class OperatorError(Operation):
    """One operator call. Errors are 2-norms of differences, relative to the reference's; inf where a result overflowed.

    `total` is from the reference run; `local` from the same operator in the reference's dtype on the same inputs: its
    own rounding; `propagated` is what came in with the inputs; `amplification` that over the largest error among them,
    which was mostly made by the call with the index `error_from`, -1 without one.
    `lost` is the share of elements that the operator itself makes zero and that would not be. `largest` is the largest
    magnitude in the reference, `norm` its 2-norm.
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
    """A parameter's gradient. `error` is relative to its own norm, `share` to the norm of all gradients together.

    A gradient that is zero in exact arithmetic is all rounding, and its `error` means nothing: `share` does.
    """

    error: float
    share: float
    lost: float
    norm: float


@dataclass(frozen=True)
class LostUpdate:
    """A tensor in 16 bits of which an update changes less than half of the elements that it is to change."""

    what: str       # the parameter by name that an optimizer updates, or the operator that updates something in place
    share: float    # that is rounded away
    dtype: str
    file: str
    line: int
    by_optimizer: bool


@dataclass
class PrecisionReport(Report):
    """What `compare_precision` measured; found are gradients that overflowed or are gone, and what the loop does."""

    kind = "precision"
    reference: str
    operators: list[OperatorError] = field(default_factory=list)
    gradients: dict[str, GradientError] = field(default_factory=dict)       # by parameter
    results: list[float] = field(default_factory=list)      # the errors of the tensors that the step returned
    lost_updates: list[LostUpdate] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)    # operators without a reference of their own, and why
    given: dict[str, str] = field(default_factory=dict)     # what came in 16 bits: its dtype, by name
    suggestion: Suggestion | None = None
    scale: float = 1.0
    loss: float | None = None
    reference_loss: float | None = None
    step: int = 0

    def __bool__(self) -> bool:
        overflowed = not (math.isfinite(self.gradient_error) or self.is_left_to_scaler)
        return bool(self.loop or self.gone or overflowed)

    @property
    def gradient_error(self) -> float:
        """Of all gradients together."""
        return math.hypot(*(one.share for one in self.gradients.values()))

    @property
    def error(self) -> float:
        """The largest among those of the gradients together, of the loss, and of what the step returned."""
        errors = [self.gradient_error, *self.results]
        if self.loss is not None and self.reference_loss is not None:
            errors.append(abs(self.loss - self.reference_loss) / (abs(self.reference_loss) or 1.0))
        return max(errors)

    @property
    def is_far_off(self) -> bool:
        """Whether something should change."""
        return bool(self.lost_updates) or not (self.error < 0.05 or self.is_left_to_scaler)

    @property
    def gone(self) -> list[str]:
        """Parameters whose gradient is 0 almost everywhere, and in the reference a part of all that counts."""
        norm = math.hypot(*(one.norm for one in self.gradients.values()))
        return [name for name, one in self.gradients.items() if one.lost > 0.99 and one.norm > 1e-6 * norm]

    @property
    def is_left_to_scaler(self) -> bool:
        """Whether gradients overflow at the loss scale alone: a scaler skips the step, and halves it."""
        return not math.isfinite(self.gradient_error) and 1 <= (self.recommended_scale or 0) < self.scale

    @property
    def recommended_scale(self) -> float | None:
        """The largest power of two times `scale` with which no float16 result of backward overflows."""
        low = [one.largest for one in self.operators if one.phase == "backward" and one.dtype == "float16"]
        return self.scale * 2.0 ** math.floor(math.log2(65504 / max(low))) if any(low) else None

    @property
    def underflows(self) -> bool:
        """Whether gradients are gone because float16 cannot hold them in backward."""
        return bool(self.gone) and any(
            one.phase == "backward" and one.dtype == "float16" and one.lost > 0.5 for one in self.operators
        )

    @property
    def amplified(self) -> OperatorError | None:
        """The operator that makes an error grow most."""
        found = _worst(filter(self.matters, self.operators), lambda one: one.amplification)
        return found if found is not None and found.amplification > 1 else None

    def maker(self, one: OperatorError) -> OperatorError | None:
        """The call that made most of the error that came in with the inputs of another one."""
        return next((other for other in self.operators if other.index == one.error_from), None)

    def rounds(self) -> OperatorError | None:
        """Where the largest error began: what is amplified later, or what rounds."""
        grown = None if self.amplified is None else self.maker(self.amplified)
        return grown or _worst(self.operators, lambda one: one.local)

    def matters(self, one: OperatorError) -> bool:
        """Whether an operator's error reaches anything. A gradient that is zero in exact arithmetic is all error."""
        gradients = self.scale * math.hypot(*(other.norm for other in self.gradients.values()))
        return one.propagated > 1e-3 and (one.phase != "backward" or one.total * one.norm > 1e-3 * gradients)

    def __str__(self) -> str:
        return "\n".join([*self.first_lines(), *self._numbers()])

    def _numbers(self) -> list[str]:
        if self.incomplete and not self.operators:
            return [f"inconclusive: {self.incomplete}"]
        if not self.operators:
            return [f"no operator of step {self.step} computed in less than {self.reference}"]
        lines = [f"{self._symptom()} in step {self.step}, against the same step in {self.reference}"]
        rounded = _worst(self.operators, lambda one: one.local)
        if rounded is not None:
            how = "overflow  by" if math.isinf(rounded.local) else f"rounded   {rounded.local:.2g} by"
            lines.append(f"  {how} {rounded}, {rounded.dtype}")
        if (grown := self.amplified) is not None:
            lines.append(f"  amplified {grown.amplification:.3g} times, to {grown.propagated:.2g}, by {grown}")
            if (maker := self.maker(grown)) is not None:
                lines.append(f"  made      by {maker}, {maker.dtype}")
        lost = _worst(self.operators, lambda one: one.lost)
        if lost is not None:
            lines.append(f"  to zero   {lost.lost:.2%} by {lost}, {lost.dtype}")
        if self.lost_updates:
            most = max(self.lost_updates, key=lambda one: one.share)
            more = f" and of {len(self.lost_updates) - 1} more" if len(self.lost_updates) > 1 else ""
            update = f"{'of' if most.by_optimizer else 'by'} {most.what}{more}"
            lines.append(f"  unmoved   {most.share:.0%} of the update {update} rounds to nothing in {most.dtype}, "
                         f"{most.file}:{most.line}")
        if self.recommended_scale is not None:
            lines.append(f"  scale     {self.scale:g}; up to {self.recommended_scale:g} nothing overflows in backward")
        lines += [f"  unseen    {op}: {why}" for op, why in self.opaque.items()]
        if self.given:
            names = list(self.given)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  as given  {', '.join(names[:3])}{more}: in 16 bits before the step, and not compared")
        return lines + (self.suggestion.lines() if self.suggestion is not None else [])

    def _symptom(self) -> str:
        parts = []
        if self.gone:
            parts.append(f"the gradients of {len(self.gone)} of {len(self.gradients)} parameters are gone: they are 0")
        elif self.is_left_to_scaler:
            parts.append(f"gradients overflow at a loss scale of {self.scale:g}, and are left to the scaler")
        elif self.gradients:
            parts.append(f"gradients are {self.gradient_error:.2g} off")
        elif self.results:
            parts.append(f"results are {max(self.results):.2g} off")
        if self.loss is not None and self.reference_loss is not None:
            parts.append(f"the loss is {self.loss:.6g} for {self.reference_loss:.6g}")
        return ", ".join(parts) or f"{len(self.operators)} operators were compared"

    def table(self, rows: int = 20) -> str:
        """The operator of each module that rounds most, forward and backward apart."""
        worst: dict[tuple[str, str], OperatorError] = {}
        for one in sorted(self.operators, key=lambda one: one.local, reverse=True):
            worst.setdefault((one.module, one.phase), one)
        return "\n".join([
            f"{'local':>9} {'total':>9} {'amplif.':>9} {'to zero':>8}  {'phase':9} module: operator",
            *(f"{one.local:9.2g} {one.total:9.2g} {one.amplification:9.3g} {one.lost:8.2%}  {one.phase:9} "
              f"{one.module or '(none)'}: {one.op}" for one in list(worst.values())[:rows]),
        ])


def _worst(some: Iterable[OperatorError], by: Callable[[OperatorError], float]) -> OperatorError | None:
    found = max(some, key=by, default=None)
    return found if found is not None and by(found) > 0 else None


def plain(value: Any) -> Any:
    """`value` as JSON can hold it."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
