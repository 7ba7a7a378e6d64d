"""The origin of inf and NaN: the first operator whose inputs were finite and whose result was not.

Values that later operators mask, such as a mask of -inf, are not errors. A gradient that overflows only because of the
loss scale is in `Report.skipped`: the scaler skips that step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampkit.debugging.checks import causes
from ampkit.debugging.checks.check import Add, Check
from ampkit.debugging.checks.data import LARGE_NUMBER, Data
from ampkit.debugging.checks.origins import Event, Origin, find_origins, masked
from ampkit.debugging.checks.replay import explain, zero_producer
from ampkit.debugging.finding import Cause, Finding, Operand
from ampkit.debugging.observe.call import Call
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_properties import item_of, readable, tensors_in
from ampkit.debugging.observe.storage_map import StorageMap
from ampkit.debugging.observe.tensor_values import described, extremes, nonfinite_elements, nonfinite_kinds
from ampkit.debugging.torch_private import is_opaque
from ampkit.dtypes import dtype_name

_MAX_REPLAYS = 2  # of the operator of one line: an inf that is masked occurs in each step


class _Input(NamedTuple):
    """A tensor argument of an operator call."""

    before: Tensor  # its values as they were before the call
    tensor: Tensor
    writers: tuple[int, ...]  # the stored events that wrote it, in this step or before
    empty: tuple[Call, tuple[int, ...]] | None  # the call that made it, and of which events, if it was not written yet


class NonFinite(Check):
    """Tracks inf and NaN from the operator that produces them to a loss, gradient, parameter or result."""

    name = "nonfinite"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._data = Data(run)
        self._events: dict[int, Event] = {}  # of this step: non-finite ones, and their readers
        self._writers: StorageMap[tuple[int, ...]] = StorageMap()  # by storage: the stored events that wrote it
        self._empty: StorageMap[tuple[Call, tuple[int, ...]]] = StorageMap()  # not written yet: who made it, of which
        self._replays: dict[tuple[str, str, int, str], int] = {}  # number of replays, by operator, line and phase
        self._next = 0  # index of the next event
        self._skipped: set[int] = set()  # the non-finite events of the last step that a scaler skipped

    def opened(self, stack: ExitStack) -> None:
        self._data.opened(stack)

    def operator_ran(self, call: Call) -> None:
        op = call.op
        is_finite = all(math.isfinite(high - low) for low, high in call.ranges)
        if is_finite and not self._events:
            self._note_writer(call)
            return
        if call.starts_backward:
            for event in self._events_of(self._writers_of(call.tensors[0])):
                event.role = "loss"
        read = [] if op.shape_only else call.tensors
        if op.overwrites:
            read = [each for each in read if not any(each is other for other in call.written)]
        before = call.before
        inputs = [_Input(before.get(id(x), x), x, self._writers_of(x), self._empty.get(x)) for x in read]
        indices = {event.index for each in inputs for event in self._events_of(each.writers)}
        if not call.outputs:  # a comparison, an index, or a number on the host
            indices = {index for index in indices if not self._events[index].scalar}  # loops often check a loss
            if indices and isinstance(call.result, Tensor) and call.result.dtype is torch.bool:
                event = self._new_event(call.phase, indices)
                self._events[event.index] = event
            return
        event = self._new_event(call.phase, indices)
        event.scalar = all(output.numel() == 1 for output in call.outputs)
        if indices or not is_finite:
            self._events[event.index] = event  # it may mask a non-finite value
        if is_finite and (op.is_empty or not indices):
            self._note_writer(call, inputs=event.inputs)
            return
        self._note_writer(call, event.index)
        for low, high in call.ranges:
            event.note_range(low, high)
        if event.nonfinite:
            self._explain(event, call, inputs)

    def step_ended(self, optimizer: Any, *, complete: bool = True) -> None:
        if optimizer is None and complete:
            self._skipped = {index for index, event in self._events.items() if event.nonfinite}
        if any(event.nonfinite for event in self._events.values()):
            self._note_gradients()
            self._add_findings(complete)
        self._events.clear()

    def _add_findings(self, complete: bool) -> None:
        """Turn the events of a step into findings."""
        origins = find_origins(self._events, complete=complete)
        found = [(origin, self._finding(origin)) for origin in origins]
        skipped = [origin.only_gradients and _scaler_helps(finding) for origin, finding in found]
        for (origin, finding), is_skipped in zip(found, skipped, strict=True):
            # An inf that a smaller scale avoids may become NaN later in backward: the next step shows the rest.
            if is_skipped or not (any(skipped) and origin.only_gradients):
                self.add(finding, skipped=is_skipped)
        # In a step that an exception ended, a value that nothing has read yet is not masked either.
        for event in masked(self._events, origins if complete else find_origins(self._events)):
            finding = replace(event.known, grade="note", inputs=(), step=self.run.step)
            finding.what = f"a result is {event.values}, which a later operator masks"
            finding.cause = event.rounded or finding.cause
            self.add(finding)

    def _finding(self, origin: Origin) -> Finding:
        """Return the finding of an origin."""
        event, symptom = origin.event, origin.symptom
        finding = replace(event.known, step=self.run.step, scale=self.run.scale, nonfinite=tuple(event.nonfinite))
        cause = finding.cause
        if event.rounded is not None:
            finding.cause, finding.producer = event.rounded, finding.rounding_sources[0]
        elif cause.kind == "undefined" and finding.place.backward_of:
            text = causes.advice_for(finding.place.op, finding.place.backward_of)[0] or cause.text
            finding.cause = replace(cause, text=text)
        elif cause.kind == "constant":
            finding.cause = replace(cause, text=f"{event.values} is written explicitly in the code")
        elif cause.kind == "from inf" and origin.constant is not None:
            finding.producer = origin.constant.known.place
        if cause.kind != "arrived":
            finding.parameter = symptom.known.parameter
        finding.what = _symptom(symptom)
        finding.unused = not origin.is_used
        if finding.unused and finding.kind == "undefined":
            finding.grade = "note"  # NeRF's disparity of rays without a hit is 0/0
        if finding.place.phase == "scaler" and event.scalar and not event.inputs and finding.kind != "arrived":
            finding.grade = "note"
            text = f"the loss scale has fallen to {self.run.scale or 0.0:.3g}, and its inverse is not finite"
            finding.cause = replace(finding.cause, text=text)
        if finding.kind == "arrived" and not finding.parameter:
            finding.check = "data"
        return finding

    def _note_gradients(self) -> None:
        """Note which events wrote the gradients of parameters, even if a later event has read them."""
        for name, parameter in [pair for root in self.run.modules.roots() for pair in root.named_parameters()]:
            if parameter.grad is None or is_opaque(parameter.grad):
                continue
            for event in self._events_of(self._writers_of(parameter.grad)):
                if event.nonfinite:
                    event.role = event.role or "gradient"
                    event.known.parameter = event.known.parameter or name

    # --- the operators that wrote a tensor

    def _writers_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the stored events that wrote a tensor of floats."""
        return (self._writers.get(tensor) or ()) if tensor.is_floating_point() or tensor.is_complex() else ()

    def _events_of(self, writers: tuple[int, ...]) -> list[Event]:
        """Return the events of this step among these."""
        return [self._events[index] for index in writers if index in self._events]

    def _note_writer(self, call: Call, index: int | None = None, inputs: tuple[int, ...] = ()) -> None:
        """Note that a call wrote its outputs, and its event, if that is stored.

        A write to a part of a storage adds to the writers of the rest.
        """
        if call.op.takes_storage:
            return  # an operator that reads it finds a tensor that was there before
        for tensor in call.outputs if index is not None or self._writers or self._empty or call.op.is_empty else ():
            is_part = call.op.mutable and tensor.nbytes < tensor.untyped_storage().nbytes()
            writers = tuple(each.index for each in self._events_of(self._writers_of(tensor))) if is_part else ()
            if index is not None:
                writers = (*writers, index)
            if not is_part:
                self._writers.discard(tensor)
                self._empty.discard(tensor)
            if writers:
                self._writers.set(tensor, writers)
            if call.op.is_empty:
                self._empty.set(tensor, (call, inputs))

    def _new_event(self, phase: str, inputs: Iterable[int] = ()) -> Event:
        self._next += 1
        return Event(self._next - 1, phase, tuple(inputs))

    def _begin_finding(self, event: Event, call: Call, tensor: Tensor) -> Finding:
        """Store an event until the end of the step, and begin its finding."""
        backwards = self.run.backwards
        event.finding = Finding(
            grade="error",
            check=self.name,
            cause=causes.PROPAGATED,
            what="",
            place=self.run.place(call, tensor),
            device=tensor.device.type,
            micro_batch=backwards + 1 if call.phase == "forward" else max(1, backwards),
        )
        self._events[event.index] = event
        return event.finding

    def _add_input(self, tensor: Tensor, call: Call) -> tuple[int, ...]:
        """Add an event for a tensor from before the step that a call reads; no event if it cannot be read."""
        if not readable([tensor]):
            return ()
        event = self._new_event("before")
        self._writers.set(tensor, (event.index,))
        finding = self._begin_finding(event, call, tensor)
        finding.place = replace(finding.place, index=-1, op="", phase="before", backward_of="")
        finding.parameter = self.run.name_of(tensor)
        finding.cause = Cause("arrived", "it was there before the step")
        event.note_range(*extremes(tensor))
        if event.nonfinite and not finding.parameter:
            finding.cause = self._data.cause(tensor, event.values)
        return (event.index,)

    # --- why a result is not finite

    def _explain(self, event: Event, call: Call, inputs: list[_Input]) -> None:
        """Set the cause of a non-finite result."""
        outputs, before = call.outputs, call.arguments()
        finding = self._begin_finding(event, call, outputs[0])
        self._note_parameter(event, call)
        if any(index in self._skipped for each in inputs for index in each.writers):
            finding.cause = causes.SKIPPED
            return
        if call.op.literal or causes.writes_nonfinite(before):
            finding.cause = causes.CONSTANT
            return
        first = next(i for i, (low, high) in enumerate(call.ranges) if not math.isfinite(high - low))
        output = outputs[first]
        if call.op.on_lists:
            before, outputs = item_of(before, first, len(outputs)), [outputs[first]]
        arguments = {id(tensor) for tensor in tensors_in(before)}
        inputs = [each for each in inputs if id(each.before) in arguments]
        kinds: set[str] = set()  # of the inputs
        for each in inputs:
            if not readable([each.before]):
                continue
            low, high = extremes(each.before)
            if not math.isfinite(high - low):
                kinds |= nonfinite_kinds(low, high)
                event.inputs += self._origin_of(each, low, high, call, event.index)
        is_new = call.phase == "forward" and kinds == {"-inf"} and "inf" in event.nonfinite  # next to a mask
        if "nan" in kinds or (kinds and "nan" not in event.nonfinite and not is_new):
            return  # propagated from an input
        finding.elements = nonfinite_elements(output)
        finding.inputs = tuple(
            Operand(
                dtype_name(each.before.dtype),
                described(each.before, "" if each.writers else self.run.name_of(each.tensor)),
            )
            for each in inputs
            if each.before.numel() and not is_opaque(each.before) and each.before.dtype is not torch.bool
        )
        args, kwargs = before
        is_new &= "nan" not in event.nonfinite
        cause = causes.find_cause(call.op, args, kwargs, outputs, from_inf=bool(kinds) and not is_new)
        if is_new and cause.kind not in ("overflow", "intermediate"):
            return  # propagated with another sign
        finding.cause = cause
        event.is_auxiliary = math.isfinite(sum(call.ranges[0]))
        event.is_mask = _is_mask(call, cause)
        place = (call.op.name, *finding.place.site, call.phase)
        replays = self._replays.get(place, 0)
        if cause.kind in ("undefined", "from inf") and replays < _MAX_REPLAYS:
            self._replays[place] = replays + 1
            self._replay(finding, event)
        text = "" if event.is_mask else self._data.blamed(call, cause.kind)
        if cause.kind == "overflow" and _adds_masks(call, inputs):
            finding.cause = replace(cause, text=f"{cause.text}; it is the sum of two masks", is_number=True)
        elif text:
            finding.cause = replace(finding.cause, text=f"{finding.cause.text}; {text}", is_of_data=True)

    def _replay(self, finding: Finding, event: Event) -> None:
        """Find the calls that rounded the operands of the last call, which is undefined for them."""
        recorded = self.run.tape.last()
        explanation = explain(recorded)
        finding.rounding_sources = tuple(
            replace(self.run.place(source.call), dtype=dtype_name(source.dtype)) for source in explanation.sources
        )
        if explanation.sources:
            event.rounded = Cause("rounded", explanation.text, is_number=explanation.is_number)
            return
        finding.cause = replace(finding.cause, is_exact=explanation.exact)
        if finding.cause.kind == "undefined":
            producer = zero_producer(recorded)
            finding.producer = None if producer is None else self.run.place(producer)

    def _origin_of(self, argument: _Input, low: float, high: float, call: Call, reader: int) -> tuple[int, ...]:
        """Return the event that explains a non-finite input; none if a writer is already non-finite."""
        if any(writer.nonfinite for writer in self._events_of(argument.writers)):
            return ()
        latest = self._writers.get(argument.tensor)
        if argument.empty is not None:
            made, sources = argument.empty
            writer = self._new_event(made.phase, sources)
            cause = causes.UNINITIALIZED if made.op.uninitialized else causes.RECEIVED
            self._begin_finding(writer, made, argument.tensor).cause = cause
            writer.note_range(low, high)
            if any(index in self._events and self._events[index].nonfinite for index in writer.inputs):
                writer.known.cause = causes.PROPAGATED  # this rank sent a non-finite value itself
            self._writers.set(argument.tensor, (writer.index, *(latest or ())))
            return (writer.index,)
        origin = self._add_input(argument.tensor, call)
        for index in origin:
            self._events[index].note_range(low, high)
        if latest is not None and reader in latest:
            self._writers.set(argument.tensor, latest)  # the call writes it in place: its values are now the call's
        return origin

    def _note_parameter(self, event: Event, call: Call) -> None:
        """Note the first non-finite parameter or buffer that a call writes, or whose gradient a scaler writes."""
        if call.phase == "scaler" and not call.op.mutable:  # it counts in gradients that the scaler has written
            read = (self._events[index].finding for index in event.inputs if index in self._events)
            event.known.parameter = next((each.parameter for each in read if each is not None), "")
            return
        if not call.op.writes:
            return
        roots = () if call.op.mutable else self.run.modules.roots()  # batch norm writes its buffers
        buffers = {id(buffer) for root in roots for buffer in root.buffers()}
        for output, (low, high) in zip(call.outputs, call.ranges, strict=True):
            if math.isfinite(high - low):
                continue
            if call.phase == "scaler":
                event.known.parameter = self.run.name_of(output).removesuffix(".grad")
                return
            if output.is_leaf and (output.requires_grad if call.op.mutable else id(output) in buffers):
                event.role = "parameter" if call.op.mutable else "buffer"
                event.known.parameter = self.run.name_of(output)
                return


