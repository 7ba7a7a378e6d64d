"""A step compared with the same step in float32: the operators that round most, and those that amplify the error.

In a chosen step each operator of forward and backward runs three times: as the user wrote it; on reference copies of
its inputs, which makes the reference; and in float32 on the user's own inputs. The first and third results differ by
the operator's own rounding, the second and third by the errors of the inputs. The optimizer is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampkit.debugging.checks.check import Add, Check
from ampkit.debugging.checks.reference_copies import NONE, Error, ReferenceCopies
from ampkit.debugging.finding import Cause, Finding, Fix, Place
from ampkit.debugging.observe.call import Call
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_properties import converted_arguments, tensors_in
from ampkit.debugging.observe.rerun import can_run_again
from ampkit.debugging.observe.tensor_values import largest_finite
from ampkit.debugging.torch_private import is_opaque, storage_key
from ampkit.dtypes import SIXTEEN_BIT
from ampkit.matmul.float8_matmul import WIDE_PRODUCTS

_LARGE_ERROR = 0.05  # of the gradients or of the loss


class _Deviation(NamedTuple):
    """The difference of values from their reference, without elements where the reference is not finite."""

    error: float  # 2-norm of the difference
    norm: float  # 2-norm of the reference
    zeros: int  # number of elements that are 0 although the reference is not
    broken: int  # number of elements that are inf or NaN although the reference is finite
    numel: int

    @property
    def relative(self) -> float:
        """The error as a share of the reference's norm."""
        if self.broken:
            return math.inf
        return self.error / self.norm if self.norm else (math.inf if self.error else 0.0)


@dataclass(frozen=True)
class _OperatorError:
    """The errors of one call: 2-norms of differences as shares of the reference's norm, inf after an overflow."""

    place: Place
    total: float  # against the reference step
    local: float  # the operator's own rounding
    propagated: float  # of the inputs
    amplification: float  # of the largest error of an input
    error_from: int  # index of the call that made most of that error; -1 without one
    zeros: float  # fraction of elements that the operator flushes to zero
    largest: float  # magnitude in the reference
    norm: float  # of the reference


class _Gradient(NamedTuple):
    """The error of a parameter's gradient, as a share of the norm of all gradients."""

    share: float
    zeros: float
    norm: float


