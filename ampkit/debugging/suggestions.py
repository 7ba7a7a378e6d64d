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
    LossChange,
    PolicyChange,
    Region,
    ScaleChange,
    function_around,
    line_of,
)
from ampkit.debugging.precision_report import PrecisionReport
from ampkit.debugging.report import Finding, Operation, Suggestion
from ampkit.policy.policy import Policy

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
    places = (origin, finding.made) if finding.made is not None else (origin,)
    dtypes = [one.dtype for one in (*places, *finding.inputs)]
    if cause.kind in ("arrived", "received", "constant", "uninitialised") or not any(one in _LOW for one in dtypes):
        return
    if origin.phase == "optimizer":
        yield EpsChange()
        return
    overflows = origin.phase == "backward" and cause.kind == "overflow"
    if overflows and finding.scale:
        yield ScaleChange(finding.scale / _excess(finding))
    if region == "ampkit" and model is not None:
        yield from _policies(finding.device, model, origin)
    place = (finding.made and line_of(finding.made)) or line_of(origin)
    if place is not None:
        yield LineChange(finding.device, region, (place,))
    if overflows and not finding.scale:
        yield LossChange(_excess(finding))


def advice(finding: Finding) -> Suggestion:
    """What helps where no change does, as far as it is known."""
    origin, cause = finding.origin, finding.cause
    if cause.kind == "arrived":
        what = f"{finding.parameter!r}" if finding.parameter else "the data"
        return Suggestion(f"look at what wrote {what} before this step", evidence="it is broken before it is used")
    if cause.kind == "received":
        return Suggestion("see the report of the rank that sent it", evidence="what this rank sent is finite")
    if cause.kind == "constant":
        return Suggestion("where it is a mask, write a finite number in place of -inf, as -1e4, or leave it out of the "
                          "sum; else write no inf or NaN that nothing masks out", evidence="the code asks for it")
    if cause.kind == "uninitialised":
        return Suggestion("write to the memory before it is read", evidence=f"{origin.op} fills nothing in")
    if cause.kind == "unknown":
        return Suggestion("look at its inputs", evidence="the operator could not be run again to see why")
    if cause.kind == "overflow" and origin.op == "aten::_to_copy":
        return Suggestion("keep it in float32, or clamp it before the cast: x.clamp(-m, m) with m = "
                          f"torch.finfo(torch.{origin.dtype}).max", evidence="the value does not fit the dtype")
    if cause.kind == "rounded" and " is " in cause.text:
        return Suggestion("write a number that the dtype holds: in float16 6e-8 or more, and at most 1 - 5e-4",
                          evidence="not verified")
    if cause.kind == "overflow" and not finding.inputs:
        return Suggestion("make these numbers in float32", evidence=f"beyond {origin.dtype}")
    evidence = {
        "too large": "beyond float64 too", "overflow": f"beyond {origin.dtype}", "rounded": "another value in float64",
    }.get(cause.kind, "float64 has no value for these inputs either")
    if cause.kind == "from inf" and finding.made is not None and "softmax" not in origin.op:
        return Suggestion("write torch.finfo(dtype).min in place of -inf", evidence=evidence)
    return Suggestion(advice_for(origin.op, origin.backward_of)[1], evidence=evidence)


def changes_for_precision(report: PrecisionReport, region: Region, model: Module) -> Iterator[Change]:
    """What may bring a step nearer to its reference."""
    one = report.rounds()
    if one is None or report.underflows or one.unmoved > 0.5:
        return
    device = next((p.device.type for p in model.parameters()), "cpu")
    if region == "ampkit":
        yield from _policies(device, model, one)
    lines = line_of(one)
    if lines is not None:
        whole = function_around(lines)
        yield from (LineChange(device, region, (some,)) for some in (lines, whole) if some is not None)


def advice_on_precision(report: PrecisionReport) -> Suggestion:
    """What helps where no change was tried, or none helped."""
    one = report.rounds()
    if report.underflows:
        scale = report.recommended_scale or 65536
        return Suggestion("scale the loss: scaler = ampkit.GradScaler()",
                          evidence=f"float16 ends at 6e-08, and a scale of up to {scale:g} overflows nowhere")
    if one is not None and one.unmoved > 0.5:
        return Suggestion(f"keep what {one.file}:{one.line} updates in float32, and cast a copy of it to {one.dtype}",
                          evidence=f"{one.unmoved:.0%} of the update is less than half a unit in the last place")
    if one is not None and one.op == "aten::add_.Tensor" and one.phase == "backward" and not one.backward_of:
        return Suggestion("accumulate gradients in float32, beside the parameters", evidence="not verified")
    where = "" if one is None or not one.line else f"compute {one.file}:{one.line} in float32, with .float()"
    return Suggestion(where or "keep more of the model in float32", evidence="not verified")


def _policies(device: str, model: Module, place: Operation) -> Iterator[Change]:
    change = PolicyChange(Policy.default(device), model).extended([place])
    if change is not None:
        yield change


def _excess(finding: Finding) -> float:
    """The power of two by which an overflow is too large."""
    cause = finding.cause
    return 2.0 ** math.ceil(math.log2((cause.value or 2.0) / (cause.limit or 1.0)))
