"""`compare_precision`: runs each operator of a step also in a wider dtype, to find where precision is lost.

An operator runs three times: as the user wrote it; on reference copies of its inputs, which makes the reference; and in
the wider dtype on the user's own inputs. The first and third results differ by the operator's own rounding, the second
and third by the errors that came in with the inputs. Operators of the optimizer are not compared.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ampkit.debugging.call_sites import find_caller
from ampkit.debugging.causes import largest_finite
from ampkit.debugging.cheap_looks import before_update, lost_share
from ampkit.debugging.loss_changes import LossChanges
from ampkit.debugging.operator_calls import OperatorCall, OperatorObserver
from ampkit.debugging.operator_facts import OperatorFacts, converted_arguments, readable, tensors_in
from ampkit.debugging.proposed_changes import Change, advice_on_precision, changes_for_precision, suggestion
from ampkit.debugging.reference_copies import NONE, Error, ReferenceCopies
from ampkit.debugging.report import GradientError, LostUpdate, OperatorError, PrecisionReport
from ampkit.debugging.snapshot import TrainingSnapshot
from ampkit.debugging.storage_map import StorageMap
from ampkit.dtypes import SIXTEEN_BIT, dtype_name
from ampkit.torch_internals.float8_matmul import WIDE_PRODUCTS
from ampkit.torch_internals.operator_tracing import OpOverload, is_opaque, storage_key

_PRIVATE_FORMAT = ("mkldnn_rnn", "_cudnn_rnn", "miopen_rnn")  # return memory that only their own backward can read
_OPTIMIZER, _RANDOM, _UNREAD = "the optimizer", "it draws random numbers", "it reads nothing"


def compare_precision(
    step: Callable[[], Any], model: Module | None = None, reference: torch.dtype = torch.float32
) -> PrecisionReport:
    """Run a step once, each operator of forward and backward also in a wider dtype, and compare the results.

    Each result is compared with the reference step, which runs in `reference` throughout (error `total`), and with the
    same operator in `reference` on the same inputs (error `local`, its own rounding). So the report distinguishes
    operators that round much from operators that amplify the rounding of others. The reference gradients equal those of
    a step in `reference` to the bit, unless `report.opaque` lists an operator.

    The step takes effect as usual; its results and random numbers stay the same to the bit. Tensors that the step
    creates in 16 bits (`arange`, `full`) are created in `reference` too. Tensors that were in 16 bits before it are
    their own reference, and listed in `report.given`. Operators of the optimizer are not compared.

    `report.loss_changes` has by which share of it the loss is expected to rise by the rounding of each module alone.
    Where that is above 1 %, gradients are a third off, or an update is rounded away, `suggestion` has a
    change or advice. With a `model`, a change is tried by running the step again from the same state, and suggested
    only if it halves the change of the loss, or the error. Afterwards the state is what the first run left. A module's
    result that has lost precision and needs no gradient, such as one of positions, is made to require one.

    Synchronizes with the device at each operator, to read its result on the host.

    Args:
        step: function without arguments that runs forward and backward, and may step an optimizer. With a `model` it
            must do the same each time. What it returns is compared too: a tensor, or tensors in lists, tuples or dicts.
        model: module whose gradients are compared, and whose submodules are named by their paths; None takes the
            outermost modules that run, and tries no change.
        reference: the wider dtype, `torch.float32` or `torch.float64`.

    Returns:
        The report. `gradients` has the error of each parameter's gradient, `results` the errors of what the step
        returned, `error` the largest of all, and `recommended_scale` the largest loss scale with which no float16
        result of backward overflows.

    Raises:
        TypeError: if `model` is no module.
        ValueError: if `reference` is another dtype.

    Example:
        >>> model = torch.nn.Linear(8, 1)
        >>> report = compare_precision(lambda: model(torch.ones(2, 8)).sum().backward(), model)
        >>> report.operators    # none computes in low precision
        []
    """
    comparison = PrecisionComparison(model, reference)
    if model is None:
        report = comparison.run(step)
        report.suggestion = advice_on_precision(report) if report.is_far_off else None
        return report
    before = TrainingSnapshot(model)
    comparison.on_state = before.add
    report = comparison.run(step)
    if not report.is_far_off:
        return report

    def attempt(change: Change) -> tuple[Change, bool, str]:
        before.restore()
        trial = PrecisionComparison(model, reference)
        with contextlib.suppress(RuntimeError), change.around():
            trial.run(step)
        measured, before_it, after = "the error is", report.error, trial.report.error
        origin = report.error_origin()
        if origin is not None and origin.module in report.fragile:
            measured = f"the expected rise of the loss by the rounding of {origin.module or 'no module'} is"
            before_it, after = (each.loss_changes.get(origin.module, 0.0) for each in (report, trial.report))
        evidence = f"with it {measured} {after:.2g} instead of {before_it:.2g}"
        return change, bool(trial.report.gradients) and after < before_it / 2, evidence

    changes = changes_for_precision(report, comparison.modules, model)
    with TrainingSnapshot(model, before.owners):
        report.suggestion = suggestion(changes, advice_on_precision(report), attempt)
    return report


class Deviation(NamedTuple):
    """The difference of values from their reference, without elements where the reference is not finite."""

    error: float  # 2-norm of the difference
    norm: float  # 2-norm of the reference
    lost: int  # number of elements that are 0, where the reference is not
    broken: int  # number of elements that are inf or NaN, where the reference is finite
    numel: int

    @property
    def relative(self) -> float:
        """The error as a share of the reference's norm."""
        if self.broken:
            return math.inf
        return self.error / self.norm if self.norm else (math.inf if self.error else 0.0)


