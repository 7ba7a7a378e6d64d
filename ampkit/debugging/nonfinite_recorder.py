"""Watches every operator's result for inf and NaN, and keeps what is needed to say where they began.

Each result is read on the host at once, while the inputs of an operator that went wrong are still there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.containers import map_tensors
from ampkit.debugging.causes import (
    CONSTANT,
    Cause,
    InputSummary,
    asks_for_nonfinite,
    broken_elements,
    find_cause,
    number_that_is_zero,
    outputs_of,
    summarise,
)
from ampkit.debugging.extremes import extremes, item_at_fault, mark
from ampkit.debugging.operator_calls import OperatorCall, OperatorObserver, Place
from ampkit.debugging.operator_facts import readable, tensors_in
from ampkit.debugging.source_lines import running_scaler, variable_of
from ampkit.debugging.storage_map import StorageMap
from ampkit.debugging.taint import Record
from ampkit.torch_internals.operator_tracing import OpOverload, storage_key

__all__ = ["NonfiniteRecorder", "Seen"]


@dataclass(slots=True)
class Seen:
    """What a report needs of a broken record."""

    call: OperatorCall | None           # None: a tensor that was there before
    place: Place
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    inputs: tuple[InputSummary, ...] = ()       # where it went wrong, as they were before the call
    cause: Cause | None = None                  # None: passed on
    target: str = ""                            # the parameter that it wrote, or is
    elements: str = ""                          # how many of them are broken, and in which rows
    micro_batch: int = 1                        # backward calls that had begun, of a forward the next one
    made: OperatorCall | None = None            # what computed the 0 or inf that it divides by, takes the log of, ...


class _Written(NamedTuple):
    """The records that wrote a tensor's memory, and the last call."""

    records: tuple[int, ...]
    call: OperatorCall | None


