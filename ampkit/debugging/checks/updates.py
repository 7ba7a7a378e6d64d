"""Parameters that do not learn: rounding makes their gradient 0, or takes away their 16-bit updates."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampkit.debugging.checks.check import Add, Check, is_plain, sample
from ampkit.debugging.finding import Cause, Grade, Place
from ampkit.debugging.observe.call import Call, Phase
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_properties import OperatorProperties, item_of, tensors_in
from ampkit.debugging.observe.rerun import float64_results, run_in_float64
from ampkit.debugging.observe.storage_map import StorageMap
from ampkit.debugging.observe.training_loop import calling_place
from ampkit.debugging.torch_private import is_opaque, storage_key
from ampkit.dtypes import SIXTEEN_BIT
from ampkit.gradients.collect import parameters as parameters_of

_MIN_STEPS = 3  # steps before a finding
_MAX_ELEMENTS = 1 << 16  # the most elements of a parameter that are checked


class _Zeros(NamedTuple):
    """The operator that first returned nothing but zeros, although its inputs had others."""

    place: Place
    rounded: bool  # the exact result is not 0
    counts: bool  # it is more than rounding of the loss in float32


class _Step:
    """A step of a 16-bit parameter: its values before and now, and the sum of the exact updates."""

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.start = self.value = sample(parameter, _MAX_ELEMENTS).clone()
        self.exact = torch.zeros_like(self.start, dtype=torch.float64)
        self.op = ""  # the last that wrote


class _Update:
    """The updates of a 16-bit parameter that are below half a unit in the last place, over all checked steps.

    Rounding to nearest loses them. Stochastic rounding is right in the mean: the product of executed and exact updates
    is the square of the exact ones. Larger updates are rounded up as often as down.
    """

    def __init__(self) -> None:
        self.executed = self.exact = 0.0
        self.small = self.elements = 0  # the number of such updates, and of all
        self.steps: set[int] = set()
        self.has_masters = False  # it is overwritten with a tensor that the optimizer keeps
        self.op = ""

    @property
    def lost(self) -> float:
        """The fraction that is rounded away; 0 if rounding is right in the mean."""
        if not self.exact or self.has_masters:
            return 0.0
        return max(0.0, 1.0 - self.executed / self.exact) * self.small / self.elements

    def add(self, step: _Step, number: int) -> None:
        executed = step.value.double() - step.start.double()
        small = (step.exact != 0) & (2 * step.exact.abs() < _units_in_the_last_place(step.start))
        self.small += int(small.sum())
        self.elements += int((step.exact != 0).sum())
        self.exact += float(step.exact[small].square().sum())
        self.executed += float((executed * step.exact)[small].sum())
        self.steps.add(number)
        self.op = step.op


class Updates(Check):
    """Follows zeros through backward, and compares each write of a 16-bit parameter with the same in float64."""

    name = "updates"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._zeros: StorageMap[_Zeros] = StorageMap()
        self._steps: dict[Any, int] = {}
        self._zero: dict[Any, dict[Tensor, _Zeros | None]] = {}  # parameters whose gradient was 0 in each step
        self._stepping: dict[tuple[int, int], _Step] = {}
        self._updates: dict[Tensor, _Update] = {}
        self._sources: StorageMap[int] = StorageMap()  # tensors that were copied to a parameter, and in which step
        self._place = Place()

    # --- gradients that are 0

    def observes(self, op: OperatorProperties, phase: Phase) -> bool:
        return phase == "backward" or (phase == "optimizer" and op.mutable)

    def operator_ran(self, call: Call) -> None:
        if call.phase == "optimizer" and call.op.mutable and self._stepping:
            for index, output in enumerate(call.outputs):
                if _key(output) in self._stepping:
                    self._note_update(call, index, output)
        if call.phase == "backward":
            self._follow_zeros(call)

    def _follow_zeros(self, call: Call) -> None:
        for output, (low, high) in zip(call.outputs, call.ranges, strict=False):
            if low != 0 or high != 0:
                if call.op.mutable:
                    self._zeros.discard(output)
                continue
            known = next((zeros for zeros in map(self._zeros_of, call.tensors) if zeros is not None), None)
            if known is None:
                known = _Zeros(self.run.place(call, output), *self._is_rounded(call))
            self._zeros.set(output, known)

    def _zeros_of(self, tensor: Tensor) -> _Zeros | None:
        return None if is_opaque(tensor) else self._zeros.get(tensor)

    def _is_rounded(self, call: Call) -> tuple[bool, bool]:
        """Return whether the exact result is not 0, and whether it is more than rounding of the loss."""
        if not any(tensor.dtype in SIXTEEN_BIT for tensor in call.tensors) and "_to_copy" not in call.op.name:
            return False, False
        if call.op.communicates or call.op.opaque_state or call.op.random:
            return False, False
        size = sum(float(exact.abs().sum()) for exact in float64_results(call))
        loss = abs(self.run.last_loss) * (self.run.scale or 1.0)
        # A gradient that is 0 except for rounding in float32 is about a millionth of the loss, and not far less.
        return size > 0, size > 1e-5 * loss or 0 < size < 1e-20 * loss

    def step_starts(self, optimizer: Any, closure: bool) -> None:
        parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
        if not any(group.get("lr", 1.0) for group in optimizer.param_groups):
            return
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._zero[optimizer] = {
            p: self._zeros.get(p.grad)
            for p in self._zero.get(optimizer, parameters)
            if p.grad is not None and is_plain(p.grad) and not p.grad.any()
        }
        # ampkit's own optimizers write weights in one kernel, which compensates for rounding.
        if (steps < 10 or steps % 10 == 0) and not type(optimizer).__module__.startswith("ampkit"):
            chosen = (p for p in parameters if p.grad is not None and p.dtype in SIXTEEN_BIT and is_plain(p))
            self._stepping = {_key(p): _Step(p) for p in chosen}
            self._place = calling_place()

    # --- updates that are rounded away

    def _note_update(self, call: Call, index: int, output: Tensor) -> None:
        """Compare a write of a parameter with the same in float64."""
        step = self._stepping[_key(output)]
        before, step.value = step.value, sample(output, _MAX_ELEMENTS).clone()
        args, kwargs = call.arguments()
        if call.op.on_lists:
            args, kwargs = item_of((args, kwargs), index, len(call.outputs))
        exact: Tensor | None = None
        if call.op.base.removeprefix("_foreach_") == "copy":
            exact = tensors_in(args)[-1]
            if not is_opaque(exact):
                update = self._updates.setdefault(step.parameter, _Update())
                update.has_masters |= self._sources.get(exact) not in (None, self.run.step)
                self._sources.set(exact, self.run.step)
        else:
            with contextlib.suppress(Exception):  # operators without float64 raise many kinds of errors
                exact = next(iter(run_in_float64(call.op, args, kwargs)), None)
        if exact is None or exact.shape != output.shape or before.shape != step.value.shape:
            del self._stepping[_key(output)]
            return
        step.exact += sample(exact, _MAX_ELEMENTS).double() - before.double()
        step.op = call.op.name

    def step_ended(self, optimizer: Any, *, complete: bool = True) -> None:
        for step in self._stepping.values():
            if step.op:
                self._updates.setdefault(step.parameter, _Update()).add(step, self.run.step)
        self._stepping = {}

    # --- findings

    def ended(self) -> None:
        for optimizer, zero in self._zero.items():
            if self._steps[optimizer] >= _MIN_STEPS:
                self._add_gradients(zero)
        updates = {p: each for p, each in self._updates.items() if len(each.steps) >= _MIN_STEPS}
        lost = sum(each.lost for each in updates.values()) / max(1, len(updates))
        if lost <= 0.2:
            return
        parameter, most = max(updates.items(), key=lambda item: item[1].lost)
        name = self.run.names_of([parameter])
        why = f"{most.lost:.0%} of the update of {name} is below half a unit in the last place"
        what = f"{lost:.0%} of the optimizer's updates of 16-bit weights are rounded away"
        fix = "keep float32 masters: ampkit.FP16Optimizer(optimizer), or the model in float32 and a region"
        grade: Grade = "precision loss" if lost > 0.3 or most.lost > 0.5 else "note"
        place = Place(*self._place.site, op=most.op, phase="optimizer")
        self._add(place, grade, Cause("update rounded away", why), what, fix)

    def _add_gradients(self, zero: dict[Tensor, _Zeros | None]) -> None:
        """Add the parameters whose gradients were 0 in each step, because of rounding."""
        for p, zeros in zero.items():
            if zeros is None or not zeros.rounded:
                continue
            fix = "scale the loss: ampkit.GradScaler, or compute this in float32"
            if zeros.place.dtype == "bfloat16":  # has the range of float32
                fix = (
                    "keep these numbers above 1e-38, the bfloat16 minimum: another scale, or another order of products"
                )
            cause = Cause("underflow", f"rounding to {zeros.place.dtype} makes all of it 0")
            grade: Grade = "precision loss" if zeros.counts else "note"
            self._add(zeros.place, grade, cause, f"the gradient of {self.run.names_of([p])} is 0", fix)

    def _add(self, place: Place, grade: Grade, cause: Cause, what: str, fix: str) -> None:
        self.found(place, grade, cause, what, fix, step=0, last=self.run.step - 1)


def _key(tensor: Tensor) -> tuple[int, int]:
    return storage_key(tensor), int(tensor.storage_offset())


def _units_in_the_last_place(values: Tensor) -> Tensor:
    """Return the distance from each number to the next in its dtype."""
    info = torch.finfo(values.dtype)
    exponents = torch.frexp(values.double().abs().clamp_min(info.smallest_normal)).exponent - 1
    return info.eps * torch.exp2(exponents.double())
