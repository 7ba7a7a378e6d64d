"""`detect_nonfinite`: a context around training steps that says where inf and NaN come from.

Every operator's result is read on the host at once, while the inputs of one that went wrong are still there.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.containers import map_tensors
from ampkit.debugging import causes
from ampkit.debugging.nonfinite_origins import Record, Trace, trace
from ampkit.debugging.operator_calls import OperatorCall, OperatorObserver
from ampkit.debugging.operator_facts import readable, tensors_in
from ampkit.debugging.proposed_changes import advice, changes_for, suggestion
from ampkit.debugging.report import Finding, NonFiniteError, NonFiniteReport, Operation
from ampkit.debugging.storage_map import StorageMap
from ampkit.torch_internals.operator_tracing import OpOverload, is_opaque


def _is_cured_by_scaler(finding: Finding) -> bool:
    """Whether a smaller loss scale helps, as in the warm-up of a scaler."""
    cause, scale = finding.cause, finding.scale
    if scale is None or finding.origin.phase != "backward":
        return False
    if cause.kind == "overflow" and cause.value is not None and cause.limit is not None:
        return cause.value / scale <= cause.limit
    return cause.kind in ("intermediate", "received", "unknown")


def _symptom(last: Record) -> str:
    """What a user sees."""
    name = last.finding.parameter
    if last.shows == "loss":
        what = "the loss"
    elif last.shows in ("parameter", "buffer"):
        what = f"{last.shows} {name or '?'}"
    elif last.shows == "gradient" or last.phase in ("backward", "scaler"):
        what = f"the gradient of {name or 'an input'}"
    else:
        what = "a result" if last.scalar else "a tensor that nothing absorbs"
    return f"{what} is {last.values}"


def rank() -> int | None:
    """Of this process among several; None where it is alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() if torch.distributed.get_world_size() > 1 else None
    return int(os.environ["RANK"]) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None


# --- what a step did


class _Written(NamedTuple):
    """The records that wrote a tensor's memory, and the last call."""

    records: tuple[int, ...]
    call: OperatorCall | None


class _Input(NamedTuple):
    """A tensor that an operator is given."""

    before: Tensor                      # its values as they were before the call
    tensor: Tensor
    writers: tuple[int, ...] | None     # the records that wrote it; None: it was there before