class PrecisionComparison(OperatorObserver[PrecisionReport]):
    """Context that compares one step; gradients are compared before an optimizer steps, or at the end."""

    def __init__(self, model: Module | None, reference: torch.dtype = torch.float32) -> None:
        if reference not in (torch.float32, torch.float64):
            raise ValueError(f"reference is {reference}; expected torch.float32 or torch.float64")
        super().__init__(model, PrecisionReport(dtype_name(reference)))
        self.copies = ReferenceCopies(reference)
        self.changes = LossChanges(self.copies)
        self._noted: StorageMap[bool] = StorageMap()  # storages in 16 bits that `report.given` lists
        self._new_gradients = False  # backward has run since gradients were compared
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []  # parameters before the update, see `before_update`
        self.on_step: Callable[[], None] = lambda: None  # called when the step has ended

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not self.report.gradients:
            self._collect_gradients()
        self.report.scale = self.scale or 1.0
        self.report.loss_changes = self.changes.changes()

    def _begin(self, stack: ExitStack) -> None:
        super()._begin(stack)
        stack.enter_context(register_module_forward_pre_hook(self._module_starts))
        stack.enter_context(register_module_forward_hook(self._module_ends, always_call=True))
        stack.enter_context(self.changes.keywords())

    def _module_starts(self, module: Module, args: Any) -> Any:
        running = None if torch.compiler.is_compiling() else self.modules.current()
        return None if running is None else self.changes.enter(running.name, args)

    def _module_ends(self, module: Module, args: Any, result: Any) -> Any:
        return None if torch.compiler.is_compiling() else self.changes.leave(result)

    @classmethod
    def beside(cls, observer: OperatorObserver[Any]) -> PrecisionComparison:
        """A comparison of the step that another observer observes, which calls `_observe` for each operator."""
        comparison = cls(observer.modules.model)
        comparison.modules = observer.modules
        comparison._forward, comparison._forward_before = observer._forward, observer._forward_before
        comparison.report.step = observer.step
        return comparison

    def run(self, step: Callable[[], Any]) -> PrecisionReport:
        """Compare a step, and the tensors that it returns."""
        with self as report:
            result = step()
        with torch.no_grad():
            report.results = [
                deviation(tensor.detach(), self.copies.read(tensor)).relative for tensor in readable(tensors_in(result))
            ]
        return report

    def _observe(self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        facts = call.facts
        if facts.literal:
            return func(*args, **kwargs)
        if call.phase == "scaler" and self._new_gradients and not call.caller.scaling:
            self._new_gradients = False  # compared here, since no hook runs if the scaler skips the step
            self._collect_gradients()
        self._new_gradients |= call.phase == "backward"
        inputs, default = call.tensors, torch.get_default_dtype()
        takes_default = facts.takes_dtype and not (inputs or facts.random or kwargs.get("dtype"))
        if default in SIXTEEN_BIT and takes_default and func(*args, **kwargs).dtype is default:
            kwargs = {**kwargs, "dtype": default}  # but not of `arange` of integers
        low = any(map(self._is_low, inputs)) or self._asks_for_low((*args, *kwargs.values()))
        if not low and not any(map(self.copies.has_copy, inputs)):
            return func(*args, **kwargs)  # it computes the reference itself
        for tensor in inputs:
            if tensor.dtype in SIXTEEN_BIT and not self.copies.has_copy(tensor):
                self._note_given(tensor)
        if call.starts_backward:
            scale = self.scale or 1.0
            self.report.loss = float(inputs[0].detach()) / scale
            self.report.reference_loss = float(self.copies.read(inputs[0])) / scale
            self.changes.backward_starts(inputs[0], scale)
        written = facts.written(args, kwargs)
        refusal = _OPTIMIZER if call.phase == "optimizer" else why_not_again(facts, func, args, kwargs)
        if not refusal:
            return self._run_three(call, func, args, kwargs, low, [*written, *facts.possibly_written(args, kwargs)])
        result = func(*args, **kwargs)
        for tensor in (*written, *tensors_in(result)):
            self.copies.forget(tensor)
            self.changes.copies.forget(tensor)
        if facts.name == "aten::native_dropout":
            self._note_dropout(result, *args)
        if refusal not in (_OPTIMIZER, _RANDOM, _UNREAD):
            self.report.opaque[facts.name] = refusal
        return result

    def _run_three(
        self,
        call: OperatorCall,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        low: bool,
        written: list[Tensor],
    ) -> Any:
        """Run an operator as the user wrote it, on reference copies, and if `low` in the wider dtype on its inputs."""
        copies, facts = self.copies, call.facts
        errors_in = [copies.error(tensor) for tensor in call.tensors]
        incoming = max(errors_in, default=NONE)._replace(lost=max((error.lost for error in errors_in), default=-1))
        for tensor in written:
            copies.make_writable(tensor)
        written_ids = {id(tensor) for tensor in written}
        updates = not facts.overwrites and call.phase != "recompute"
        before = {id(tensor): tensor.clone() for tensor in written if updates and tensor.dtype in SIXTEEN_BIT}

        def widened(tensor: Tensor) -> Tensor:
            return tensor.detach().to(copies.wide(tensor.dtype), copy=id(tensor) in written_ids)

        def outputs(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
            return [tensor for tensor in facts.outputs(result, args, kwargs) if not is_opaque(tensor)]

        is_cast = facts.name == "aten::_to_copy" and args[0].is_floating_point()
        follow_module = self._in_module(call, func, args, kwargs, written)
        of_copies = converted_arguments(func, args, kwargs, copies.read, copies.wide)
        of_inputs = converted_arguments(func, args, kwargs, widened, copies.wide) if low else None
        result = func(*args, **kwargs)
        results = outputs(result, args, kwargs)
        wide_func: Any = WIDE_PRODUCTS.get(facts.name, func)
        with torch.no_grad():
            try:
                exact = None  # the results in the wider dtype on the user's inputs
                if of_inputs is not None and is_cast:
                    exact = [of_inputs[0][0]]  # a cast to the wider dtype returns its widened input
                elif of_inputs is not None:
                    exact = outputs(wide_func(*of_inputs[0], **of_inputs[1]), *of_inputs)
                of_inputs = None  # freed before the next run, which is the peak of memory
                references = outputs(wide_func(*of_copies[0], **of_copies[1]), *of_copies)
                if [tensor.shape for tensor in results] != [tensor.shape for tensor in references]:
                    raise ValueError("the reference has another shape: it depends on values")
            except Exception as error:  # operators without a wider dtype raise many kinds of errors
                self.report.opaque[facts.name] = str(error).splitlines()[0][:100]
                for tensor in results:
                    copies.forget(tensor)
                    self.changes.copies.forget(tensor)
                return result
            follow_module(results, exact)
            shared = {storage_key(tensor) for tensor in tensors_in(of_copies) if not is_opaque(tensor)}
            del of_copies
            if is_cast and not self._is_low(results[0]):
                errors = [incoming]  # a cast from a narrower dtype does not round
            else:
                errors = self._measure(call, results, references, exact, incoming, before)
            for tensor, reference, error in zip(results, references, errors, strict=True):
                if id(tensor) in written_ids:
                    copies.note_error(tensor, error)
                else:
                    copies.write(tensor, reference, error, own=storage_key(reference) not in shared)
                    shared.add(storage_key(reference))
        return result

    def _in_module(
        self, call: OperatorCall, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Callable[[list[Tensor], list[Tensor] | None], None]:
        """Prepare an operator's run on the copies of its module, which have the error of that module alone.

        Returns a function that ends it, and takes the operator's results and those in the wider dtype on its inputs.
        """
        changes, facts = self.changes, call.facts
        if call.phase not in ("forward", "recompute"):
            return lambda results, exact: None
        copies = changes.copies
        own: Any = None
        if any(map(copies.has_copy, call.tensors)) or any(map(self._is_low, written)):
            for tensor in written:
                copies.make_writable(tensor)
            own = converted_arguments(func, args, kwargs, copies.read, copies.wide)

        def end(results: list[Tensor], exact: list[Tensor] | None) -> None:
            if own is not None:
                wide_func: Any = WIDE_PRODUCTS.get(facts.name, func)
                exact = [t for t in facts.outputs(wide_func(*own[0], **own[1]), *own) if not is_opaque(t)]
            written_keys = set(map(storage_key, written))
            for tensor, value in zip(results, exact or (), strict=False):
                if storage_key(tensor) not in written_keys and tensor.shape == value.shape:
                    changes.copies_for(tensor).write(tensor, value, NONE, own=False)

        return end

    def _measure(
        self,
        call: OperatorCall,
        results: list[Tensor],
        references: list[Tensor],
        exact: list[Tensor] | None,
        incoming: Error,
        before: dict[int, Tensor],
    ) -> list[Error]:
        """Add the errors of a call to the report. Returns the error of each result."""
        chosen = [
            i
            for i, result in enumerate(results)
            if result.numel() and (result.is_floating_point() or result.is_complex())
        ]
        totals = {i: deviation(results[i], references[i]) for i in chosen}
        maker, lost = incoming.maker, incoming.lost
        if chosen:
            total, dtype = _sum(totals.values()), dtype_name(results[chosen[0]].dtype)
            local, propagated = Deviation(0.0, total.norm, 0, 0, total.numel), total
            if exact is not None:
                local = _sum(deviation(results[i], exact[i], count_lost=self._is_low(results[i])) for i in chosen)
                if local.error or local.broken:
                    propagated = _sum(deviation(exact[i], references[i]) for i in chosen)
            if local.relative > propagated.relative / 2:
                maker = call.index
            if local.lost:
                lost = call.index
            self.report.operators.append(
                OperatorError(
                    **self._operation_fields(call),
                    dtype=dtype,
                    shape=tuple(results[chosen[0]].shape),
                    total=total.relative,
                    local=local.relative,
                    propagated=propagated.relative,
                    amplification=propagated.relative / incoming.relative if 0 < incoming.relative < math.inf else 0.0,
                    error_from=incoming.maker,
                    lost=local.lost / max(1, local.numel),
                    largest=max(largest_finite(references[i]) for i in chosen),
                    norm=total.norm,
                )
            )
            share = _lost_in_place(results, exact or [], before)
            if share > 0.5 and call.phase == "forward":
                file, line = call.caller.line()
                lost_update = LostUpdate(call.facts.name, share, dtype, file, line, by_optimizer=False)
                self.report.lost_updates.append(lost_update)
        return [Error(totals[i].relative, maker, lost) if i in totals else NONE for i in range(len(results))]

    def _note_given(self, tensor: Tensor) -> None:
        """List a tensor that was in 16 bits before the step, whose rounding cannot be compared."""
        if tensor.numel() > 1 and not is_opaque(tensor) and not self._noted.get(tensor):
            self._noted.set(tensor, True)
            name = self._name_of(tensor) or f"a tensor {list(tensor.shape)}"
            self.report.given[name] = dtype_name(tensor.dtype)

    def _passed_over(self, facts: OperatorFacts, tensors: list[Tensor]) -> None:
        if any(self._is_low(tensor) or self.copies.has_copy(tensor) for tensor in tensors):
            self.report.opaque[facts.name] = "it takes sparse, nested or quantized tensors"

    def _note_dropout(self, result: tuple[Tensor, Tensor], source: Tensor, p: float, train: bool | None) -> None:
        """Set the reference of a dropout: the reference of its input without the same elements."""
        output, mask = result
        factor = mask / (1 - p) if train is not False and p < 1 else mask
        for copies in (self.copies, self.changes.copies):
            if copies.has_copy(source):
                copies.write(output, copies.read(source) * factor, copies.error(source), own=True)

    def _step_ended(self, *, skipped: bool = False) -> None:
        if skipped:
            self.copies = ReferenceCopies(self.copies.reference)  # gradients have another scale in the next step
            self.changes.restart(self.copies)
        file, line = find_caller(1).line()
        for parameter, before, wanted in self._before:
            share = float(lost_share(parameter, before, wanted))
            if share > 0.5:
                name, dtype = self._name_of(parameter), dtype_name(parameter.dtype)
                self.report.lost_updates.append(LostUpdate(name, share, dtype, file, line, by_optimizer=True))
        self._before = []
        self.on_step()

    def _step_starts(self, optimizer: Any) -> None:
        self._collect_gradients()
        self._before = []
        if any(group.get("lr", 1.0) for group in optimizer.param_groups):  # a warm-up begins at 0
            self._before = [entry for entry in before_update(optimizer) if entry[0].dtype in SIXTEEN_BIT]

    def _collect_gradients(self) -> None:
        """Compare the gradients now, since a loop may clear them; a scaler's are compared again when unscaled."""
        with torch.no_grad():
            deviations = [
                (name, deviation(p.grad, self.copies.read(p.grad), count_lost=True))
                for root in self.modules.roots()
                for name, p in root.named_parameters()
                if p.grad is not None and p.grad.layout is torch.strided
            ]
        norm = math.hypot(*(each.norm for _, each in deviations))
        if deviations:
            self.report.gradients = {
                name: GradientError(
                    error=each.relative,
                    share=each.error / norm if norm else each.relative,
                    lost=each.lost / max(1, each.numel),
                    norm=each.norm,
                )
                for name, each in deviations
            }

    def _is_low(self, tensor: Tensor) -> bool:
        """Whether a tensor's dtype is narrower than the reference."""
        return tensor.dtype is not self.copies.wide(tensor.dtype)

    def _asks_for_low(self, values: tuple[Any, ...]) -> bool:
        """Whether a dtype among arguments is narrower than the reference."""
        return any(isinstance(value, torch.dtype) and value is not self.copies.wide(value) for value in values)


def why_not_again(facts: OperatorFacts, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why an operator cannot run again; "" if it can."""
    if facts.communicates:
        return "it communicates with other processes"
    if facts.opaque_state or any(part in facts.name for part in _PRIVATE_FORMAT):
        return "its kernels use memory in a private format"
    if facts.uninitialized:
        return _UNREAD
    if facts.random:
        for position, argument in enumerate(func._schema.arguments):
            if argument.name == "dropout_p":
                p = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
                return _RANDOM if p else ""
        return _RANDOM
    return ""


def _lost_in_place(results: list[Tensor], exact: list[Tensor], before: dict[int, Tensor]) -> float:
    """The share of elements that an update in place changes in the wider dtype and does not change in the user's."""
    wanted = lost = 0
    for result, wide_result in zip(results, exact, strict=False):
        old = before.get(id(result))
        if old is not None and old.shape == result.shape:  # `transpose_` changes it
            changes = wide_result != old
            wanted += int(changes.sum())
            lost += int((changes & (result == old)).sum())
    return lost / wanted if wanted else 0.0


def deviation(value: Tensor, reference: Tensor, *, count_lost: bool = False) -> Deviation:
    """The deviation of `value` from `reference`; without `count_lost` its `lost` is 0."""
    value = value.float() if value.element_size() == 1 else value  # few operators take float8
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
    fits = torch.isfinite(reference)  # a norm beyond the dtype, or values that are not finite
    broken = int((fits & ~torch.isfinite(value)).sum())
    fits &= torch.isfinite(value)
    error = float(torch.where(fits, value.double() - reference, 0.0).norm())
    return Deviation(error, float(torch.where(fits, reference, 0.0).double().norm()), lost, broken, count)


def _sum(deviations: Iterable[Deviation]) -> Deviation:
    """The deviation of several tensors taken as one."""
    parts = list(deviations)
    return Deviation(
        error=math.hypot(*(part.error for part in parts)),
        norm=math.hypot(*(part.norm for part in parts)),
        lost=sum(part.lost for part in parts),
        broken=sum(part.broken for part in parts),
        numel=sum(part.numel for part in parts),
    )