def _scaler_helps(finding: Finding) -> bool:
    """Return whether a smaller loss scale avoids a finding, as while a scaler's scale settles."""
    cause, scale = finding.cause, finding.scale
    if scale is None or finding.place.phase != "backward":
        return False
    if cause.kind == "overflow" and cause.value is not None and cause.limit is not None:
        return cause.value / scale <= cause.limit
    return cause.kind in ("intermediate", "received", "unknown")


def _is_mask(call: Call, cause: Cause) -> bool:
    """Return whether an inf is a number of the code that the dtype cannot hold, such as the -9e15 of a mask."""
    if cause.kind != "overflow" or cause.limit is None or any(each.requires_grad for each in call.tensors):
        return False
    return any(abs(number) > cause.limit for number in call.scalars)


def _adds_masks(call: Call, inputs: list[_Input]) -> bool:
    """Return whether a call adds two masks: their elements are 0 or large negative numbers of the code."""
    ranges = [extremes(each.before) for each in inputs if readable([each.before]) and not each.before.requires_grad]
    return (
        call.op.base == "add" and len(ranges) == 2 and all(low <= -LARGE_NUMBER and high <= 0 for low, high in ranges)
    )


def _symptom(event: Event) -> str:
    """Return the symptom in the user's words: a loss, parameter, gradient or result, and its non-finite values."""
    name = event.known.parameter
    if event.role == "loss":
        subject = "the loss"
    elif event.role in ("parameter", "buffer"):
        subject = f"{event.role} {name or '?'}"
    elif event.role == "gradient" or event.phase in ("backward", "scaler"):
        subject = f"the gradient of {name or 'an input'}"
    else:
        subject = "a result" if event.scalar else "a tensor that nothing reads"
    return f"{subject} is {event.values}"