class detect_nonfinite(OperatorObserver[NonFiniteReport]):
    """Context in which every operator's result is looked at, forward, backward and optimizer::

        with debugging.detect_nonfinite(model) as report:
            loss = model(x).mean()
            loss.backward()
            optimizer.step()

    It names the first operator whose inputs were finite and whose result was not, its module and which call of it, the
    user's line, why (the operator runs again in float64 on the same inputs), and the loss, gradient, parameter or
    result where it shows. What is absorbed on the way, such as masks of -inf, is no finding; gradients that a
    GradScaler meets and that a smaller scale can cure are in `report.skipped`.

    `model`: paths count from it; None takes the outermost module that runs. `on_found`: "raise" raises
    `NonFiniteError` when the step ends, "record" only fills the report. Each result is read on the host, which waits
    for an accelerator at each operator.

    A step ends after `optimizer.step()`, when a scaler has skipped it, and at the end of the context. Compiled
    functions run eagerly meanwhile. Results and random numbers stay the same to the bit.
    """

    def __init__(self, model: Module | None = None, on_found: Literal["raise", "record"] = "raise") -> None:
        if on_found not in ("raise", "record"):
            raise ValueError(f"on_found is {on_found!r}; expected 'raise' or 'record'")
        super().__init__(model, NonFiniteReport(rank=rank()))
        self.losses: list[float] = []           # as backward began
        self._records: dict[int, Record] = {}   # the broken ones of this step, and who read them
        self._on_found = on_found
        self._complete = True       # False: an exception ended the step, and what was not read might have been
        self._writers: StorageMap[_Written] = StorageMap()
        self._backwards = 0
        self._next = 0
        self._left: set[int] = set()    # what was broken in a step that a scaler skipped
        self._begun_step = False    # it computes: a loss that is printed after the last one begins none

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        error = raised[1]
        self._complete = error is None
        if error is not None and not isinstance(error, NonFiniteError):
            self.report.incomplete = f"the steps ended with {type(error).__name__}"
        self._count()
        if error is None or (isinstance(error, Exception) and not isinstance(error, NonFiniteError)):
            self.step_ended()       # what the user's code raised stays as the context of what is raised here

    def observe(self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts = call.facts
        self._begun_step |= call.phase == "backward" or (
            call.phase == "forward" and (call.module is not None or self.step == 0)
        )
        given = call.given
        written = facts.written(args, kwargs)
        if written and facts.overwrites:
            given = [one for one in given if not any(one is other for other in written)]
        buffers = facts.buffers(args, kwargs)
        kept: dict[int, Tensor] = {}        # what is written, as it was before
        if (written or buffers) and not facts.overwrites and not facts.communicates:
            kept = {id(tensor): tensor.clone() for tensor in (*written, *buffers)}
        writers = [] if facts.shape_only else [self._writers_of(one) for one in given]
        result = func(*args, **kwargs)
        if call.starts_backward:
            self._note_loss(call.given[0])
        outputs = [*readable(facts.outputs(result, args, kwargs)), *buffers]
        read = tuple({index for some in writers for index in some or () if index in self._records})
        if not outputs:     # a comparison, an index, a number on the host
            read = tuple(index for index in read if not self._records[index].scalar)     # a loss is looked at by loops
            if read and isinstance(result, Tensor) and result.dtype is torch.bool:
                self._records[self._next] = Record(self._next, call.phase, read)
                self._next += 1
            return result
        record = Record(self._next, call.phase, read, scalar=all(one.numel() == 1 for one in outputs))
        self._next += 1
        for one in outputs:
            self._note_writer(one, record.index, call)
        if facts.uninitialised or facts.communicates:
            # Values that mean nothing yet: unwritten, or still under way. Whoever reads them looks.
            finding = self._keep(record, call, outputs[0])
            finding.cause = causes.UNINITIALISED if facts.uninitialised else causes.RECEIVED
            return result
        for one in outputs:
            record.mark(*causes.extremes(one))
        if record.broken:
            before = map_tensors((args, kwargs), lambda one: kept.get(id(one), one)) if kept else (args, kwargs)
            inputs = [_Input(kept.get(id(one), one), one, some) for one, some in zip(given, writers, strict=False)]
            self._explain(record, call, func, before, inputs, outputs)
        elif read:
            self._records[record.index] = record     # it absorbs something
        return result

    # --- the course of a step

    def step_ended(self, *, skipped: bool = False) -> None:
        if skipped:
            self._left = {index for index, record in self._records.items() if record.broken}
        try:
            if any(record.broken for record in self._records.values()):
                self._note_gradients()
                self._judge()
        finally:
            self._records.clear()
            self.scale = None
            self._backwards = 0
            self._begun_step = False

    def _judge(self) -> None:
        """Turn what a step recorded into findings, and raise for the new ones."""
        self._count()
        found = [(one, self._finding(one)) for one in trace(self._records, complete=self._complete)]
        overflows = any(finding.skipped for _, finding in found)
        new = False
        for one, finding in found:
            # An inf that a smaller scale cures makes NaN of what would have been absorbed: the next step tells.
            if finding.skipped or not (overflows and one.only_gradients):
                new |= self.report.add(finding) and not finding.skipped
        if new and self._on_found == "raise":
            raise NonFiniteError(self.report)

    def _finding(self, found: Trace) -> Finding:
        """What a report says of an origin."""
        origin, symptom = found.origin, found.symptom
        finding: Finding = replace(origin.finding)
        cause = finding.cause
        if cause.kind == "undefined" and finding.origin.backward_of:
            text = causes.advice_for(finding.origin.op, finding.origin.backward_of)[0] or cause.text
            finding.cause = replace(cause, text=text)
        elif cause.kind == "constant":
            finding.cause = replace(cause, text=f"{origin.values}, which the code asks for")
        elif cause.kind == "from inf":
            finding.made = found.constant.finding.origin if found.constant is not None else None
        if cause.kind != "arrived":
            finding.parameter = symptom.finding.parameter
        finding.symptom, finding.step, finding.scale = _symptom(symptom), self.step, self.scale
        finding.skipped = found.only_gradients and _is_cured_by_scaler(finding)
        if not finding.skipped:
            changes = changes_for(finding, self.modules.region, self.modules.model)
            finding.suggestion = suggestion(changes, advice(finding))
        return finding

    def _count(self) -> None:
        self.report.operators = self.count
        self.report.steps = max(0, self.step - self.first_step) + self._begun_step

    def _note_loss(self, loss: Tensor) -> None:
        self._backwards += 1
        self.losses.append(float(loss.detach()) / (self.scale or 1.0))
        for index in self._writers_of(loss) or ():
            if index in self._records:
                self._records[index].shows = "loss"

    def _note_gradients(self) -> None:
        """Which records are what parameters hold as gradients, whoever has read them since."""
        named = [pair for root in self.modules.roots() for pair in root.named_parameters()]
        for name, parameter in named:
            for index in self._writers_of(parameter.grad) or () if parameter.grad is not None else ():
                record = self._records.get(index)
                if record is not None and record.broken:
                    record.shows = record.shows or "gradient"
                    record.finding.parameter = record.finding.parameter or name

    # --- who wrote what

    def _writers_of(self, tensor: Tensor) -> tuple[int, ...] | None:
        """The records that wrote a tensor of floats; None for one that was there before."""
        written = self._writers.get(tensor) if tensor.is_floating_point() or tensor.is_complex() else None
        return None if written is None else written.records

    def _note_writer(self, tensor: Tensor, index: int, call: OperatorCall) -> None:
        """A write to a part of some memory leaves what others wrote there."""
        before: tuple[int, ...] = ()
        if call.facts.mutable and tensor.nbytes < tensor.untyped_storage().nbytes():
            before = tuple(one for one in self._writers_of(tensor) or () if one in self._records)
        self._writers.set(tensor, _Written((*before, index), call))

    def _keep(self, record: Record, call: OperatorCall, tensor: Tensor) -> Finding:
        """Keep a record, with the beginning of a finding."""
        operation = Operation(**self.where(call), dtype=causes.dtype_name(tensor.dtype), shape=tuple(tensor.shape))
        micro_batch = max(1, self._backwards + (call.phase == "forward"))
        self._records[record.index] = record
        record.finding = Finding(operation, tensor.device.type, micro_batch)
        return record.finding  # type: ignore[no-any-return]

    def _arrive(self, tensor: Tensor, call: OperatorCall) -> tuple[int, ...]:
        """A record for a tensor that no operator of this step wrote, and a call reads; none if it cannot be read."""
        if next(readable([tensor]), None) is None:
            return ()
        record = Record(self._next, "before")
        self._next += 1
        self._writers.set(tensor, _Written((record.index,), None))
        finding = self._keep(record, call, tensor)
        finding.origin = replace(finding.origin, index=-1, op="", phase="before")
        finding.parameter, finding.cause = self.name_of(tensor), causes.Cause("arrived", "it was there before the step")
        record.mark(*causes.extremes(tensor))
        return (record.index,)

    # --- why

    def _explain(
        self, record: Record, call: OperatorCall, func: OpOverload, before: Any, given: list[_Input],
        outputs: list[Tensor],
    ) -> None:
        """The result is broken: read the inputs as they were `before`, to tell whose fault it is."""
        finding = self._keep(record, call, outputs[0])
        self._note_parameter(record, call, outputs)
        if any(index in self._left for one in given for index in one.writers or ()):
            finding.cause = causes.SKIPPED
            return
        if call.facts.literal or causes.asks_for_nonfinite(before):
            finding.cause = causes.CONSTANT
            return
        if call.facts.name.startswith(("aten::_foreach_", "aten::_fused_")):
            outputs, before = causes.item_at_fault(outputs, before)
        finding.elements = causes.broken_elements(outputs)
        mine = {id(value) for value in tensors_in(before)}
        given = [one for one in given if id(one.before) in mine]
        nan_in = inf_in = False
        for one in given:
            if next(readable([one.before]), None) is None:
                continue
            low, high = causes.extremes(one.before)
            if not math.isfinite(high - low):
                nan_in |= low != low
                inf_in |= low == low
                record.inputs += self._owner(one, low, high, call, record.index)
        if nan_in or (inf_in and "nan" not in record.broken):
            return      # passed on
        finding.inputs = tuple(
            causes.described(one.before, "" if one.writers else self.name_of(one.tensor)) for one in given
            if one.before.numel() and not is_opaque(one.before) and one.before.dtype is not torch.bool
        )
        args, kwargs = before
        finding.cause = causes.find_cause(func, call.facts, args, kwargs, outputs, from_inf=inf_in)
        if finding.cause.kind == "undefined":
            self._follow_zero(finding, given)

    def _follow_zero(self, finding: Finding, given: list[_Input]) -> None:
        """Who computed a 0, or an end of what the operator takes; a constant that its dtype rounds is the cause."""
        taken = causes.poles(finding.origin.op, finding.origin.backward_of)
        for value, tensor, _ in given:
            written = self._writers.get(tensor)
            if written is None or written.call is None or not value.is_floating_point():
                continue
            there = [pole for pole in taken if bool((value == pole).any())]
            number = causes.rounded_number(written.call.numbers, value.dtype, there)
            if number is not None:
                finding.made, finding.cause = Operation(**self.where(written.call)), causes.Cause("rounded", number)
                return
            if written.call.phase != "optimizer" and 0 in there:
                finding.made = finding.made or Operation(**self.where(written.call))

    def _owner(self, one: _Input, low: float, high: float, call: OperatorCall, reader: int) -> tuple[int, ...]:
        """The record of a broken input, where none of the step says yet whose it is."""
        records = [self._records[index] for index in one.writers or () if index in self._records]
        if any(record.broken for record in records):
            return ()
        for record in records:
            if record.kind in ("uninitialised", "received"):
                record.mark(low, high)
                if any(index in self._records and self._records[index].broken for index in record.inputs):
                    record.finding.cause = causes.PASSED_ON     # what was sent was broken: it is not another rank's
                return (record.index,)
        latest = self._writers.get(one.tensor)
        arrived = self._arrive(one.tensor, call)
        for index in arrived:
            self._records[index].mark(low, high)
        if latest is not None and reader in latest.records:
            self._writers.set(one.tensor, latest)   # the call wrote it in place: what is there now is the call's
        return arrived

    def _note_parameter(self, record: Record, call: OperatorCall, outputs: list[Tensor]) -> None:
        """The parameter that a call writes in place, or whose gradient a scaler does; the first broken one."""
        if not (call.facts.mutable or call.facts.undeclared_writes):
            return
        buffers = {id(buffer) for root in self.modules.roots() for buffer in root.buffers()}
        for one in filter(causes.is_broken, outputs):
            if call.phase == "scaler":
                record.finding.parameter = self.name_of(one).removesuffix(".grad")
                return
            if one.is_leaf and (one.requires_grad if call.facts.mutable else id(one) in buffers):
                record.shows = "parameter" if call.facts.mutable else "buffer"
                record.finding.parameter = self.name_of(one)
                return
