"""What to change for a cause: changes to try, and advice where none helps."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch.nn import Module

from ampkit.debugging.advice import advice_for
from ampkit.debugging.changes import (
    Change,
    EpsChange,
    LineChange,
    Lines,
    LossChange,
    PolicyTrial,
    Region,
    ScaleChange,
    function_around,
    line_of,
)
from ampkit.debugging.policy_change import PolicyChange
from ampkit.debugging.precision_report import PrecisionReport
from ampkit.debugging.report import Finding, Suggestion

__all__ = ["advice", "advice_on_precision", "changes_for", "changes_for_precision", "suggest"]

_LOW = ("float16", "bfloat16")


def suggest(finding: Finding, region: Region, model: Module | None) -> Suggestion:
    """The first change that a finding asks for, untried; advice where there is none."""
    first = next(changes_for(finding, region, model), None)
    if first is None:
        return advice(finding)
    return Suggestion(first.code, "change", evidence="not verified: find_nonfinite(step, model) tries it")


def changes_for(finding: Finding, region: Region, model: Module | None) -> Iterator[Change]:
    """What may help, the likeliest first."""
    origin, cause = finding.origin, finding.cause
    low = [origin.dtype, *(one.dtype for one in finding.inputs)]
    if cause.kind in ("arrived", "received", "constant", "uninitialised") or not (
        cause.kind == "rounded" or any(dtype in _LOW for dtype in low)
    ):
        return
    if origin.phase == "optimizer":
        yield EpsChange()
        return
    if origin.phase == "backward" and cause.kind == "overflow" and finding.scale:
        yield ScaleChange(finding.scale / _excess(finding))
    if region == "ampkit" and model is not None:
        change = PolicyChange(finding.device).extended(origin)
        if change is not None:
            yield PolicyTrial(change, model)
    place = (finding.made and line_of(finding.made)) or line_of(origin)
    if place is not None:
        yield LineChange(finding.device, region, (place,))
    if origin.phase == "backward" and cause.kind == "overflow" and not finding.scale:
        yield LossChange(_excess(finding))


def advice(finding: Finding) -> Suggestion:
    """What helps where no change does, as far as it is known."""
    origin, cause = finding.origin, finding.cause
    if cause.kind == "arrived":
        if origin.line:
            return Suggestion("look at the numbers that the line is given", evidence="the line computes nothing")
        what = f"{finding.parameter!r}" if finding.parameter else "the data"
        return Suggestion(f"look at what wrote {what} before this step", evidence="it is broken before it is used")
    if cause.kind == "received":
        return Suggestion("see the report of the rank that sent it", evidence="what this rank sent is finite")
    if cause.kind == "constant":
        return Suggestion("do not write inf or NaN where nothing masks it out", evidence="the code asks for it")
    if cause.kind == "uninitialised":
        return Suggestion("write to the memory before it is read", evidence=f"{origin.op} fills nothing in")
    if cause.kind == "unknown":
        return Suggestion("none is known", evidence="the operator could not be run again to see why")
    if cause.kind == "overflow" and origin.op == "aten::_to_copy":
        return Suggestion("keep it in float32, or clamp it before the cast: x.clamp(-m, m) with m = "
                          f"torch.finfo(torch.{origin.dtype}).max", evidence="the value does not fit the dtype")
    why = {"too large": "beyond float64 too", "overflow": f"beyond {origin.dtype}"}.get(cause.kind, "")
    if cause.kind == "rounded":
        why = "more precision alone did not help"
    _, what = advice_for(origin.op, origin.backward_of)
    return Suggestion(what, evidence=why or "no precision helps: float64 has no value either")


def changes_for_precision(report: PrecisionReport, region: Region, model: Module) -> Iterator[Change]:
    """What may bring a step nearer to its reference."""
    one = report.rounds()
    if one is None or report.underflows() or one.unmoved > 0.5:
        return
    device = next((p.device.type for p in model.parameters()), "cpu")
    if region == "ampkit":
        change = PolicyChange(device).extended(one)
        if change is not None:
            yield PolicyTrial(change, model)
    if one.line:
        lines = Lines(one.file, one.line, one.line)
        yield LineChange(device, region, (lines,))
        whole = function_around(lines)
        if whole is not None:
            yield LineChange(device, region, (whole,))


def advice_on_precision(report: PrecisionReport) -> Suggestion:
    """What helps where no change was tried, or none helped."""
    one = report.rounds()
    if report.underflows():
        scale = report.recommended_scale or 65536
        return Suggestion("scale the loss: scaler = ampkit.GradScaler()",
                          evidence=f"float16 ends at 6e-08, and a scale of up to {scale:g} overflows nowhere")
    if one is not None and one.unmoved > 0.5:
        return Suggestion(f"keep what {one.file}:{one.line} updates in float32, and cast a copy of it to {one.dtype}",
                          evidence=f"{one.unmoved:.0%} of the update is less than half a unit in the last place")
    where = "" if one is None or not one.line else f"compute {one.file}:{one.line} in float32, with .float()"
    return Suggestion(where or "keep more of the model in float32", evidence="not verified")


def _excess(finding: Finding) -> float:
    """The power of two by which an overflow is too large."""
    cause = finding.cause
    return 2.0 ** math.ceil(math.log2((cause.value or 2.0) / (cause.limit or 1.0)))
