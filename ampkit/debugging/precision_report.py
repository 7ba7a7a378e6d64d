"""What a step loses to low precision: by operator, by module, by gradient."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ampkit.debugging.loop import LoopFinding
from ampkit.debugging.report import COMPILED, Suggestion
from ampkit.debugging.report_file import Status, document

__all__ = ["GradientError", "ModuleError", "OperatorError", "PrecisionReport"]


@dataclass(frozen=True)
class OperatorError:
    """One operator call. Errors are 2-norms of differences, relative to the reference's; inf where a result overflowed.

    `total` is from the reference run; `local` from the same operator in the reference's dtype on the same inputs: its
    own rounding; `propagated` is what came in with the inputs; `amplification` that over the largest error among them,
    which was mostly made by the call with the index `error_from`, -1 without one.
    `lost` is the share of elements that are zero and would not be, `overflowed` the share that is inf or NaN and would
    not be, both of the operator's own making; `unmoved`, of an update in place, the share that it was to change and did
    not. `largest` is the largest magnitude in the reference, `norm` its 2-norm.
    """

    index: int
    op: str
    phase: str
    module: str
    path: str
    call: int
    file: str
    line: int
    backward_of: str
    dtype: str
    shape: tuple[int, ...]
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

    def __str__(self) -> str:
        name = f"the cast to {self.dtype} ({self.op})" if self.op == "aten::_to_copy" else self.op
        backward = f" in backward of {self.backward_of or 'an unseen operator'}" if self.phase == "backward" else ""
        module = f", {self.module}" if self.module else ""
        return f"{name}{backward}{module}" + (f", {self.file}:{self.line}" if self.file else "")


@dataclass(frozen=True)
class ModuleError:
    """A module's own operators, without those of modules in it: the worst of each, and the last total."""

    module: str
    path: str
    phase: str
    total: float
    local: float
    amplification: float
    lost: float
    overflowed: float
    worst: OperatorError        # by `local`


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
class PrecisionReport:
    """What `compare_precision` measured. `str` is what the terminal shows."""

    reference: str
    operators: list[OperatorError] = field(default_factory=list)
    parameters: list[GradientError] = field(default_factory=list)
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
        if self.loop or not math.isfinite(self.gradient_error) or self.gone:
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
        """Of the gradients, or of the loss where that is farther off."""
        if self.loss is None or self.reference_loss is None:
            return self.gradient_error
        return max(self.gradient_error, abs(self.loss - self.reference_loss) / (abs(self.reference_loss) or 1.0))

    def is_far_off(self) -> bool:
        """Whether something should change."""
        return not self.error < 0.05 or any(one.unmoved > 0.5 and one.phase == "forward" for one in self.operators)

    @property
    def gone(self) -> list[str]:
        """Parameters whose gradient is 0 almost everywhere, and is not in the reference."""
        return [one.parameter for one in self.parameters if one.lost > 0.99 and one.norm > 0]

    def underflows(self) -> bool:
        """Whether gradients are gone because float16 cannot hold them in backward."""
        return bool(self.gone) and any(
            one.phase == "backward" and one.dtype == "float16" and one.lost > 0.5 for one in self.operators
        )

    def rounds(self) -> OperatorError | None:
        """Where the largest error began: an update that rounds to nothing, what is amplified later, or what rounds."""
        stuck = _worst(self.operators, lambda one: one.unmoved if one.phase == "forward" else 0.0)
        if stuck is not None and stuck.unmoved > 0.5:
            return stuck
        amplified = _worst(filter(self.matters, self.operators), lambda one: one.amplification)
        if amplified is not None and amplified.amplification > 1:
            maker = next((one for one in self.operators if one.index == amplified.error_from), None)
            if maker is not None:
                return maker
        return _worst(self.operators, lambda one: one.local)

    def modules(self, phase: str | None = None) -> list[ModuleError]:
        """By module, forward and backward apart, the worst `local` error first."""
        groups: dict[tuple[str, str], list[OperatorError]] = {}
        for one in self.operators:
            if phase is None or one.phase == phase:
                groups.setdefault((one.module, one.phase), []).append(one)
        found = [
            ModuleError(
                module, some[0].path, of_phase, some[-1].total, max(one.local for one in some),
                max(one.amplification for one in some), max(one.lost for one in some),
                max(one.overflowed for one in some), max(some, key=lambda one: one.local),
            )
            for (module, of_phase), some in groups.items()
        ]
        return sorted(found, key=lambda one: one.local, reverse=True)

    def matters(self, one: OperatorError) -> bool:
        """Whether an operator's error reaches anything. A gradient that is zero in exact arithmetic is all error."""
        gradients = self.scale * math.hypot(*(other.norm for other in self.parameters))
        return one.propagated > 1e-3 and (one.phase != "backward" or one.total * one.norm > 1e-3 * gradients)

    def __str__(self) -> str:
        return "\n".join([*([COMPILED] if self.compiled else []), *map(str, self.loop), self._numbers()])

    def _numbers(self) -> str:
        if self.incomplete and not self.operators:
            return f"inconclusive: {self.incomplete}"
        if not self.operators:
            return f"no operator of step {self.step} computed in less than {self.reference}"
        lines = [f"{self._symptom()} in step {self.step}, against the same step in {self.reference}"]
        rounded = _worst(self.operators, lambda one: one.local)
        if rounded is not None:
            lines.append(f"  rounded    {rounded.local:.2g} by {rounded}, {rounded.dtype}")
        amplified = _worst(filter(self.matters, self.operators), lambda one: one.amplification)
        if amplified is not None and amplified.amplification > 1:
            lines.append(
                f"  amplified  {amplified.amplification:.3g} times, to {amplified.propagated:.2g}, by {amplified}"
            )
            maker = next((one for one in self.operators if one.index == amplified.error_from), None)
            if maker is not None:
                lines.append(f"  made       by {maker}, {maker.dtype}")
        lost = _worst(self.operators, lambda one: one.lost)
        if lost is not None:
            lines.append(f"  to zero    {lost.lost:.2%} by {lost}, {lost.dtype}")
        stuck = _worst(self.operators, lambda one: one.unmoved)
        if stuck is not None and stuck.unmoved > 0.5:
            lines.append(f"  unmoved    {stuck.unmoved:.0%} of an update rounds to nothing in {stuck}, {stuck.dtype}")
        if self.recommended_scale is not None:
            lines.append(f"  scale      {self.scale:g}; up to {self.recommended_scale:g} nothing overflows in backward")
        lines += [f"  unseen     {op}: {why}" for op, why in self.opaque.items()]
        if self.given:
            names = list(self.given)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  as given   {', '.join(names[:3])}{more}: in 16 bits before the step, and not compared")
        if self.suggestion is not None:
            lines.append(f"  {self.suggestion.kind:10} {self.suggestion.code}")
            lines.append(f"  evidence   {self.suggestion.evidence}")
            lines += [f"  in vain    {one}" for one in self.suggestion.tried]
        return "\n".join(lines)

    def table(self, rows: int = 20) -> str:
        """The modules whose operators round most."""
        head = f"{'local':>9} {'total':>9} {'amplif.':>9} {'to zero':>8}  {'phase':9} module: operator"
        body = [
            f"{one.local:9.2g} {one.total:9.2g} {one.amplification:9.3g} {one.lost:8.2%}  {one.phase:9} "
            f"{one.module or '(none)'}: {one.worst.op}"
            for one in self.modules()[:rows]
        ]
        return "\n".join([head, *body])

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers; inf and NaN among the numbers as strings."""
        return document("precision", self.status, str(self), asdict(self))

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def _symptom(self) -> str:
        parts = []
        if self.gone:
            parts.append(f"the gradients of {len(self.gone)} of {len(self.parameters)} parameters are gone: they are 0")
        elif self.parameters:
            parts.append(f"gradients are {self.gradient_error:.2g} off")
        if self.loss is not None and self.reference_loss is not None:
            parts.append(f"the loss is {self.loss:.6g} for {self.reference_loss:.6g}")
        return ", ".join(parts) or f"{len(self.operators)} operators were compared"


def _worst(some: Iterable[OperatorError], by: Callable[[OperatorError], float]) -> OperatorError | None:
    found = max(some, key=by, default=None)
    return found if found is not None and by(found) > 0 else None
