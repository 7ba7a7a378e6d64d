"""What a step loses to low precision: by operator, by gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ampkit.debugging.report import COMPILED, LoopFinding, Operation, Report, Status, Suggestion

__all__ = ["GradientError", "OperatorError", "PrecisionReport"]


@dataclass(frozen=True, kw_only=True)
class OperatorError(Operation):
    """One operator call. Errors are 2-norms of differences, relative to the reference's; inf where a result overflowed.

    `total` is from the reference run; `local` from the same operator in the reference's dtype on the same inputs: its
    own rounding; `propagated` is what came in with the inputs; `amplification` that over the largest error among them,
    which was mostly made by the call with the index `error_from`, -1 without one.
    `lost` is the share of elements that are zero and would not be, `overflowed` the share that is inf or NaN and would
    not be, both of the operator's own making; `unmoved`, of an update in place, the share that it was to change and did
    not. `largest` is the largest magnitude in the reference, `norm` its 2-norm.
    """

    total: float
    local: float
    propagated: float
    amplification: float
    error_from: int
    lost: float
    overflowed: float
    largest: float
    norm: float
    unmoved: float = 0.0


@dataclass(frozen=True)
class GradientError:
    """A parameter's gradient. `error` is relative to its own norm, `share` to the norm of all gradients together.

    A gradient that is zero in exact arithmetic is all rounding, and its `error` means nothing: `share` does.
    """

    parameter: str
    error: float
    share: float
    lost: float
    overflowed: float
    norm: float


@dataclass
class PrecisionReport(Report):
    """What `compare_precision` measured. `str` is what the terminal shows."""

    kind = "precision"
    reference: str
    operators: list[OperatorError] = field(default_factory=list)
    parameters: list[GradientError] = field(default_factory=list)
    results: list[float] = field(default_factory=list)      # the errors of the tensors that the step returned
    opaque: dict[str, str] = field(default_factory=dict)    # operators without a reference of their own, and why
    given: dict[str, str] = field(default_factory=dict)     # what came in 16 bits: its dtype, by name
    suggestion: Suggestion | None = None
    scale: float = 1.0
    recommended_scale: float | None = None      # the largest power of two times `scale` that overflows nowhere
    loss: float | None = None
    reference_loss: float | None = None
    step: int = 0
    incomplete: str = ""        # why the step did not run to its end
    compiled: bool = False      # compiled functions ran, eagerly
    loop: list[LoopFinding] = field(default_factory=list)       # what the loop does in the wrong order

    @property
    def status(self) -> Status:
        """"found" where gradients overflowed or are gone; "inconclusive" where the step did not run to its end."""
        if self.loop or self.gone or not (math.isfinite(self.gradient_error) or self.is_left_to_scaler):
            return "found"
        return "inconclusive" if self.incomplete else "clean"

    def gradients(self) -> dict[str, GradientError]:
        """By parameter."""
        return {one.parameter: one for one in self.parameters}

    @property
    def gradient_error(self) -> float:
        """Of all gradients together."""
        return math.hypot(*(one.share for one in self.parameters))

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
        return self.stuck is not None or not (self.error < 0.05 or self.is_left_to_scaler)

    @property
    def gone(self) -> list[str]:
        """Parameters whose gradient is 0 almost everywhere, and in the reference a part of all that counts."""
        norm = math.hypot(*(one.norm for one in self.parameters))
        return [one.parameter for one in self.parameters if one.lost > 0.99 and one.norm > 1e-6 * norm]

    @property
    def is_left_to_scaler(self) -> bool:
        """Whether gradients overflow at the loss scale alone: a scaler skips the step, and halves it."""
        return not math.isfinite(self.gradient_error) and 1 <= (self.recommended_scale or 0) < self.scale

    @property
    def underflows(self) -> bool:
        """Whether gradients are gone because float16 cannot hold them in backward."""
        return bool(self.gone) and any(
            one.phase == "backward" and one.dtype == "float16" and one.lost > 0.5 for one in self.operators
        )

    @property
    def stuck(self) -> OperatorError | None:
        """An update in place that mostly rounds to nothing."""
        found = _worst(self.operators, lambda one: one.unmoved if one.phase == "forward" else 0.0)
        return found if found is not None and found.unmoved > 0.5 else None

    @property
    def amplified(self) -> OperatorError | None:
        """The operator that makes an error grow most."""
        found = _worst(filter(self.matters, self.operators), lambda one: one.amplification)
        return found if found is not None and found.amplification > 1 else None

    def maker(self, one: OperatorError) -> OperatorError | None:
        """The call that made most of the error that came in with the inputs of another one."""
        return next((other for other in self.operators if other.index == one.error_from), None)

    def rounds(self) -> OperatorError | None:
        """Where the largest error began: an update that rounds to nothing, what is amplified later, or what rounds."""
        grown = None if self.amplified is None else self.maker(self.amplified)
        return self.stuck or grown or _worst(self.operators, lambda one: one.local)

    def matters(self, one: OperatorError) -> bool:
        """Whether an operator's error reaches anything. A gradient that is zero in exact arithmetic is all error."""
        gradients = self.scale * math.hypot(*(other.norm for other in self.parameters))
        return one.propagated > 1e-3 and (one.phase != "backward" or one.total * one.norm > 1e-3 * gradients)

    def __str__(self) -> str:
        return "\n".join([*([COMPILED] if self.compiled else []), *map(str, self.loop), *self._numbers()])

    def _numbers(self) -> list[str]:
        if self.incomplete and not self.operators:
            return [f"inconclusive: {self.incomplete}"]
        if not self.operators:
            return [f"no operator of step {self.step} computed in less than {self.reference}"]
        lines = [f"{self._symptom()} in step {self.step}, against the same step in {self.reference}"]
        rounded = _worst(self.operators, lambda one: one.local)
        if rounded is not None:
            lines.append(f"  rounded   {rounded.local:.2g} by {rounded}, {rounded.dtype}")
        if (grown := self.amplified) is not None:
            lines.append(f"  amplified {grown.amplification:.3g} times, to {grown.propagated:.2g}, by {grown}")
            if (maker := self.maker(grown)) is not None:
                lines.append(f"  made      by {maker}, {maker.dtype}")
        lost = _worst(self.operators, lambda one: one.lost)
        if lost is not None:
            lines.append(f"  to zero   {lost.lost:.2%} by {lost}, {lost.dtype}")
        if (stuck := self.stuck) is not None:
            lines.append(f"  unmoved   {stuck.unmoved:.0%} of an update rounds to nothing in {stuck}, {stuck.dtype}")
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
            parts.append(f"the gradients of {len(self.gone)} of {len(self.parameters)} parameters are gone: they are 0")
        elif self.is_left_to_scaler:
            parts.append(f"gradients overflow at a loss scale of {self.scale:g}, and are left to the scaler")
        elif self.parameters:
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
