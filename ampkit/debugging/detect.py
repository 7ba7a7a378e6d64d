"""`detect_nonfinite`: a context around training steps that says where inf and NaN come from."""

from __future__ import annotations

import os
from dataclasses import replace
from types import TracebackType
from typing import Literal

import torch
from torch.nn import Module

from ampkit.debugging.advice import advice_for
from ampkit.debugging.causes import CONSTANT, Cause, dtype_name
from ampkit.debugging.loop import check_loop
from ampkit.debugging.nonfinite_recorder import NonfiniteRecorder
from ampkit.debugging.operator_calls import operation_fields
from ampkit.debugging.report import Finding, NonFiniteError, NonFiniteReport, Operation
from ampkit.debugging.suggestions import suggest
from ampkit.debugging.taint import Record, Trace, trace

__all__ = ["detect_nonfinite", "rank"]


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
    `NonFiniteError` when the step ends, "record" only fills the report. Each result is read on the host, which waits
    for an accelerator at each operator.

    A step ends after `optimizer.step()`, when a scaler has skipped it, and at the end of the context. Compiled
    functions run eagerly meanwhile. Results and random numbers stay the same to the bit.
    """

    def __init__(self, model: Module | None = None, on_found: Literal["raise", "record"] = "raise") -> None:
        if on_found not in ("raise", "record"):
            raise ValueError(f"on_found is {on_found!r}; expected 'raise' or 'record'")
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
        """Turn what a step recorded into findings, and raise for the new ones."""
        self._count()
        found = [(one, _finding(recorder, one)) for one in trace(recorder.records, complete=self._complete)]
        overflows = any(finding.skipped for _, finding in found)
        new = False
        for one, finding in found:
            # An inf that a smaller scale cures makes NaN of what would have been absorbed: the next step tells.
            if finding.skipped or not (overflows and one.symptom.phase in ("backward", "scaler")):
                new |= self.report.add(finding) and not finding.skipped
        if new and self._on_found == "raise":
            raise NonFiniteError(self.report)

    def _count(self) -> None:
        self.report.operators, self.report.steps = self.recorder.count, self.recorder.steps_begun


def _finding(recorder: NonfiniteRecorder, found: Trace) -> Finding:
    """What a report says of an origin."""
    origin, details = found.origin, found.origin.details
    cause = details.cause or _cause_unseen(origin)
    symptom, parameter = _symptom(found)
    place = _operation(origin)
    if cause.kind == "undefined" and place.backward_of:
        cause = replace(cause, text=advice_for(place.op, place.backward_of)[0] or cause.text)
    made = None
    if details.made is not None:
        made = Operation(**operation_fields(details.made, recorder.place(details.made)))
    elif cause.kind == "from inf":
        made = _constant_behind(recorder, origin)
    finding = Finding(
        symptom=symptom,
        origin=place,
        cause=cause,
        inputs=details.inputs,
        chain=tuple(map(_operation, found.chain)),
        parameter=details.target if cause.kind == "arrived" else parameter,
        step=recorder.step,
        device=details.device.type,
        scale=recorder.scale,
        skipped=_is_left_to_scaler(found, cause, recorder.scale),
        elements=details.elements,
        micro_batch=details.micro_batch,
        made=made,
    )
    return replace(finding, suggestion=suggest(finding, recorder.modules.region, recorder.modules.model))


def _constant_behind(recorder: NonfiniteRecorder, record: Record) -> Operation | None:
    """The constant inf that a NaN was made of."""
    known, pending = {record.index}, [record]
    while pending:
        one = pending.pop()
        if one.source == "constant" and one is not record:
            return _operation(one)
        new = [index for index in one.inputs if index in recorder.records and index not in known]
        known.update(new)
        pending += [recorder.records[index] for index in new if recorder.records[index].details is not None]
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


def _symptom(found: Trace) -> tuple[str, str]:
    """What a user sees, and the parameter that it is about."""
    last, details = found.symptom, found.symptom.details
    if last.is_loss:
        return f"the loss is {last.values}", ""
    if last.writes_parameter:
        what = "parameter" if details.call is not None and details.call.facts.mutable else "buffer"
        return f"{what} {details.target or '?'} is {last.values}", details.target
    if last.is_gradient or last.phase in ("backward", "scaler"):
        return f"the gradient of {details.target or 'an input'} is {last.values}", details.target
    return f"{'a result' if last.scalar else 'a tensor that nothing absorbs'} is {last.values}", ""


def _operation(record: Record) -> Operation:
    details = record.details
    fields = operation_fields(details.call, details.place)
    return Operation(**{
        **fields, "phase": record.phase, "dtype": dtype_name(details.dtype), "shape": details.shape,
        "values": record.values,
    })


def rank() -> int:
    """Of this process; 0 where it is alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
