"""A step that carries its own reference along: every operator runs on the user's tensors, and again on wider copies.

Forward and backward; the optimizer is left out. What an operator did to the numbers is told apart by a third run, in
the wider dtype on the user's own inputs: against it an operator's own rounding shows, and between it and the copy what
came in with the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.debugging.again import other_arguments
from ampkit.debugging.causes import dtype_name, largest_finite
from ampkit.debugging.extremes import extremes
from ampkit.debugging.operator_calls import OperatorCall, OperatorObserver, Place
from ampkit.debugging.operator_facts import OperatorFacts, tensors_in
from ampkit.debugging.shadow_memory import NONE, Error, ShadowMemory
from ampkit.debugging.source_lines import running_scaler, variable_of
from ampkit.debugging.storage_map import StorageMap
from ampkit.torch_internals.operator_tracing import OpOverload, is_opaque, storage_key, without_dispatch

__all__ = ["Deviation", "Measured", "ShadowRun", "deviation"]

_LOW = (torch.float16, torch.bfloat16)
_OWN_FORMAT = ("mkldnn_rnn", "_cudnn_rnn", "miopen_rnn")     # memory that only their own backward can read


class Deviation(NamedTuple):
    """How far values are from their reference. Elements where the reference is not finite count for nothing."""

    error: float        # 2-norm of the difference
    norm: float         # 2-norm of the reference
    lost: int           # zero, where the reference is not
    broken: int         # inf or NaN, where the reference is finite
    numel: int

    @property
    def relative(self) -> float:
        """The error as a share of the reference's norm."""
        if self.broken:
            return math.inf
        return self.error / self.norm if self.norm else (math.inf if self.error else 0.0)


class Measured(NamedTuple):
    """One operator call that met a low-precision tensor."""

    call: OperatorCall
    place: Place
    dtype: torch.dtype
    shape: tuple[int, ...]
    total: Deviation                # from the reference copy
    local: Deviation                # from the wider operator on the same inputs
    propagated: float               # of that operator from the reference copy, relative
    incoming: Error                 # the largest among the inputs
    largest: float                  # magnitude in the reference copy
    unmoved: float = 0.0            # share of the elements that an update in place was to change and did not


