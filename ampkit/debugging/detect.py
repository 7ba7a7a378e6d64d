"""`detect_nonfinite`: a context around training steps that says where inf and NaN come from."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch
from torch.nn import Module

from ampkit.debugging.advice import advice_for
from ampkit.debugging.causes import CONSTANT, Cause, dtype_name
from ampkit.debugging.loop import check_loop
from ampkit.debugging.nonfinite_recorder import NonfiniteRecorder, Seen
from ampkit.debugging.operator_calls import OperatorCall, Place
from ampkit.debugging.report import Finding, NonFiniteError, NonFiniteReport, Operation
from ampkit.debugging.source_lines import shown
from ampkit.debugging.suggestions import suggest
from ampkit.debugging.taint import Record, Trace, trace

__all__ = ["detect_nonfinite", "operation_of", "rank"]

OnFound = Literal["raise", "warn", "record"] | Callable[[Finding], Any]


class detect_nonfinite:
    """Context in which every operator's result is looked at, forward, backward and optimizer::

        with debugging.detect_nonfinite(model) as report:
            loss = model(x).mean()
            loss.backward()
            optimizer.step()

    It names the first operator whose inputs were finite and whose result was not, its module and which call of it, the
    user's line, why (the operator runs again in float64 on the same inputs), and the way to the loss, gradient,
    parameter or result where it shows. What is absorbed on the way, such as masks of -inf, is no finding; gradients
    that a GradScaler meets and that a smaller scale can cure are in `report.skipped`.

    `model`: paths count from it; None takes the outermost module that runs. `on_found`: "raise" raises
    `NonFiniteError` when the step ends, "warn" warns, "record" only fills the report, a callable is called with each
    `Finding`. Each result is read on the host, which waits for an accelerator at each operator.

    A step ends after `optimizer.step()`, when a scaler has skipped it, and at the end of the context. Compiled
    functions run eagerly meanwhile. Results and random numbers stay the same to the bit.
    """

    def __init__(self, model: Module | None = None, on_found: OnFound = "raise") -> None:
        if on_found not in ("raise", "warn", "record") and not callable(on_found):
            raise ValueError(f"on_found is {on_found!r}; expected 'raise', 'warn', 'record' or a callable")
        self.report = NonFiniteReport(rank=rank(), world_size=_world_size())
        self._on_found = on_found
        self.recorder = NonfiniteRecorder(model, self._judge)
        self._complete = True       # False: an exception ended the step, and what was not read might have been

    def __enter__(self) -> NonFiniteReport:
        self._loop = check_loop()
        self.report.loop = self._loop.__enter__().findings
        self.recorder.__enter__()
        return self.report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorder = self.recorder
        recorder.__exit__(kind, error, traceback)
        self._loop.__exit__(None, None, None)
        self.report.compiled = recorder.compiled
        self._complete = error is None
        if error is not None and not isinstance(error, NonFiniteError):
            self.report.incomplete = f"the steps ended with {type(error).__name__}"
        self._count()
        if error is None or (isinstance(error, Exception) and not isinstance(error, NonFiniteError)):
            recorder.end_step()         # what the user's code raised stays as the context of what is raised here

    def _judge(self, recorder: NonfiniteRecorder) -> None:
        """Turn what a step recorded into findings, and tell of the new ones."""
        new = []
        self._count()
        found = [(one, make_finding(recorder, one)) for one in trace(recorder.records, complete=self._complete)]
        overflows = any(finding.skipped for _, finding in found)
        for one, finding in found:
            # An inf that a smaller scale cures makes NaN of what would have been absorbed: the next step tells.
            if overflows and not finding.skipped and one.symptom.phase in ("backward", "scaler"):
                continue
            if self.report.add(finding) and not finding.skipped:
                new.append(finding)
        if new and self._on_found == "raise":
            raise NonFiniteError(self.report)
        for finding in new:
            if self._on_found == "warn":
                warnings.warn(str(finding), stacklevel=3)
            elif callable(self._on_found):
                self._on_found(finding)

    def _count(self) -> None:
        self.report.operators, self.report.steps = self.recorder.count, self.recorder.steps_begun


def make_finding(recorder: NonfiniteRecorder, found: Trace) -> Finding:
    """What a report says of an origin."""
    origin, seen = found.origin, recorder.seen[found.origin.index]
    cause = seen.cause or _cause_unseen(origin)
    symptom, parameter = _symptom(recorder, found)
    place = _operation(origin, seen)
    if cause.kind == "undefined" and place.backward_of:
        why = advice_for(place.op, place.backward_of)[0]
        cause = replace(cause, text=why or cause.text)
    made = None if seen.made is None else operation_of(seen.made, recorder.place(seen.made))
    if cause.kind == "from inf":
        made = made or _constant_behind(recorder, origin)
    finding = Finding(
        symptom=symptom,
        origin=place,
        cause=cause,
        inputs=seen.inputs,
        chain=tuple(_operation(one, recorder.seen[one.index]) for one in found.chain),
        parameter=seen.target if cause.kind == "arrived" else parameter,
        step=recorder.step,
        device=seen.device.type,
        scale=recorder.scale,
        skipped=_is_left_to_scaler(found, cause, recorder.scale),
        elements=seen.elements,
        micro_batch=seen.micro_batch,
        made=made,
    )
    return replace(finding, suggestion=suggest(finding, recorder.modules.region, recorder.modules.model))


def _constant_behind(recorder: NonfiniteRecorder, record: Record) -> Operation | None:
    """The constant inf that a NaN was made of."""
    known, pending = {record.index}, [record]
    while pending:
        one = pending.pop()
        if one.source == "constant" and one is not record:
            return _operation(one, recorder.seen[one.index])
        new = [index for index in one.inputs if index in recorder.seen and index not in known]
        known.update(new)
        pending += [recorder.records[index] for index in new]
    return None


def _cause_unseen(origin: Record) -> Cause:
    if origin.source == "received":
        return Cause("received", "received from another rank: what this one sent is finite")
    if origin.source == "constant":
        return CONSTANT
    if origin.source == "uninitialised":
        return Cause("uninitialised", "memory was read that nothing was written to")
    return Cause("unknown", "its inputs cannot be read")


def _is_left_to_scaler(found: Trace, cause: Cause, scale: float | None) -> bool:
    """Whether a scaler skips the step, and a smaller scale helps: the warm-up of a loss scale."""
    if not found.scaler or scale is None or found.origin.phase != "backward":
        return False
    if found.symptom.is_loss or any(one.writes_parameter for one in found.chain):
        return False
    if cause.kind == "overflow" and cause.value is not None and cause.limit is not None:
        return cause.value / scale <= cause.limit
    return cause.kind in ("intermediate", "received", "unknown")


def _symptom(recorder: NonfiniteRecorder, found: Trace) -> tuple[str, str]:
    """What a user sees, and the parameter that it is about."""
    last, seen = found.symptom, recorder.seen[found.symptom.index]
    values = _values(last)
    if last.is_loss:
        return f"the loss is {values}", ""
    if last.writes_parameter:
        what = "parameter" if seen.call is not None and seen.call.facts.mutable else "buffer"
        return f"{what} {seen.target or '?'} is {values}", seen.target
    if last.is_gradient or last.phase in ("backward", "scaler"):
        return f"the gradient of {seen.target or 'an input'} is {values}", seen.target
    return f"{'a result' if last.scalar else 'a tensor that nothing absorbs'} is {values}", ""


def _operation(record: Record, seen: Seen) -> Operation:
    return replace(
        operation_of(seen.call, seen.place), phase=record.phase, dtype=dtype_name(seen.dtype), shape=seen.shape,
        values=_values(record),
    )


def operation_of(call: OperatorCall | None, place: Place) -> Operation:
    """A call as reports show it; of its result nothing is known here."""
    module, line, backward_of = place
    return Operation(
        index=-1 if call is None else call.index,
        op="" if call is None else call.op,
        phase="before" if call is None else call.phase,
        module="" if module is None else str(module),
        path="" if module is None or not module.known else module.path,
        call=0 if module is None else module.number,
        file="" if line is None else shown(line.file),
        line=0 if line is None else line.line,
        backward_of=backward_of or "",
        dtype="",
        shape=(),
        values="",
    )


def _values(record: Record) -> str:
    named = (("nan", record.nan), ("inf", record.posinf), ("-inf", record.neginf))
    return " and ".join(name for name, there in named if there)


def rank() -> int:
    """Of this process; 0 where it is alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
