"""`compare_precision`: a step beside itself in float32, in one run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module

from ampkit.debugging.causes import dtype_name
from ampkit.debugging.changes import Change
from ampkit.debugging.loop import check_loop
from ampkit.debugging.precision_report import GradientError, OperatorError, PrecisionReport
from ampkit.debugging.report import Suggestion
from ampkit.debugging.shadow import Measured, ShadowRun, deviation
from ampkit.debugging.snapshot import Snapshot
from ampkit.debugging.source_lines import shown
from ampkit.debugging.suggestions import advice_on_precision, changes_for_precision

__all__ = ["PrecisionComparison", "compare_precision"]


def compare_precision(
    step: Callable[[], Any], model: Module | None = None, reference: torch.dtype = torch.float32, *,
    verify: bool = True,
) -> PrecisionReport:
    """Run a step once, each operator also in `reference` (float32 or float64), forward and backward.

    Each operator's result is compared with that of the same step in `reference` throughout (`total`) and with that of
    the same operator in `reference` on the same inputs (`local`, its own rounding): an operator that rounds much and
    one that amplifies what others rounded are told apart. `report.gradients()` compares the gradients, which are those
    of a true step in `reference` to the bit where `report.opaque` names no operator; `report.recommended_scale` is the
    loss scale to which nothing overflows in backward, where float16 takes part.

    The step takes effect as always; its results and random numbers are the same to the bit. Numbers that it makes in 16
    bits (`arange`, `full`) are made in `reference` beside; what came in 16 bits counts as it is, and is listed in
    `report.given`. What the optimizer computes is not compared. Reads each result on the host.

    Where gradients are 5 % off or more, or an update rounds to nothing, `report.suggestion` has a change. With `verify`
    and a `model`, the step runs again with it from the state in which it began (it must do the same each time), and
    the change is only suggested if it halves the error; then everything is as the first run left it.

    >>> model = torch.nn.Linear(8, 1)
    >>> report = compare_precision(lambda: model(torch.ones(2, 8)).sum().backward(), model)
    >>> report.operators    # nothing is in low precision
    []
    """
    run = PrecisionComparison(model, reference)
    before = Snapshot(model) if verify and model is not None else None
    with before or nullcontext(), run:
        step()
    report = run.report
    if report.is_far_off():
        report.suggestion = advice_on_precision(report)
        if before is not None and model is not None:
            region = run.run.modules.region
            report.suggestion = _tried(step, model, report, before, changes_for_precision(report, region, model))
    return report


def _tried(
    step: Callable[[], Any], model: Module, report: PrecisionReport, before: Snapshot, changes: Iterable[Change]
) -> Suggestion | None:
    """The first change that halves the error, or advice; the model is left as it is."""
    after = Snapshot(model, before.optimizers)
    tried = []
    try:
        for change in changes:
            before.restore()
            comparison = PrecisionComparison(model, getattr(torch, report.reference))
            with contextlib.suppress(RuntimeError), change.around(None, before), comparison:
                step()
            found = comparison.report
            if found.parameters and found.error < report.error / 2:
                evidence = f"verified: with it the error is {found.error:.2g} in place of {report.error:.2g}"
                return Suggestion(change.code, "change", True, evidence, tuple(tried))
            tried.append(change.code)
    finally:
        after.restore()
    return replace(advice_on_precision(report), tried=tuple(tried))


class PrecisionComparison:
    """Context in which one step is compared; `report` has the result when an optimizer has stepped, or it is left."""

    def __init__(
        self, model: Module | None, reference: torch.dtype = torch.float32, *, first_step: int = 0,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        if reference not in (torch.float32, torch.float64):
            raise ValueError(f"reference is {reference}; expected torch.float32 or torch.float64")
        self.report = PrecisionReport(dtype_name(reference), step=first_step)
        self._collected = False
        self.run = ShadowRun(model, reference, self._collect, self._finish)
        self.run.first_step = first_step
        self._on_step = on_step
        self._loop = check_loop()

    def __enter__(self) -> PrecisionReport:
        self.report.loop = self._loop.__enter__().findings
        self.run.__enter__()
        return self.report

    def __exit__(self, *error: Any) -> None:
        self.run.__exit__(*error)
        self._loop.__exit__(None, None, None)
        self.report.compiled = self.run.compiled
        if not self._collected:
            self._collect(self.run)
        self._fill()

    def _finish(self) -> None:
        self._fill()
        self._on_step()

    def _fill(self) -> None:
        run, report = self.run, self.report
        report.operators = [_operator(one) for one in run.measured]
        report.opaque, report.scale, report.given = dict(run.opaque), run.scale or 1.0, dict(run.given)
        report.recommended_scale = recommended_scale(run)
        if run.loss is not None:
            report.loss, report.reference_loss = run.loss

    def _collect(self, run: ShadowRun) -> None:
        """The gradients, which a loop may clear before it ends."""
        if run.finished:
            return
        found = []
        for root in run.modules.roots():
            for name, parameter in root.named_parameters():
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    with torch.no_grad():
                        reference = run.memory.read(parameter.grad)
                        found.append((name, deviation(parameter.grad, reference, count_lost=True)))
        if not found:
            return
        self._collected = True
        norm = math.hypot(*(one.norm for _, one in found))
        self.report.parameters = [
            GradientError(
                name, one.relative, one.error / norm if norm else one.relative, one.lost / max(1, one.numel),
                one.broken / max(1, one.numel), one.norm,
            )
            for name, one in found
        ]


def recommended_scale(run: ShadowRun) -> float | None:
    """The largest power of two times the scale with which no float16 result of backward overflows."""
    largest = max(
        (one.largest for one in run.measured if one.dtype is torch.float16 and one.call.phase == "backward"),
        default=0.0,
    )
    if not largest:
        return None
    return (run.scale or 1.0) * 2.0 ** math.floor(math.log2(torch.finfo(torch.float16).max / largest))


def _operator(one: Measured) -> OperatorError:
    module, line, backward_of = one.place
    count, incoming = max(1, one.local.numel), one.incoming.relative
    return OperatorError(
        index=one.call.index,
        op=one.call.op,
        phase=one.call.phase,
        module="" if module is None else str(module),
        path="" if module is None or not module.known else module.path,
        call=0 if module is None else module.number,
        file="" if line is None else shown(line.file),
        line=0 if line is None else line.line,
        backward_of=backward_of or "",
        dtype=dtype_name(one.dtype),
        shape=one.shape,
        total=one.total.relative,
        local=one.local.relative,
        propagated=one.propagated,
        amplification=one.propagated / incoming if 0 < incoming < math.inf else 0.0,
        error_from=one.incoming.maker,
        lost=one.local.lost / count,
        overflowed=one.local.broken / count,
        largest=one.largest,
        norm=one.total.norm,
        unmoved=one.unmoved,
    )