class ShadowRun(OperatorObserver):
    """Measures one step; `on_gradients` is told when gradients are ready, scaled and again unscaled."""

    def __init__(
        self, model: Module | None, reference: torch.dtype, on_gradients: Callable[[ShadowRun], None],
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(model)
        self.memory = ShadowMemory(reference)
        self.measured: list[Measured] = []
        self.opaque: dict[str, str] = {}        # operators whose reference is the user's own result, and why
        self.scale: float | None = None         # of a scaler that takes part, as the step began
        self.loss: tuple[float, float] | None = None        # the user's, and its reference, as backward was given it
        self.only_first_step = False            # of several: from its end on operators just run
        self.finished = False
        self.given: dict[str, str] = {}         # what came in 16 bits, by name, and its dtype: compared as it is
        self._seen: StorageMap[bool] = StorageMap()
        self._new_gradients = False
        self._on_gradients = on_gradients
        self._on_step = on_step

    def observe(
        self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.finished and self.was_skipped(call):
            self.memory = ShadowMemory(self.memory.reference)       # its own scale would not have been halved
            self.step_ended(None)
            self.next_step()
        if self.finished:
            return func(*args, **kwargs)
        facts = call.facts
        if call.phase == "scaler":
            self._meet_scaler(scaling=call.caller.scaling)
        self._new_gradients |= call.phase == "backward"
        given = tensors_in((args, kwargs))
        written = facts.written(args, kwargs) if facts.mutable else []
        for one in (*written, *facts.possibly_written(args, kwargs)):
            self.memory.before_write(one)
        if not given and not facts.uninitialised and not facts.random:
            return self._run_factory(call, func, args, kwargs)
        low = any(map(self._is_low, given)) or self._asks_for_low((*args, *kwargs.values()))
        if not low and not any(map(self.memory.has_copy, given)):
            return func(*args, **kwargs)        # nothing differs here
        for one in given:
            if one.dtype in _LOW and not self.memory.has_copy(one):
                self._note_given(one)
        if facts.name == "aten::ones_like" and given[0].numel() == 1 and given[0].requires_grad:
            # The gradient that backward starts with.
            scale = self.scale or 1.0
            self.loss = float(given[0].detach()) / scale, float(self.memory.read(given[0])) / scale
        refusal = "the optimizer" if call.phase == "optimizer" else _why_not(facts, func, args, kwargs, given)
        if refusal:
            result = func(*args, **kwargs)
            for one in (*written, *tensors_in(result)):
                self.memory.forget(one)
            if facts.name == "aten::native_dropout":
                self._drop_same(result, *args)
            if refusal not in ("the optimizer", _RANDOM, _UNREAD):
                self.opaque[facts.name] = refusal
            return result
        return self._run_three(call, func, args, kwargs, low, written)

    def _run_factory(
        self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Numbers that are made in 16 bits, as `arange` does, and in the reference's dtype."""
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.dtype in _LOW and result.numel():
            wide = func(*args, **{**kwargs, "dtype": self.memory.wide(result.dtype)})
            off = deviation(result, wide, count_lost=True)
            if off.error or off.broken:
                self.memory.write(result, wide, Error(off.relative, call.index, call.index), own=True)
                self.measured.append(Measured(
                    call, self.place(call), result.dtype, tuple(result.shape), off, off, 0.0, NONE, _largest(wide)
                ))
        return result

    def _run_three(
        self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any],
        low: bool, written: list[Tensor],
    ) -> Any:
        memory = self.memory
        errors_in = [memory.error(one) for one in tensors_in((args, kwargs))]
        incoming = max(errors_in, default=NONE)._replace(lost=max((one.lost for one in errors_in), default=-1))
        written = [*written, *call.facts.possibly_written(args, kwargs)]
        for one in written:
            memory.make_writable(one)
        changes = {id(one) for one in written}
        updated = not call.facts.overwrites and call.phase != "recompute"
        before = {id(one): one.clone() for one in written if updated and one.dtype in _LOW}

        def widened(tensor: Tensor) -> Tensor:
            return tensor.detach().to(memory.wide(tensor.dtype), copy=id(tensor) in changes)

        cast = call.op == "aten::_to_copy"
        wider = other_arguments(func, args, kwargs, memory.read, memory.wide)
        own = other_arguments(func, args, kwargs, widened, memory.wide) if low else None
        result = func(*args, **kwargs)
        results = _results(call.facts, result, args, kwargs)
        with torch.no_grad():
            try:
                locals_ = None
                if own is not None:
                    locals_ = [own[0][0]] if cast else _results(call.facts, func(*own[0], **own[1]), *own)
                own = None      # what is held from here on is the most that a step needs
                shared = cast and memory.share(results[0], args[0])
                references = [memory.read(results[0])] if shared else _results(
                    call.facts, func(*wider[0], **wider[1]), *wider
                )
                _check_shapes(results, references)
            except Exception as error:      # kernels say in many ways that they do not take a wider dtype
                self.opaque[call.op] = str(error).splitlines()[0][:100]
                for one in results:
                    memory.forget(one)
                return result
            taken = {storage_key(one) for one in tensors_in(wider) if not is_opaque(one)}
            del wider
            if cast and not self._is_low(results[0]):
                errors = [incoming]     # from a narrower dtype: nothing happens
            else:
                errors = self._measure(call, results, references, locals_, incoming, before)
            for one, reference, error in zip(results, references, errors, strict=True):
                if shared or id(one) in changes:
                    memory.note_error(one, error)
                else:
                    memory.write(one, reference, error, own=storage_key(reference) not in taken)
                    taken.add(storage_key(reference))
        return result

    def _measure(
        self, call: OperatorCall, results: list[Tensor], references: list[Tensor], locals_: list[Tensor] | None,
        incoming: Error, before: dict[int, Tensor],
    ) -> list[Error]:
        """Note how far a call's results are from the reference. Returns the error of each."""
        chosen = [i for i, one in enumerate(results) if one.numel() and (one.is_floating_point() or one.is_complex())]
        totals = {i: deviation(results[i], references[i]) for i in chosen}
        maker, lost = incoming.maker, incoming.lost
        if chosen:
            total = _sum(totals.values())
            local, propagated = Deviation(0.0, total.norm, 0, 0, total.numel), total
            if locals_ is not None:
                local = _sum(deviation(results[i], locals_[i], count_lost=self._is_low(results[i])) for i in chosen)
            if locals_ is not None and (local.error or local.broken):
                propagated = _sum(deviation(locals_[i], references[i]) for i in chosen)
            if local.relative > propagated.relative / 2:
                maker = call.index
            if local.lost:
                lost = call.index
            first = results[chosen[0]]
            self.measured.append(Measured(
                call, self.place(call), first.dtype, tuple(first.shape), total, local, propagated.relative, incoming,
                max(_largest(references[i]) for i in chosen), _unmoved(results, locals_ or [], before),
            ))
        return [Error(totals[i].relative, maker, lost) if i in totals else NONE for i in range(len(results))]

    def _note_given(self, tensor: Tensor) -> None:
        """Remember a tensor in 16 bits that the step was given: what rounded it cannot be seen."""
        if is_opaque(tensor) or self._seen.get(tensor):
            return
        self._seen.set(tensor, True)
        key = storage_key(tensor)
        name = next((
            name for root in self.modules.roots() for name, one in (*root.named_parameters(), *root.named_buffers())
            if not is_opaque(one) and storage_key(one) == key
        ), "") or variable_of(tensor)
        if name:
            self.given[name] = dtype_name(tensor.dtype)

    def _drop_same(self, result: tuple[Tensor, Tensor], given: Tensor, p: float, train: bool | None) -> None:
        """The reference of a dropout: the same elements of the input's."""
        kept = result[1] / (1 - p) if train is not False and p < 1 else result[1]
        self.memory.write(result[0], self.memory.read(given) * kept, self.memory.error(given), own=True)

    def step_ended(self, optimizer: Any) -> None:
        if self.only_first_step and not self.finished:
            self.finished = True
            self.memory = ShadowMemory(self.memory.reference)
        self._on_step()

    def _optimizer_starts(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        super()._optimizer_starts(optimizer, args, kwargs)
        if self.begun:
            with without_dispatch():
                self._on_gradients(self)

    def _meet_scaler(self, *, scaling: bool) -> None:
        """Note its scale; it may skip the step, and then no hook says that gradients are ready."""
        scaler = running_scaler() if self.scale is None or scaling else None
        if scaler is not None and scaler.is_enabled():
            self.scale = scaler.get_scale()
        if self._new_gradients and not scaling:
            self._new_gradients = False
            self._on_gradients(self)

    def _is_low(self, tensor: Tensor) -> bool:
        return tensor.dtype is not self.memory.wide(tensor.dtype)

    def _asks_for_low(self, values: tuple[Any, ...]) -> bool:
        return any(isinstance(one, torch.dtype) and one is not self.memory.wide(one) for one in values)


_RANDOM, _UNREAD = "it draws random numbers", "it reads nothing"


def _why_not(
    facts: OperatorFacts, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]
) -> str:
    """Why an operator is not run again; "" if it can be."""
    if facts.communicates:
        return "it talks to other processes"
    if facts.opaque_state or any(part in facts.name for part in _OWN_FORMAT):
        return "it hands on memory in a form of its own"
    if any(map(is_opaque, given)):
        return "it takes sparse, nested or quantized tensors"
    if facts.uninitialised:
        return _UNREAD
    if facts.random:
        for place, argument in enumerate(func._schema.arguments):
            if argument.name == "dropout_p":
                p = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
                return _RANDOM if p else ""
        return _RANDOM
    return ""


def _results(facts: OperatorFacts, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What a call returned and what it wrote, each once."""
    found = tensors_in(result) + (facts.written(args, kwargs) if facts.mutable else [])
    return [one for one in {id(one): one for one in found}.values() if not is_opaque(one)]


def _unmoved(results: list[Tensor], locals_: list[Tensor], before: dict[int, Tensor]) -> float:
    """Of the elements that an update in place changes in the wider dtype, the share that stay what they were."""
    wanted = stayed = 0
    for one, exact in zip(results, locals_, strict=False):
        old = before.get(id(one))
        if old is not None:
            changes = exact != old
            wanted += int(changes.sum())
            stayed += int((changes & (one == old)).sum())
    return stayed / wanted if wanted else 0.0


def _check_shapes(results: list[Tensor], references: list[Tensor]) -> None:
    if [one.shape for one in results] != [one.shape for one in references]:
        raise ValueError("the reference has another shape: it depends on values")


def deviation(value: Tensor, reference: Tensor, *, count_lost: bool = False) -> Deviation:
    """How far `value` is from `reference`; `lost` stays 0 unless it is asked for."""
    if value.is_complex():
        value, reference = torch.view_as_real(value), torch.view_as_real(reference)
    value, reference = value.reshape(-1), reference.reshape(-1)
    count = value.numel()
    lost = 0
    if count_lost and int(torch.count_nonzero(value)) < count:
        lost = int(((value == 0) & (reference != 0)).sum())
    same = value.dtype is reference.dtype
    difference = value - reference if same else value.to(reference.dtype).sub_(reference)
    error, norm = math.sqrt(torch.dot(difference, difference)), math.sqrt(torch.dot(reference, reference))
    if math.isfinite(error) and math.isfinite(norm):
        return Deviation(error, norm, lost, 0, count)
    fits = torch.isfinite(reference)        # a norm beyond the dtype, or values that are not finite
    broken = int((fits & ~torch.isfinite(value)).sum())
    fits &= torch.isfinite(value)
    error = float(torch.where(fits, value.double() - reference, 0.0).norm())
    return Deviation(error, float(torch.where(fits, reference, 0.0).double().norm()), lost, broken, count)


def _largest(tensor: Tensor) -> float:
    low, high = extremes(tensor)
    return max(-low, high) if math.isfinite(high - low) else largest_finite(tensor)


def _sum(some: Iterable[Deviation]) -> Deviation:
    """Several tensors as one: what is mathematically zero beside others weighs nothing."""
    parts = list(some)
    return Deviation(
        math.hypot(*(one.error for one in parts)), math.hypot(*(one.norm for one in parts)),
        sum(one.lost for one in parts), sum(one.broken for one in parts), sum(one.numel for one in parts),
    )