class Precision(Check):
    """Runs each operator of a chosen step in float32 too."""

    name = "precision"
    is_expensive = True

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self.active = False
        self._restart()

    def _restart(self) -> None:
        self._copies = ReferenceCopies(torch.float32)
        self._operators: list[_OperatorError] = []
        self._gradients: dict[str, _Gradient] = {}
        self._new_gradients = False  # backward has run since gradients were compared
        self._scale = 1.0
        self._losses: tuple[float, float] | None = None  # the loss and its reference

    def step_chosen(self, chosen: bool) -> None:
        self.active = chosen
        self._restart()

    def step_starts(self, optimizer: Any, closure: bool) -> None:
        if self.active:
            self._compare_gradients()

    def step_ended(self, optimizer: Any, *, complete: bool = True) -> None:
        if not self.active:
            return
        if not self._gradients:
            self._compare_gradients()
        finding = self._finding()
        if finding is not None:
            self.add(finding)
        self._restart()

    # --- one operator

    def operator_starts(self, call: Call) -> Callable[[], None] | None:
        if not self.active or call.op.literal:
            return None
        if call.phase == "scaler" and self._new_gradients and not call.caller.scaling:
            self._new_gradients = False  # compared here, since no hook runs if the scaler skips the step
            self._compare_gradients()
        self._new_gradients |= call.phase == "backward"
        kwargs, default = call.kwargs, torch.get_default_dtype()
        takes_default = call.op.takes_dtype and not (call.tensors or call.op.random or kwargs.get("dtype"))
        if default in SIXTEEN_BIT and takes_default and not all(isinstance(each, int) for each in call.args):
            kwargs = {**kwargs, "dtype": default}
        is_low = any(map(self._is_low, call.tensors)) or self._takes_low_dtype((*call.args, *kwargs.values()))
        if not is_low and not any(map(self._copies.has_copy, call.tensors)):
            return None  # it computes the reference itself
        if call.starts_backward:
            self._scale = self.run.scale or 1.0
            loss = call.tensors[0]
            self._losses = float(loss.detach()) / self._scale, float(self._copies.read(loss)) / self._scale
        if call.phase == "optimizer" or not can_run_again(call.op, call.args, call.kwargs):
            return lambda: self._forget(call)
        return self._run_again(call, kwargs, is_low)

    def _forget(self, call: Call) -> None:
        """Take the results of a call that cannot run again as their own reference."""
        for tensor in (*call.op.written(call.args, call.kwargs), *tensors_in(call.result)):
            self._copies.forget(tensor)
        if call.op.name == "aten::native_dropout":  # the reference drops the same elements
            (output, mask), source, p, *train = call.result, *call.args[:2], *call.args[2:]
            factor = mask / (1 - p) if (not train or train[0] is not False) and p < 1 else mask
            if self._copies.has_copy(source):
                self._copies.write(output, self._copies.read(source) * factor, self._copies.error(source), own=True)

    def _run_again(self, call: Call, kwargs: dict[str, Any], is_low: bool) -> Callable[[], None]:
        """Prepare the runs of an operator on reference copies, and if `is_low` in float32 on its own inputs."""
        copies, op, args = self._copies, call.op, call.args
        errors = [copies.error(tensor) for tensor in call.tensors]
        incoming = max(errors, default=NONE)
        written = [
            *op.written(args, kwargs),
            *(() if op.mutable or op.name.startswith("aten::") else tensors_in((args, kwargs))),
        ]
        for tensor in written:
            copies.make_writable(tensor)
        written_ids = {id(tensor) for tensor in written}

        def widened(tensor: Tensor) -> Tensor:
            return tensor.detach().to(copies.wide(tensor.dtype), copy=id(tensor) in written_ids)

        wide_func: Any = WIDE_PRODUCTS.get(op.name, op.func)
        is_cast = op.name == "aten::_to_copy" and args[0].is_floating_point()
        of_copies = converted_arguments(op, args, kwargs, copies.read, copies.wide)
        of_inputs = converted_arguments(op, args, kwargs, widened, copies.wide) if is_low else None

        def outputs(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
            return [tensor for tensor in op.outputs(result, args, kwargs) if not is_opaque(tensor)]

        def end() -> None:
            results = outputs(call.result, call.args, call.kwargs)
            with torch.no_grad():
                try:
                    exact: list[Tensor] | None = None  # the results in float32 on the user's inputs
                    if of_inputs is not None and is_cast and not results[0].is_complex():
                        exact = [of_inputs[0][0]]  # a cast to float32 returns its input
                    elif of_inputs is not None:
                        exact = outputs(wide_func(*of_inputs[0], **of_inputs[1]), *of_inputs)
                    references = outputs(wide_func(*of_copies[0], **of_copies[1]), *of_copies)
                    if [tensor.shape for tensor in results] != [tensor.shape for tensor in references]:
                        raise ValueError("the reference has another shape: it depends on values")
                except Exception:  # operators without float32 raise many kinds of errors
                    for tensor in results:
                        copies.forget(tensor)
                    return
                shared = {storage_key(tensor) for tensor in tensors_in(of_copies) if not is_opaque(tensor)}
                errors = [incoming]  # a cast from a narrower dtype does not round
                if not is_cast or self._is_low(results[0]):
                    errors = self._measure(call, results, references, exact, incoming)
                for tensor, reference, error in zip(results, references, errors, strict=True):
                    if id(tensor) in written_ids:
                        copies.note_error(tensor, error)
                    else:
                        copies.write(tensor, reference, error, own=storage_key(reference) not in shared)
                        shared.add(storage_key(reference))

        return end

    def _measure(
        self,
        call: Call,
        results: list[Tensor],
        references: list[Tensor],
        exact: list[Tensor] | None,
        incoming: Error,
    ) -> list[Error]:
        """Note the errors of a call. Return the error of each result."""
        chosen = [
            i for i, each in enumerate(results) if each.numel() and (each.is_floating_point() or each.is_complex())
        ]
        totals = {i: _deviation(results[i], references[i]) for i in chosen}
        maker = incoming.maker
        if chosen:
            total = _sum(totals.values())
            local, propagated = _Deviation(0.0, total.norm, 0, 0, total.numel), total
            if exact is not None:
                local = _sum(_deviation(results[i], exact[i], count_zeros=self._is_low(results[i])) for i in chosen)
                if local.error or local.broken:
                    propagated = _sum(_deviation(exact[i], references[i]) for i in chosen)
            if local.relative > propagated.relative / 2:
                maker = call.index
            self._operators.append(
                _OperatorError(
                    self.run.place(call, results[chosen[0]]),
                    total=total.relative,
                    local=local.relative,
                    propagated=propagated.relative,
                    amplification=propagated.relative / incoming.relative if 0 < incoming.relative < math.inf else 0.0,
                    error_from=incoming.maker,
                    zeros=local.zeros / max(1, local.numel),
                    largest=max(largest_finite(references[i]) for i in chosen),
                    norm=total.norm,
                )
            )
        return [Error(totals[i].relative, maker) if i in totals else NONE for i in range(len(results))]

    def _compare_gradients(self) -> None:
        """Compare the gradients now, since a loop may clear them; a scaler's are compared again when unscaled."""
        with self.run.silently(), torch.no_grad():
            deviations = [
                (name, _deviation(p.grad, self._copies.read(p.grad), count_zeros=True))
                for root in self.run.modules.roots()
                for name, p in root.named_parameters()
                if p.grad is not None and type(p.grad) is Tensor and not is_opaque(p.grad)
            ]
        norm = math.hypot(*(each.norm for _, each in deviations))
        if deviations:
            self._gradients = {
                name: _Gradient(
                    each.error / norm if norm else each.relative, each.zeros / max(1, each.numel), each.norm
                )
                for name, each in deviations
            }

    def _is_low(self, tensor: Tensor) -> bool:
        """Return whether a tensor's dtype is narrower than float32."""
        return tensor.dtype is not self._copies.wide(tensor.dtype)

    def _takes_low_dtype(self, values: tuple[Any, ...]) -> bool:
        """Return whether a dtype among arguments is narrower than float32."""
        return any(isinstance(value, torch.dtype) and value is not self._copies.wide(value) for value in values)

    # --- the finding of a step

    def _finding(self) -> Finding | None:
        """Return the finding of a step that is far off; None for one that is not."""
        gradients = math.hypot(*(gradient.share for gradient in self._gradients.values()))
        errors = {"gradients are": gradients}
        if self._losses is not None:
            errors["the loss is"] = abs(self._losses[0] - self._losses[1]) / (abs(self._losses[1]) or 1.0)
        subject = max(errors, key=errors.__getitem__)
        origin = self._origin()
        if origin is None or self._scaler_skips(gradients) or not errors[subject] >= _LARGE_ERROR:
            return None
        why = f"the largest error begins with {origin.place.operator} in {origin.place.dtype}"
        amplified = self._amplified()
        if amplified is not None and amplified is not origin:
            why += f"; {amplified.place} makes it {amplified.amplification:.3g} times larger"
        kind, fix = self._recommendation(origin)
        return Finding(
            grade="note",
            check=self.name,
            cause=Cause(kind, why),
            what=f"{subject} {errors[subject]:.2g} off, compared with the same step in float32",
            place=origin.place,
            fix=Fix(fix),
            step=self.run.step,
        )

    def _recommendation(self, origin: _OperatorError) -> tuple[str, str]:
        """Return the kind of the cause, and an untested fix."""
        norm = math.hypot(*(gradient.norm for gradient in self._gradients.values()))
        gone = any(each.zeros > 0.99 and each.norm > 1e-6 * norm for each in self._gradients.values())
        is_float16 = [
            call for call in self._operators if (call.place.phase, call.place.dtype) == ("backward", "float16")
        ]
        if gone and any(call.zeros > 0.5 for call in is_float16):
            return "underflow", "scale the loss: scaler = ampkit.GradScaler()"
        if (origin.place.op, origin.place.phase, origin.place.backward_of) == ("aten::add_.Tensor", "backward", ""):
            return "accumulation", "accumulate gradients in float32, next to the parameters"
        return "imprecise", "keep more of the model in float32"

    def _scaler_skips(self, gradient_error: float) -> bool:
        """Return whether gradients overflow only because of the loss scale: a scaler skips the step."""
        largest = max((each.largest for each in self._float16_backward()), default=0.0)
        if math.isfinite(gradient_error) or not largest:
            return False
        return 1 <= self._scale * 2.0 ** math.floor(math.log2(65504 / largest)) < self._scale

    def _float16_backward(self) -> list[_OperatorError]:
        return [each for each in self._operators if (each.place.phase, each.place.dtype) == ("backward", "float16")]

    def _amplified(self) -> _OperatorError | None:
        """Return the call that amplifies an error most; None if no call does."""
        worst = _worst(filter(self._matters, self._operators), lambda call: call.amplification)
        return worst if worst is not None and worst.amplification > 1 else None

    def _origin(self) -> _OperatorError | None:
        """Return the call where the largest error began: the one that is amplified later, else the largest rounding."""
        amplified = self._amplified()
        if amplified is not None:
            made = next((each for each in self._operators if each.place.index == amplified.error_from), None)
            if made is not None:
                return made
        return _worst(self._operators, lambda call: call.local)

    def _matters(self, call: _OperatorError) -> bool:
        """Return whether an error reaches anything: a gradient that is exactly zero is nothing but error."""
        gradients = self._scale * math.hypot(*(gradient.norm for gradient in self._gradients.values()))
        return call.propagated > 1e-3 and (call.place.phase != "backward" or call.total * call.norm > 1e-3 * gradients)


def _worst(calls: Iterable[_OperatorError], by: Callable[[_OperatorError], float]) -> _OperatorError | None:
    worst = max(calls, key=by, default=None)
    return worst if worst is not None and by(worst) > 0 else None


def _deviation(value: Tensor, reference: Tensor, *, count_zeros: bool = False) -> _Deviation:
    """Return the deviation of `value` from `reference`; without `count_zeros` its `zeros` is 0."""
    value = value.float() if value.element_size() == 1 else value  # few operators take float8
    if value.is_complex():
        value, reference = torch.view_as_real(value), torch.view_as_real(reference)
    value, reference = value.reshape(-1), reference.reshape(-1)
    count, zeros = value.numel(), 0
    if count_zeros and int(torch.count_nonzero(value)) < count:
        zeros = int(((value == 0) & (reference != 0)).sum())
    same = value.dtype is reference.dtype
    difference = value - reference if same else value.to(reference.dtype).sub_(reference)
    error, norm = math.sqrt(torch.dot(difference, difference)), math.sqrt(torch.dot(reference, reference))
    if math.isfinite(error) and math.isfinite(norm):
        return _Deviation(error, norm, zeros, 0, count)
    fits = torch.isfinite(reference)  # a norm beyond the dtype, or values that are not finite
    broken = int((fits & ~torch.isfinite(value)).sum())
    fits &= torch.isfinite(value)
    error = float(torch.where(fits, value.double() - reference, 0.0).norm())
    return _Deviation(error, float(torch.where(fits, reference, 0.0).double().norm()), zeros, broken, count)


def _sum(deviations: Iterable[_Deviation]) -> _Deviation:
    """Return the deviation of several tensors taken as one."""
    parts: Sequence[_Deviation] = list(deviations)
    return _Deviation(
        error=math.hypot(*(part.error for part in parts)),
        norm=math.hypot(*(part.norm for part in parts)),
        zeros=sum(part.zeros for part in parts),
        broken=sum(part.broken for part in parts),
        numel=sum(part.numel for part in parts),
    )
