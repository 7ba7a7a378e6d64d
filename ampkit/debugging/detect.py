"""`detect_nonfinite`: a context around training steps that reports the operator where inf or NaN began.

It reads every operator's result on the host at once, while the inputs of a broken result still exist.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.debugging import causes
from ampkit.debugging.nonfinite_origins import Event, Origin, broken_kinds, find_origins
from ampkit.debugging.operator_calls import OperatorCall, OperatorObserver, Ran
from ampkit.debugging.operator_facts import item_of, readable, tensors_in
from ampkit.debugging.proposed_changes import advice, changes_for, suggestion
from ampkit.debugging.replay import explain, maker_of_zero
from ampkit.debugging.report import Finding, NonFiniteError, NonFiniteReport
from ampkit.debugging.storage_map import StorageMap
from ampkit.debugging.tape import Tape
from ampkit.debugging.torch_private import OpOverload, is_opaque

_MAX_EXPLAINED = 2  # replays of the operator of one line: an inf that something absorbs is met in each step


def _is_cured_by_scaler(finding: Finding) -> bool:
    """Whether a smaller loss scale helps, as while a scaler's scale settles."""
    cause, scale = finding.cause, finding.scale
    if scale is None or finding.origin.phase != "backward":
        return False
    if cause.kind == "overflow" and cause.value is not None and cause.limit is not None:
        return cause.value / scale <= cause.limit
    return cause.kind in ("intermediate", "received", "unknown")


def _is_mask(call: OperatorCall, cause: causes.Cause) -> bool:
    """Whether an inf is a number of the code that the dtype cannot hold, such as the -9e15 of a mask."""
    if cause.kind != "overflow" or cause.limit is None or any(each.requires_grad for each in call.tensors):
        return False
    return any(abs(number) > cause.limit for number in call.numbers)


def _symptom(event: Event) -> str:
    """The symptom in the user's words: the loss, a parameter, a gradient or a result, and its non-finite values."""
    name = event.finding.parameter
    if event.shows == "loss":
        broken = "the loss"
    elif event.shows in ("parameter", "buffer"):
        broken = f"{event.shows} {name or '?'}"
    elif event.shows == "gradient" or event.phase in ("backward", "scaler"):
        broken = f"the gradient of {name or 'an input'}"
    else:
        broken = "a result" if event.scalar else "a tensor that nothing absorbs"
    return f"{broken} is {event.values}"