class NonfiniteRecorder(OperatorObserver):
    """Notes which results are not finite; calls `on_step` whenever a step has ended, taken or skipped."""

    def __init__(self, model: Module | None, on_step: Callable[[NonfiniteRecorder], None]) -> None:
        super().__init__(model)
        self.records: dict[int, Record] = {}    # the broken ones of this step, and who read them
        self.seen: dict[int, Seen] = {}         # of the broken ones
        self.scale: float | None = None         # the loss scale, where a scaler takes part
        self.on_scaler: Callable[[torch.amp.GradScaler], object] | None = None      # before it changes
        self._on_step = on_step
        self.losses: list[float] = []       # as backward began
        self.seed_factor = 1.0              # what the gradient that backward starts with is multiplied by
        self._writers: StorageMap[_Written] = StorageMap()
        self._backwards = 0
        self._literals: StorageMap[Place] = StorageMap()
        self._next = 0
        self._left: set[int] = set()    # what was broken in a step that a scaler skipped
        self._begun_step = False    # it computes: a loss that is printed after the last one begins none

    def observe(
        self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        facts = call.facts
        self._follow_step(call)
        given = tensors_in((args, kwargs) if kwargs else args)
        written = facts.written(args, kwargs) if facts.mutable else []
        if written and facts.overwrites:
            given = [one for one in given if not any(one is other for other in written)]
        kept: dict[int, Tensor] = {}        # what is written, as it was before
        buffers = facts.buffers(args, kwargs) if facts.undeclared_writes else []
        if (written or buffers) and not facts.overwrites and not facts.communicates:
            kept = {id(tensor): tensor.clone() for tensor in (*written, *buffers)}
        writers = [] if facts.shape_only else self._writers_of(given)
        result = func(*args, **kwargs)
        if facts.name == "aten::ones_like" and given[0].numel() == 1 and given[0].requires_grad:
            self._note_loss(given[0])       # the gradient that backward starts with
            if self.seed_factor != 1.0:
                result.mul_(self.seed_factor)
        outputs = [*outputs_of(facts, result, args, kwargs), *buffers]
        read = tuple({index for some in writers for index in some or () if index in self.records})
        if not outputs:     # a comparison, an index, a number on the host
            if read and isinstance(result, Tensor) and result.dtype is torch.bool:
                self.records[self._next] = Record(self._next, call.phase, read, compares=True)
                self._next += 1
            return result
        record = Record(self._next, call.phase, read, scalar=all(one.numel() == 1 for one in outputs))
        self._next += 1
        for one in outputs:
            self._note_writer(one, record.index, call)
        if facts.uninitialised or facts.communicates:
            # Values that mean nothing yet: unwritten, or still under way. Whoever reads them looks.
            record.source = "uninitialised" if facts.uninitialised else "received"
            self.records[record.index] = record
            self.seen[record.index] = self._seen(call, outputs[0])
            return result
        if self._left and any(index in self._left for some in writers for index in some or ()):
            record.source = "skipped"       # should it be broken
        mark(record, [extremes(one) for one in outputs])
        if record.broken:
            before = map_tensors((args, kwargs), lambda one: kept.get(id(one), one)) if kept else (args, kwargs)
            inputs = [(kept.get(id(one), one), one, some) for one, some in zip(given, writers, strict=False)]
            self._look(record, call, func, before, inputs, outputs)
        elif read:
            self.records[record.index] = record     # it absorbs something
        return result

    def literal(self, tensor: Tensor, place: Place) -> None:
        self._literals.set(tensor, place)

    def step_ended(self, optimizer: Any) -> None:
        self.end_step()

    def end_step(self, *, skipped: bool = False) -> None:
        """Have the step judged, and forget it."""
        if skipped:
            self._left = {index for index, record in self.records.items() if record.broken}
        try:
            if any(record.broken for record in self.records.values()):
                self._note_gradients()
                self._on_step(self)
        finally:
            self.records.clear()
            self.seen.clear()
            self.scale = None
            self._backwards = 0
            self._begun_step = False

    @property
    def steps_begun(self) -> int:
        """Steps that have ended, and the one that runs."""
        return max(0, self.step - self.first_step) + self._begun_step

    def name_of(self, tensor: Tensor) -> str:
        """What the user calls a tensor: its name as a parameter or buffer, else a variable."""
        key = storage_key(tensor)
        for root in self.modules.roots():
            for name, one in (*root.named_parameters(), *root.named_buffers()):
                if storage_key(one) == key:
                    return name
                if one.grad is not None and storage_key(one.grad) == key:
                    return f"{name}.grad"
        return variable_of(tensor)

    # --- the course of a step

    def _follow_step(self, call: OperatorCall) -> None:
        """Notice the scaler, and the end of a step that it skipped."""
        if self.was_skipped(call):
            self.end_step(skipped=True)
            self.next_step()
        if call.phase == "scaler" and (self.scale is None or call.caller.scaling):
            scaler = running_scaler()
            if scaler is not None and scaler.is_enabled():
                if self.scale is None and self.on_scaler is not None:
                    self.on_scaler(scaler)
                self.scale = scaler.get_scale()
        self._begun_step |= call.phase == "backward" or (
            call.phase == "forward" and (call.module is not None or self.step == 0)
        )

    def _note_loss(self, loss: Tensor) -> None:
        self._backwards += 1
        self.losses.append(float(loss.detach()) / (self.scale or 1.0))
        for index in self._records_of(loss) or ():
            if index in self.records:
                self.records[index].is_loss = True

    def _note_gradients(self) -> None:
        """Which records are what parameters hold as gradients, whoever has read them since."""
        for root in self.modules.roots():
            for name, parameter in root.named_parameters():
                for index in self._records_of(parameter.grad) or () if parameter.grad is not None else ():
                    if index in self.seen and self.records[index].broken:
                        self.records[index].is_gradient = True
                        self.seen[index].target = self.seen[index].target or name

    # --- who wrote what

    def _writers_of(self, tensors: list[Tensor]) -> list[tuple[int, ...] | None]:
        """For each tensor the records that wrote it; None for one that was there before."""
        return [
            self._records_of(tensor) if tensor.is_floating_point() or tensor.is_complex() else None
            for tensor in tensors
        ]

    def _records_of(self, tensor: Tensor) -> tuple[int, ...] | None:
        written = self._writers.get(tensor)
        return None if written is None else written.records

    def _note_writer(self, tensor: Tensor, index: int, call: OperatorCall) -> None:
        """A write to a part of some memory leaves what others wrote there."""
        if call.facts.mutable and tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes():
            before = self._records_of(tensor) or ()
            self._writers.set(tensor, _Written((*(one for one in before if one in self.records), index), call))
        else:
            self._writers.set(tensor, _Written((index,), call))

    def _arrive(self, tensor: Tensor) -> tuple[int, ...]:
        """A record for a tensor that no operator of this step wrote; none if its values cannot be read."""
        if next(readable([tensor]), None) is None:
            return ()
        record = Record(self._next, "before", source="arrived")
        self._next += 1
        self._writers.set(tensor, _Written((record.index,), None))
        seen = self._seen(None, tensor)
        seen.target = self.name_of(tensor)
        seen.cause = Cause("arrived", "it was there before the step")
        literal = self._literals.get(tensor)
        if literal is not None:
            seen.place, seen.cause = literal, Cause("arrived", "inf or NaN is among the numbers that it is made of")
        mark(record, [extremes(tensor)])
        self.records[record.index] = record
        self.seen[record.index] = seen
        return (record.index,)

    def _seen(self, call: OperatorCall | None, tensor: Tensor) -> Seen:
        place = Place(self.modules.current(), None, None) if call is None else self.place(call)
        micro_batch = max(1, self._backwards + (call is None or call.phase == "forward"))
        return Seen(call, place, tensor.dtype, tuple(tensor.shape), tensor.device, micro_batch=micro_batch)

    # --- looking

    def _look(
        self, record: Record, call: OperatorCall, func: OpOverload, before: Any,
        given: list[tuple[Tensor, Tensor, tuple[int, ...] | None]], outputs: list[Tensor],
    ) -> None:
        """The result is broken: read the inputs as they were `before`, to tell whose fault it is."""
        self.records[record.index] = record
        seen = self.seen[record.index] = self._seen(call, outputs[0])
        self._note_parameter(record, seen, outputs)
        if record.source == "skipped":
            return
        if asks_for_nonfinite(before) or any(self._is_number(*one) for one in given):
            record.source, seen.cause = "constant", CONSTANT
            return
        if call.facts.name.startswith(("aten::_foreach_", "aten::_fused_")):
            outputs, before = item_at_fault(outputs, before)
        seen.elements = broken_elements(outputs)
        mine = {id(value) for value in tensors_in(before)}
        nan_in = inf_in = False
        read = []
        for value, tensor, writers in given:
            if id(value) not in mine or next(readable([value]), None) is None:
                continue
            low, high = extremes(value)
            if not math.isfinite(high - low):
                nan_in |= low != low
                inf_in |= low == low
                record.inputs += self._explain(tensor, writers, low, high, record.index)
            read.append((value, "" if writers else self.name_of(tensor)))
        if nan_in or (inf_in and not record.nan):
            return      # passed on
        record.source = "from inf" if inf_in else "made"
        seen.inputs = tuple(summarise(value, name) for value, name in read)
        args, kwargs = before
        seen.cause = cause = find_cause(func, call.facts, args, kwargs, outputs, seen.inputs)
        if cause.kind == "constant":
            record.source = "constant"
        elif cause.kind == "undefined":
            self._follow_zero(seen, [(value, tensor) for value, tensor, _ in given if id(value) in mine])

    def _follow_zero(self, seen: Seen, given: list[tuple[Tensor, Tensor]]) -> None:
        """Who computed a 0 that the operator cannot take; a constant that its dtype rounds to 0 is the cause."""
        for value, tensor in given:
            written = self._writers.get(tensor)
            if written is None or written.call is None or not value.is_floating_point() or bool((value != 0).all()):
                continue
            number = number_that_is_zero(written.call.numbers, value.dtype)
            if number is not None:
                seen.made, seen.cause = written.call, Cause("rounded", number)
                return
            if written.call.phase != "optimizer":
                seen.made = seen.made or written.call

    def _is_number(self, value: Tensor, tensor: Tensor, writers: tuple[int, ...] | None) -> bool:
        """Whether an input is a Python number that is not finite, as in `x[0] = inf`."""
        return (
            writers is None and tensor.ndim == 0 and next(readable([value]), None) is not None
            and not math.isfinite(sum(extremes(value))) and not self.name_of(tensor)
        )

    def _explain(
        self, tensor: Tensor, writers: tuple[int, ...] | None, low: float, high: float, reader: int
    ) -> tuple[int, ...]:
        """Whose a broken input is, where no record of the step says so yet."""
        records = [self.records[index] for index in writers or () if index in self.records]
        if any(record.broken for record in records):
            return ()
        for record in records:
            if record.source in ("uninitialised", "received"):
                self._mark_unread(record, low, high)
                return (record.index,)
        latest = self._writers.get(tensor)
        arrived = self._arrive(tensor)
        for index in arrived:
            mark(self.records[index], [(low, high)])
        if latest is not None and reader in latest.records:
            self._writers.set(tensor, latest)       # the call wrote it in place: what is there now is the call's
        return arrived

    def _mark_unread(self, record: Record, low: float, high: float) -> None:
        """Note what memory that was not looked at turned out to hold: what was sent broken is not of another rank."""
        mark(record, [(low, high)])
        if any(index in self.records and self.records[index].broken for index in record.inputs):
            record.source = None

    def _note_parameter(self, record: Record, seen: Seen, outputs: list[Tensor]) -> None:
        """The parameter that a call writes in place, or whose gradient a scaler does; the first broken one."""
        if seen.call is None or not (seen.call.facts.mutable or seen.call.facts.undeclared_writes):
            return
        for one in outputs:
            if seen.call.phase == "scaler" and not math.isfinite(sum(extremes(one))):
                seen.target = self.name_of(one).removesuffix(".grad")
                return
            of_model = one.requires_grad if seen.call.facts.mutable else any(
                one is buffer for root in self.modules.roots() for buffer in root.buffers()
            )
            if one.is_leaf and of_model and not math.isfinite(sum(extremes(one))):
                record.writes_parameter = True
                seen.target = self.name_of(one)
                return
