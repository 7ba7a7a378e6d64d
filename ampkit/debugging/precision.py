"""`compare_precision`: a step that carries its own reference along, every operator again on wider copies.

What an operator did to the numbers is told apart by a third run, in the wider dtype on the user's own inputs: against
it an operator's own rounding shows, and between it and the copy what came in with the inputs. The optimizer is left
out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.debugging.call_sites import find_caller
from ampkit.debugging.causes import largest_finite
from ampkit.debugging.monitor import before_update, lost_share
from ampkit.debugging.operator_calls import OperatorCall, OperatorObserver
from ampkit.debugging.operator_facts import OperatorFacts, other_arguments, readable, tensors_in
from ampkit.debugging.proposed_changes import Change, advice_on_precision, changes_for_precision, suggestion
from ampkit.debugging.reference_copies import NONE, Error, ReferenceCopies
from ampkit.debugging.report import GradientError, LostUpdate, OperatorError, PrecisionReport
from ampkit.debugging.snapshot import Snapshot
from ampkit.debugging.storage_map import StorageMap
from ampkit.dtypes import SIXTEEN_BIT, dtype_name
from ampkit.torch_internals.float8_matmul import WIDE_PRODUCTS
from ampkit.torch_internals.operator_tracing import OpOverload, is_opaque, storage_key

_OWN_FORMAT = ("mkldnn_rnn", "_cudnn_rnn", "miopen_rnn")     # memory that only their own backward can read
_OPTIMIZER, _RANDOM, _UNREAD = "the optimizer", "it draws random numbers", "it reads nothing"


def compare_precision(
    step: Callable[[], Any], model: Module | None = None, reference: torch.dtype = torch.float32
) -> PrecisionReport:
    """Run a step once, each operator also in `reference` (float32 or float64), forward and backward.

    Each operator's result is compared with that of the same step in `reference` throughout (`total`) and with that of
    the same operator in `reference` on the same inputs (`local`, its own rounding): an operator that rounds much and
    one that amplifies what others rounded are told apart. `report.gradients` compares the gradients, which are those
    of a true step in `reference` to the bit where `report.opaque` names no operator, `report.results` what the step
    returns, and `report.error` is the largest of all; `report.recommended_scale` is the loss scale to which nothing
    overflows in backward, where float16 takes part.

    The step takes effect as always; its results and random numbers are the same to the bit. Numbers that it makes in 16
    bits (`arange`, `full`) are made in `reference` beside; what came in 16 bits counts as it is, and is listed in
    `report.given`. What the optimizer computes is not compared. Reads each result on the host.

    Where gradients are 5 % off or more, or an update rounds to nothing, `report.suggestion` has a change or advice. A
    change needs a `model`: the step runs again with it from the state in which it began (it must do the same each
    time), and it is only suggested if it halves the error; then everything is as the first run left it.

    >>> model = torch.nn.Linear(8, 1)
    >>> report = compare_precision(lambda: model(torch.ones(2, 8)).sum().backward(), model)
    >>> report.operators    # nothing is in low precision
    []
    """
    comparison = PrecisionComparison(model, reference)
    if model is None:
        report = comparison.run(step)
        report.suggestion = advice_on_precision(report) if report.is_far_off else None
        return report
    before = Snapshot(model)
    comparison.on_state = before.add
    report = comparison.run(step)
    if not report.is_far_off:
        return report

    def attempt(change: Change) -> tuple[Change, bool, str]:
        before.restore()
        again = PrecisionComparison(model, reference)
        with contextlib.suppress(RuntimeError), change.around():
            again.run(step)
        found = again.report
        evidence = f"with it the error is {found.error:.2g} in place of {report.error:.2g}"
        return change, bool(found.gradients) and found.error < report.error / 2, evidence

    changes = changes_for_precision(report, comparison.modules.region, model)
    with Snapshot(model, before.met):
        report.suggestion = suggestion(changes, advice_on_precision(report), attempt)
    return report


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


class PrecisionComparison(OperatorObserver[PrecisionReport]):
    """Context in which one step is compared; `report` has the gradients when an optimizer steps, or it is left."""

    def __init__(self, model: Module | None, reference: torch.dtype = torch.float32) -> None:
        if reference not in (torch.float32, torch.float64):
            raise ValueError(f"reference is {reference}; expected torch.float32 or torch.float64")
        super().__init__(model, PrecisionReport(dtype_name(reference)))
        self.memory = ReferenceCopies(reference)
        self._given: StorageMap[bool] = StorageMap()        # what came in 16 bits and was noted
        self._new_gradients = False
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []      # what an optimizer is about to update
        self.on_step: Callable[[], None] = lambda: None     # asked when the step has ended

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not self.report.gradients:
            self._collect_gradients()
        self.report.scale = self.scale or 1.0

    def run(self, step: Callable[[], Any]) -> PrecisionReport:
        """Compare a step, and what it returns."""
        with self as report:
            result = step()
        with torch.no_grad():
            report.results = [
                deviation(one.detach(), self.memory.read(one)).relative for one in readable(tensors_in(result))
            ]
        return report

    def observe(self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts = call.facts
        if facts.literal:
            return func(*args, **kwargs)
        if call.phase == "scaler" and self._new_gradients and not call.caller.scaling:
            self._new_gradients = False     # it may skip the step, and then no hook says that gradients are ready
            self._collect_gradients()
        self._new_gradients |= call.phase == "backward"
        given, default = call.given, torch.get_default_dtype()
        if default in SIXTEEN_BIT and facts.takes_dtype and not (given or facts.random or kwargs.get("dtype")):
            made = {**kwargs, "dtype": default}
            kwargs = made if func(*args, **kwargs).dtype is default else kwargs     # `arange` of integers is not
        low = any(map(self._is_low, given)) or self._asks_for_low((*args, *kwargs.values()))
        if not low and not any(map(self.memory.has_copy, given)):
            return func(*args, **kwargs)        # nothing differs here
        for one in given:
            if one.dtype in SIXTEEN_BIT and not self.memory.has_copy(one):
                self._note_given(one)
        if call.starts_backward:
            scale = self.scale or 1.0
            self.report.loss = float(given[0].detach()) / scale
            self.report.reference_loss = float(self.memory.read(given[0])) / scale
        written = facts.written(args, kwargs)
        refusal = _OPTIMIZER if call.phase == "optimizer" else _why_not(facts, func, args, kwargs, given)
        if not refusal:
            return self._run_three(call, func, args, kwargs, low, [*written, *facts.possibly_written(args, kwargs)])
        result = func(*args, **kwargs)
        for one in (*written, *tensors_in(result)):
            self.memory.forget(one)
        if facts.name == "aten::native_dropout":
            self._drop_same(result, *args)
        if refusal not in (_OPTIMIZER, _RANDOM, _UNREAD):
            self.report.opaque[facts.name] = refusal
        return result

    def _run_three(
        self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any],
        low: bool, written: list[Tensor],
    ) -> Any:
        memory, facts = self.memory, call.facts
        errors_in = [memory.error(one) for one in call.given]
        incoming = max(errors_in, default=NONE)._replace(lost=max((one.lost for one in errors_in), default=-1))
        for one in written:
            memory.make_writable(one)
        changes = {id(one) for one in written}
        updated = not facts.overwrites and call.phase != "recompute"
        before = {id(one): one.clone() for one in written if updated and one.dtype in SIXTEEN_BIT}

        def widened(tensor: Tensor) -> Tensor:
            return tensor.detach().to(memory.wide(tensor.dtype), copy=id(tensor) in changes)

        def outputs(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
            return [one for one in facts.outputs(result, args, kwargs) if not is_opaque(one)]

        cast = facts.name == "aten::_to_copy" and args[0].is_floating_point()
        wider = other_arguments(func, args, kwargs, memory.read, memory.wide)
        own = other_arguments(func, args, kwargs, widened, memory.wide) if low else None
        result = func(*args, **kwargs)
        results = outputs(result, args, kwargs)
        again: Any = WIDE_PRODUCTS.get(facts.name, func)
        with torch.no_grad():
            try:
                locals_ = None
                if own is not None:     # what a cast is given is what it would return in the wider dtype
                    locals_ = [own[0][0]] if cast else outputs(again(*own[0], **own[1]), *own)
                own = None      # what is held from here on is the most that a step needs
                references = outputs(again(*wider[0], **wider[1]), *wider)
                if [one.shape for one in results] != [one.shape for one in references]:
                    raise ValueError("the reference has another shape: it depends on values")
            except Exception as error:      # kernels say in many ways that they do not take a wider dtype
                self.report.opaque[facts.name] = str(error).splitlines()[0][:100]
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
                if id(one) in changes:
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
            total, dtype = _sum(totals.values()), dtype_name(results[chosen[0]].dtype)
            local, propagated = Deviation(0.0, total.norm, 0, 0, total.numel), total
            if locals_ is not None:
                local = _sum(deviation(results[i], locals_[i], count_lost=self._is_low(results[i])) for i in chosen)
            if locals_ is not None and (local.error or local.broken):
                propagated = _sum(deviation(locals_[i], references[i]) for i in chosen)
            if local.relative > propagated.relative / 2:
                maker = call.index
            if local.lost:
                lost = call.index
            self.report.operators.append(OperatorError(
                **self.where(call), dtype=dtype, shape=tuple(results[chosen[0]].shape), total=total.relative,
                local=local.relative, propagated=propagated.relative,
                amplification=propagated.relative / incoming.relative if 0 < incoming.relative < math.inf else 0.0,
                error_from=incoming.maker, lost=local.lost / max(1, local.numel),
                largest=max(largest_finite(references[i]) for i in chosen), norm=total.norm,
            ))
            share = _unmoved(results, locals_ or [], before)
            if share > 0.5 and call.phase == "forward":
                file, line = call.caller.line()
                lost_update = LostUpdate(call.facts.name, share, dtype, file, line, by_optimizer=False)
                self.report.lost_updates.append(lost_update)
        return [Error(totals[i].relative, maker, lost) if i in totals else NONE for i in range(len(results))]

    def _note_given(self, tensor: Tensor) -> None:
        """Remember a tensor in 16 bits that the step was given: what rounded it cannot be seen."""
        if tensor.numel() > 1 and not is_opaque(tensor) and not self._given.get(tensor):
            self._given.set(tensor, True)
            name = self.name_of(tensor) or f"a tensor {list(tensor.shape)}"
            self.report.given[name] = dtype_name(tensor.dtype)

    def passed_over(self, facts: OperatorFacts, given: list[Tensor]) -> None:
        if any(self._is_low(one) or self.memory.has_copy(one) for one in given):
            self.report.opaque[facts.name] = "it takes sparse, nested or quantized tensors"

    def _drop_same(self, result: tuple[Tensor, Tensor], given: Tensor, p: float, train: bool | None) -> None:
        """The reference of a dropout: the same elements of the input's."""
        kept = result[1] / (1 - p) if train is not False and p < 1 else result[1]
        self.memory.write(result[0], self.memory.read(given) * kept, self.memory.error(given), own=True)

    def step_ended(self, *, skipped: bool = False) -> None:
        if skipped:
            self.memory = ReferenceCopies(self.memory.reference)       # its own scale would not have been halved
        file, line = find_caller(1).line()
        for one in self._before:
            share = float(lost_share(*one))
            if share > 0.5:
                lost = LostUpdate(self.name_of(one[0]), share, dtype_name(one[0].dtype), file, line, by_optimizer=True)
                self.report.lost_updates.append(lost)
        self._before = []
        self.on_step()

    def step_starts(self, optimizer: Any) -> None:
        self._collect_gradients()
        steps = any(group.get("lr", 1.0) for group in optimizer.param_groups)       # a warm-up begins at 0
        self._before = [one for one in before_update(optimizer) if one[0].dtype in SIXTEEN_BIT] if steps else []

    def _collect_gradients(self) -> None:
        """Compare the gradients, which a loop may clear before it ends; scaled, and again unscaled."""
        with torch.no_grad():
            found = [
                (name, deviation(p.grad, self.memory.read(p.grad), count_lost=True))
                for root in self.modules.roots() for name, p in root.named_parameters()
                if p.grad is not None and p.grad.layout is torch.strided
            ]
        norm = math.hypot(*(one.norm for _, one in found))
        if found:
            self.report.gradients = {
                name: GradientError(
                    one.relative, one.error / norm if norm else one.relative, one.lost / max(1, one.numel), one.norm
                )
                for name, one in found
            }

    def _is_low(self, tensor: Tensor) -> bool:
        return tensor.dtype is not self.memory.wide(tensor.dtype)

    def _asks_for_low(self, values: tuple[Any, ...]) -> bool:
        return any(isinstance(one, torch.dtype) and one is not self.memory.wide(one) for one in values)


def _why_not(
    facts: OperatorFacts, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[Tensor]
) -> str:
    """Why an operator is not run again; "" if it can be."""
    if facts.communicates:
        return "it talks to other processes"
    if facts.opaque_state or any(part in facts.name for part in _OWN_FORMAT):
        return "it hands on memory in a form of its own"
    if facts.uninitialised:
        return _UNREAD
    if facts.random:
        for place, argument in enumerate(func._schema.arguments):
            if argument.name == "dropout_p":
                p = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
                return _RANDOM if p else ""
        return _RANDOM
    return ""


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


def deviation(value: Tensor, reference: Tensor, *, count_lost: bool = False) -> Deviation:
    """How far `value` is from `reference`; `lost` stays 0 unless it is asked for."""
    value = value.float() if value.element_size() == 1 else value       # few operators take float8
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


def _sum(some: Iterable[Deviation]) -> Deviation:
    """Several tensors as one: what is mathematically zero beside others weighs nothing."""
    parts = list(some)
    return Deviation(
        math.hypot(*(one.error for one in parts)), math.hypot(*(one.norm for one in parts)),
        sum(one.lost for one in parts), sum(one.broken for one in parts), sum(one.numel for one in parts),
    )