def rank() -> int | None:
    """The rank of this process among several; None if it is alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() if torch.distributed.get_world_size() > 1 else None
    return int(os.environ["RANK"]) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None


class _Input(NamedTuple):
    """A tensor argument of an operator call."""

    before: Tensor  # its values as they were before the call
    tensor: Tensor
    writers: tuple[int, ...] | None  # the events that wrote it; None: it was there before the step


class detect_nonfinite(OperatorObserver[NonFiniteReport]):
    """Context that checks every operator's result for inf and NaN, in forward, backward and optimizer.

    For each symptom (a loss, gradient, parameter or result that is inf or NaN) the report names the first operator
    whose inputs were finite and whose result was not: its module and the number of the module's call, the user's line,
    and the cause, which it finds by running the operator again in float64 on the same inputs. Values that later
    operators absorb, such as masks of -inf, are no finding. Gradients that overflow only because of the loss scale are
    in `report.skipped`: the scaler skips those steps.

    A step ends after `optimizer.step()`, where a scaler skips it, and at the end of the context. Compiled functions run
    eagerly meanwhile. Results and random numbers stay the same to the bit.

    Synchronizes with the device at each operator, to read its result on the host.

    Args:
        model: module whose submodules are named by their paths; None takes the outermost module that runs.
        on_found: "raise" raises `NonFiniteError` at the end of a step with a finding, "record" only fills the report.

    Raises:
        NonFiniteError: at the end of a step, if `on_found` is "raise".
        TypeError: if `model` is no module.
        ValueError: if `on_found` is another value.

    Entering returns the `NonFiniteReport`.

    Example::

        with debugging.detect_nonfinite(model) as report:
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
    """

    def __init__(self, model: Module | None = None, on_found: Literal["raise", "record"] = "raise") -> None:
        if on_found not in ("raise", "record"):
            raise ValueError(f"on_found is {on_found!r}; expected 'raise' or 'record'")
        super().__init__(model, self._new_report())
        self.losses: list[float] = []  # unscaled, one for each call of backward
        self._events: dict[int, Event] = {}  # of this step: the broken ones, and those that read them
        self._on_found = on_found
        self._complete = True  # False: an exception ended the step, and a later operator could absorb an inf
        self._writers: StorageMap[tuple[int, ...]] = StorageMap()  # by storage: the events that wrote it
        self._tape: Tape | None = Tape()  # None: operators are not explained by replaying what led to them
        self._explained: dict[tuple[str, str, int, str], int] = {}  # how often a replay has explained an operator's inf
        self._backwards = 0  # calls of backward in this step
        self._next = 0  # index of the next event
        self._left: set[int] = set()  # the broken events of the last step that a scaler skipped
        self._begun_step = False  # the step has computed something that counts, see `_observe`

    def _new_report(self) -> NonFiniteReport:
        return NonFiniteReport(rank=rank())

    def _run(self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator once and return its result."""
        return func(*args, **kwargs)

    def _ran(self, ran: Ran) -> None:
        """Called after an operator."""

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        error = raised[1]
        self._complete = error is None
        if error is not None and not isinstance(error, NonFiniteError):
            self.report.incomplete = f"the steps ended with {type(error).__name__}"
        self._count()
        if error is None or (isinstance(error, Exception) and not isinstance(error, NonFiniteError)):
            self._step_ended()  # the user's own error stays the context of a NonFiniteError

    def _observe(self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts = call.facts
        # After the last step a loop may print a loss or an average: operators outside of modules begin no new step.
        self._begun_step |= call.phase == "backward" or (
            call.phase == "forward" and (call.module is not None or self.step == 0)
        )
        read = call.tensors
        written = facts.written(args, kwargs)
        if written and facts.overwrites:
            read = [tensor for tensor in read if not any(tensor is other for other in written)]
        buffers = facts.buffers(args, kwargs)
        kept: dict[int, Tensor] = {}  # copies of what the call writes, from before it
        if (written or buffers) and not facts.overwrites and not facts.communicates:
            kept = {id(tensor): tensor.clone() for tensor in (*written, *buffers)}
        writers = [] if facts.shape_only else [self._writers_of(tensor) for tensor in read]
        result = self._run(call, func, args, kwargs)
        if self._tape is not None:
            self._tape.ran(call, func, args, kwargs, result, kept)
        if call.starts_backward:
            self._note_loss(call.tensors[0])
        outputs = [*readable(facts.outputs(result, args, kwargs)), *buffers]
        inputs = tuple({index for indices in writers for index in indices or () if index in self._events})
        if not outputs:  # a comparison, an index, or a number on the host
            self._ran(Ran(call, func, args, kwargs, kept, outputs))
            inputs = tuple(index for index in inputs if not self._events[index].scalar)  # loops often check a loss
            if inputs and isinstance(result, Tensor) and result.dtype is torch.bool:
                self._events[self._next] = Event(self._next, call.phase, inputs)
                self._next += 1
            return result
        event = Event(self._next, call.phase, inputs, scalar=all(output.numel() == 1 for output in outputs))
        self._next += 1
        if facts.is_given:
            return result  # what reads it finds a tensor that was there before
        for output in outputs:
            self._note_writer(output, event.index, call)
        if facts.uninitialized or facts.communicates:
            # The values mean nothing yet: memory is not written, or on its way. The first reader checks them.
            finding = self._keep(event, call, outputs[0])
            finding.cause = causes.UNINITIALIZED if facts.uninitialized else causes.RECEIVED
            self._ran(Ran(call, func, args, kwargs, kept, outputs))
            return result
        ran = Ran(call, func, args, kwargs, kept, outputs, list(map(causes.extremes, outputs)))
        self._ran(ran)
        for low, high in ran.ranges:
            event.note_range(low, high)
        if event.broken:
            tensors = [_Input(kept.get(id(t), t), t, indices) for t, indices in zip(read, writers, strict=False)]
            self._explain(event, ran, tensors)
        elif inputs:
            self._events[event.index] = event  # it absorbs a broken value
        return result

    # --- the course of a step

    def _step_ended(self, *, skipped: bool = False) -> None:
        if skipped:
            self._left = {index for index, event in self._events.items() if event.broken}
        try:
            if any(event.broken for event in self._events.values()):
                self._note_gradients()
                self._add_findings()
        finally:
            self._events.clear()
            if self._tape is not None:
                self._tape.clear()
            self.scale = None
            self._backwards = 0
            self._begun_step = False

    def _add_findings(self) -> list[Origin]:
        """Turn the events of a step into findings, and raise for new ones. Returns where they began."""
        self._count()
        origins = find_origins(self._events, complete=self._complete)
        found = [(origin, self._finding(origin)) for origin in origins]
        overflows = any(finding.skipped for _, finding in found)
        new = False
        for origin, finding in found:
            # An inf that a smaller scale cures may become NaN later in backward: the next step shows what remains.
            if overflows and origin.only_gradients and not finding.skipped:
                continue
            if self.report.add(finding) and not finding.skipped:
                new = True
        if new and self._on_found == "raise":
            raise NonFiniteError(self.report)
        return origins

    def _finding(self, origin: Origin) -> Finding:
        """The finding of an origin."""
        event, symptom = origin.event, origin.symptom
        finding: Finding = replace(event.finding)
        cause = finding.cause
        if event.rounded is not None:
            finding.cause, finding.made = event.rounded, finding.makers[0]
        elif cause.kind == "undefined" and finding.origin.backward_of:
            text = causes.advice_for(finding.origin.op, finding.origin.backward_of)[0] or cause.text
            finding.cause = replace(cause, text=text)
        elif cause.kind == "constant":
            finding.cause = replace(cause, text=f"{event.values}, which the code asks for")
        elif cause.kind == "from inf":
            finding.made = origin.constant.finding.origin if origin.constant is not None else None
        if cause.kind != "arrived":
            finding.parameter = symptom.finding.parameter
        finding.symptom, finding.step, finding.scale = _symptom(symptom), self.step, self.scale
        finding.unused = not origin.is_used
        finding.skipped = origin.only_gradients and _is_cured_by_scaler(finding)
        if not finding.skipped:
            # What is undefined is no matter of precision, as long as no call is known that rounded its operands.
            undefined = finding.cause.kind in ("undefined", "from inf")
            undefined |= finding.cause.is_of_data
            modules = self.modules
            changes = () if undefined else changes_for(finding, modules.region, modules.model, modules.policy)
            finding.suggestion = suggestion(changes, advice(finding))
        return finding

    def _count(self) -> None:
        self.report.operators = self.count
        self.report.steps = max(0, self.step - self.first_step)
        if self._begun_step:
            self.report.steps += 1

    def _note_loss(self, loss: Tensor) -> None:
        self._backwards += 1
        self.losses.append(float(loss.detach()) / (self.scale or 1.0))
        for index in self._writers_of(loss) or ():
            if index in self._events:
                self._events[index].shows = "loss"

    def _note_gradients(self) -> None:
        """Note which events wrote the gradients of parameters, even if a later event has read them."""
        for name, parameter in [pair for root in self.modules.roots() for pair in root.named_parameters()]:
            if parameter.grad is None:
                continue
            for index in self._writers_of(parameter.grad) or ():
                event = self._events.get(index)
                if event is not None and event.broken:
                    event.shows = event.shows or "gradient"
                    event.finding.parameter = event.finding.parameter or name

    # --- who wrote what

    def _writers_of(self, tensor: Tensor) -> tuple[int, ...] | None:
        """The events that wrote a tensor of floats; None for a tensor that was there before."""
        return self._writers.get(tensor) if tensor.is_floating_point() or tensor.is_complex() else None

    def _note_writer(self, tensor: Tensor, index: int, call: OperatorCall) -> None:
        """Note the event that wrote a tensor; a write to a part of a storage adds to the writers of the rest."""
        earlier: tuple[int, ...] = ()
        if call.facts.mutable and tensor.nbytes < tensor.untyped_storage().nbytes():
            earlier = tuple(writer for writer in self._writers_of(tensor) or () if writer in self._events)
        self._writers.set(tensor, (*earlier, index))

    def _keep(self, event: Event, call: OperatorCall, tensor: Tensor) -> Finding:
        """Keep an event until the end of the step, and begin its finding."""
        dtype, shape = causes.dtype_name(tensor.dtype), tuple(tensor.shape)
        operation = self._operation(call, dtype=dtype, shape=shape)
        micro_batch = self._backwards + 1 if call.phase == "forward" else max(1, self._backwards)
        self._events[event.index] = event
        event.finding = Finding(operation, tensor.device.type, micro_batch)
        return event.finding  # type: ignore[no-any-return]

    def _arrive(self, tensor: Tensor, call: OperatorCall) -> tuple[int, ...]:
        """Add an event for a tensor from before the step that a call reads; no event if it cannot be read."""
        if next(readable([tensor]), None) is None:
            return ()
        event = Event(self._next, "before")
        self._next += 1
        self._writers.set(tensor, (event.index,))
        finding = self._keep(event, call, tensor)
        finding.origin = replace(finding.origin, index=-1, op="", phase="before")
        finding.parameter = self._name_of(tensor)
        finding.cause = causes.Cause("arrived", "it was there before the step")
        event.note_range(*causes.extremes(tensor))
        return (event.index,)

    # --- why a result is broken

    def _explain(self, event: Event, ran: Ran, inputs: list[_Input]) -> None:
        """Set the cause of a broken result."""
        call, func, outputs, before = ran.call, ran.func, ran.outputs, ran.arguments()
        finding = self._keep(event, call, outputs[0])
        self._note_parameter(event, call, outputs)
        if any(index in self._left for each in inputs for index in each.writers or ()):
            finding.cause = causes.SKIPPED
            return
        if call.facts.literal or causes.asks_for_nonfinite(before):
            finding.cause = causes.CONSTANT
            return
        broken = next(i for i, (low, high) in enumerate(ran.ranges) if not math.isfinite(high - low))
        finding.elements = causes.broken_elements(outputs[broken])
        if call.facts.name.startswith(("aten::_foreach_", "aten::_fused_")):
            before, outputs = item_of(before, broken, len(outputs)), [outputs[broken]]
        arguments = {id(tensor) for tensor in tensors_in(before)}
        inputs = [each for each in inputs if id(each.before) in arguments]
        broken_in: set[str] = set()
        for each in inputs:
            if next(readable([each.before]), None) is None:
                continue
            low, high = causes.extremes(each.before)
            if not math.isfinite(high - low):
                broken_in |= broken_kinds(low, high)
                event.inputs += self._blamed(each, low, high, call, event.index)
        inf_in = bool(broken_in)
        is_new = call.phase == "forward" and broken_in == {"-inf"} and "inf" in event.broken  # beside a mask
        if "nan" in broken_in or (inf_in and "nan" not in event.broken and not is_new):
            return  # passed on
        finding.inputs = tuple(
            causes.described(each.before, "" if each.writers else self._name_of(each.tensor))
            for each in inputs
            if each.before.numel() and not is_opaque(each.before) and each.before.dtype is not torch.bool
        )
        args, kwargs = before
        is_new &= "nan" not in event.broken
        cause = causes.find_cause(func, call.facts, args, kwargs, outputs, from_inf=inf_in and not is_new)
        if is_new and cause.kind not in ("overflow", "intermediate"):
            return  # passed on with another sign
        finding.cause = cause
        event.is_auxiliary = math.isfinite(sum(ran.ranges[0]))
        event.is_mask = _is_mask(call, cause)
        place = (finding.origin.op, finding.origin.file, finding.origin.line, finding.origin.phase)
        known = self._explained.get(place, 0)
        if self._tape is not None and finding.cause.kind in ("undefined", "from inf") and known < _MAX_EXPLAINED:
            self._explained[place] = known + 1
            self._replay(self._tape, event, call)

    def _replay(self, tape: Tape, event: Event, call: OperatorCall) -> None:
        """Find the calls that rounded the operands of a call that is undefined for them."""
        finding, explanation = event.finding, explain(tape, call.index)
        finding.makers = tuple(
            self._operation(maker.call, dtype=causes.dtype_name(maker.dtype)) for maker in explanation.makers
        )
        if explanation.makers:
            event.rounded = causes.Cause("rounded", explanation.text)
            return
        finding.cause = replace(finding.cause, is_exact=explanation.exact)
        if finding.cause.kind == "undefined":
            zero = maker_of_zero(tape, call.index)
            finding.made = None if zero is None else self._operation(zero)

    def _blamed(self, broken: _Input, low: float, high: float, call: OperatorCall, reader: int) -> tuple[int, ...]:
        """The event to blame for a broken input with this range; none if a writer is known to be broken already."""
        writers = [self._events[index] for index in broken.writers or () if index in self._events]
        if any(writer.broken for writer in writers):
            return ()
        for writer in writers:
            if writer.kind in ("uninitialized", "received"):
                writer.note_range(low, high)
                if any(index in self._events and self._events[index].broken for index in writer.inputs):
                    writer.finding.cause = causes.PASSED_ON  # this rank sent a broken value itself
                return (writer.index,)
        latest = self._writers.get(broken.tensor)
        arrived = self._arrive(broken.tensor, call)
        for index in arrived:
            self._events[index].note_range(low, high)
        if latest is not None and reader in latest:
            self._writers.set(broken.tensor, latest)  # the call writes it in place: its values are now the call's
        return arrived

    def _note_parameter(self, event: Event, call: OperatorCall, outputs: list[Tensor]) -> None:
        """Note the first broken parameter or buffer that a call writes, or whose gradient a scaler writes."""
        if not (call.facts.mutable or call.facts.undeclared_writes):
            return
        buffers = {id(buffer) for root in self.modules.roots() for buffer in root.buffers()}
        for output in filter(causes.is_broken, outputs):
            if call.phase == "scaler":
                event.finding.parameter = self._name_of(output).removesuffix(".grad")
                return
            if output.is_leaf and (output.requires_grad if call.facts.mutable else id(output) in buffers):
                event.shows = "parameter" if call.facts.mutable else "buffer"
                event.finding.parameter = self._name_of(output)
                return
