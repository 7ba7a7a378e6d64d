"""What to change: one line of code for a cause. Advice where no precision helps."""

from __future__ import annotations

import math

from ampkit.debugging.policy_change import PolicyChange
from ampkit.debugging.report import Finding, Suggestion

__all__ = ["suggest"]

_LOW = ("float16", "bfloat16")
_UNTRIED = "not verified: find_nonfinite(step, model) tries it"


def suggest(finding: Finding) -> Suggestion:
    """The change that a finding asks for, untried."""
    origin, cause = finding.origin, finding.cause
    if cause.kind == "arrived":
        if origin.line:
            return Suggestion("none: look at the numbers that the line is given", True, "it computes nothing")
        what = f"{finding.parameter!r}" if finding.parameter else "the data"
        return Suggestion(f"none in this step: look at what wrote {what} before it", True, "broken before it is used")
    if cause.kind == "received":
        return Suggestion("none on this rank: see the report of the rank that sent it", True, "what it sent is finite")
    if cause.kind == "constant":
        return Suggestion("do not write inf or NaN where nothing masks it out", True, "the code asks for it")
    if cause.kind == "uninitialised":
        return Suggestion("write to the memory before it is read", True, f"{origin.op} fills nothing in")
    low = origin.dtype in _LOW or any(one.dtype in _LOW for one in finding.inputs)
    if origin.phase == "optimizer" and low:
        return Suggestion("optimizer = ampkit.FP16Optimizer(optimizer)    # float32 master weights", False,
                          "not verified: it changes what the optimizer holds")
    if origin.phase == "backward" and cause.kind == "overflow" and cause.value and cause.limit:
        too_much = 2.0 ** math.ceil(math.log2(cause.value / cause.limit))
        if finding.scale:
            scale = finding.scale / too_much
            return Suggestion(f"scaler = GradScaler(init_scale={scale:g})", False, _UNTRIED, scale)
        if not origin.path:
            return Suggestion(f"divide the loss by {too_much:g}, or let a GradScaler scale it", False,
                              f"not verified: by arithmetic {cause.value / too_much:.4g} fits {origin.dtype}")
    change = PolicyChange(finding.device).extended(origin) if low and cause.kind != "constant" else None
    if change is not None:
        return Suggestion(change.code, False, _UNTRIED, change=change)
    if cause.kind == "unknown":
        return Suggestion("none is known: find_nonfinite(step, model) looks for the cause", False, "nothing was tried")
    if cause.kind in ("undefined", "from inf"):
        return Suggestion("guard the operator: clamp its inputs, or mask them out", True, "float64 does not help")
    return Suggestion("scale the values down before it", cause.kind == "too large", f"{origin.dtype} is not enough")
