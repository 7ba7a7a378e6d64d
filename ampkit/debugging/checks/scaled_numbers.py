"""Numbers that carry the loss scale and are used without removing it: in a penalty, a threshold, noise or a log.

The degree of a tensor is the power of the loss scale in it: 1 for a scaled loss and its gradients, 2 for their squares.
Operators that the program calls on such tensors run again in float64, as they were and as if the loss scale were 1. If
the results differ by a power of the scale, this power is the degree of the result. Otherwise the operator mixes scaled
numbers with others. Other operators of backward do not change the degree.
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampkit.containers import map_tensors
from ampkit.debugging.checks.check import Add, Check
from ampkit.debugging.finding import Cause, Grade, Place
from ampkit.debugging.observe.call import Call, Phase
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_properties import OperatorProperties, properties_of
from ampkit.debugging.observe.rerun import can_run_again, run_in_float64
from ampkit.debugging.observe.storage_map import StorageMap
from ampkit.debugging.torch_private import is_opaque
from ampkit.gradients.collect import parameters as parameters_of

_FIX = "divide by scaler.get_scale() before this line; for gradients in .grad: scaler.unscale_(optimizer)"
_SMALLEST_SCALE = 256.0  # smaller scales cannot be distinguished from other numbers of the code
_NEGLIGIBLE = 1e-2  # share of a result that a constant, such as an eps, may add
_UNKNOWN = math.nan  # a degree
_IS_FINITE = "isfinite|isnan|isinf"  # a line that reads a number for this may read a scaled one
_LEAF = 2**63  # from here on, sequence numbers of nodes belong to parameters
_COMPARISONS = frozenset({"gt", "ge", "lt", "le"})
_PRODUCTS = frozenset({"mul", "div", "_foreach_mul", "_foreach_div"})


class _Scaled(NamedTuple):
    """A storage with the loss scale in its numbers."""

    degree: float  # 0 for a gradient that has lost the scale
    made: Call  # the call since which its degree is not 1


class ScaledNumbers(Check):
    """Follows the loss scale from `scaler.scale` to calls that mix scaled numbers with others, or read them."""

    name = "scaled numbers"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._scaled: StorageMap[_Scaled] = StorageMap()
        self._known: dict[Any, float] = {}  # the degree of the results of a line
        self._reads: dict[tuple[int, int], tuple[Place, str, int]] = {}
        self._scale = 0.0  # 0: nothing is scaled
        self._scale_is_read = False  # by the program, which may divide by it
        self._clips = False  # `loop_order` reports gradients that are clipped while they are scaled

    def clip(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._clips = True
        try:
            yield
        finally:
            self._clips = False

    read_norm = clip

    def unscale(self, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Iterator[None]:
        what = "gradients that do not carry the loss scale, all or in part, are divided by it"
        why = "the loss scale is lost here, or gradients without it are added; the scaler divides all of them by it"
        if scaler.is_enabled():
            self._check([p.grad for p in parameters_of(optimizer)], lambda degree: degree == 0, why, what)
        yield

    scaler_step = unscale

    def backward_starts(self, roots: Sequence[Tensor], scaled: bool) -> None:
        why = "gradients in it were not divided by the loss scale"
        what = "the loss is multiplied by another power of the loss scale than 1"
        self._check(roots, lambda degree: math.isfinite(degree) and degree not in (0, 1), why, what)

    def _check(self, tensors: Sequence[Tensor | None], is_wrong: Callable[[float], bool], why: str, what: str) -> None:
        """Add a finding for the first of the tensors that has a wrong degree."""
        for tensor in tensors:
            known = None if tensor is None or is_opaque(tensor) else self._scaled.get(tensor)
            if known is not None and is_wrong(known.degree):
                self.found(known.made, "error", Cause("scaled", why), what, _FIX)
                break

    def observes(self, op: OperatorProperties, phase: Phase) -> bool:
        return phase != "optimizer"

    def operator_ran(self, call: Call) -> None:
        if call.phase == "scaler":
            self._note_scaler(call)
        elif self._scale and not self._clips:
            known = [self._scaled.get(each) for each in call.tensors]
            if any(known):
                self._follow(call, known)

    def _note_scaler(self, call: Call) -> None:
        if call.caller.scaling and call.op.base == "mul" and len(call.tensors) == 2:
            loss, scale = call.tensors
            known = self._scaled.get(loss)
            self._scale = self.run.scale or 0.0
            if self._scale >= _SMALLEST_SCALE:
                self._scaled.set(scale, _Scaled(1.0, call))
                self._scaled.set(call.result, _Scaled(known.degree + 1, known.made) if known else _Scaled(1.0, call))
        elif call.op.base == "_local_scalar_dense":
            self._scale_is_read |= self._scaled.get(call.tensors[0]) is not None
        elif call.op.mutable:  # gradients are unscaled, or the scale is updated
            for tensor in call.op.written(call.args, call.kwargs):
                if not is_opaque(tensor):
                    self._scaled.discard(tensor)

    def _follow(self, call: Call, known: Sequence[_Scaled | None]) -> None:
        """Set the degrees of the results of a call."""
        op, outputs = call.op, call.outputs
        if op.base == "_local_scalar_dense":
            self._note_read(call, known[0])
            return
        if op.overwrites:
            known = [None, *known[1:]]
            if not any(known) and outputs and outputs[0].nbytes < outputs[0].untyped_storage().nbytes():
                return  # the rest of the storage keeps its numbers
        inputs = [each.degree if each else 0.0 for each in known]
        is_new = op.shape_only or op.uninitialized
        degree = self._degree(call, inputs) if any(inputs) and not is_new else 0.0
        is_gradient = call.phase == "backward" or (op.mutable and op.base in _PRODUCTS)
        origin = next((each.made for each in known if each and each.degree != 1), call)
        for output in outputs:
            if degree or (is_gradient and any(known) and not is_new):
                self._scaled.set(output, _Scaled(degree, origin))
            else:
                self._scaled.discard(output)

    def _degree(self, call: Call, inputs: list[float]) -> float:
        """Return the degree of the results, and add a finding if a call of the program mixes degrees."""
        by_user = call.phase == "forward" or (
            call.phase == "backward" and call.caller.code is not None and not call.caller.outside
        )
        # A sum of gradients of a parameter.
        is_sum = call.op.base == "add" and call.backward_number >= _LEAF and 0 in inputs
        if not all(map(math.isfinite, inputs)):
            return _UNKNOWN
        if not (by_user or is_sum) or not can_run_again(call.op, call.args, call.kwargs):
            return max(inputs, key=abs)
        key = (call.site if by_user else None, call.op.name, *inputs)
        if self.is_chosen(key):
            new, evidence = self._computed(call, inputs)
            if evidence and by_user:
                what = "numbers that carry the loss scale are combined with numbers that do not"
                self.found(call, "error", Cause("scaled", evidence), what, _FIX)
            if evidence or new is not None:
                self._known[key] = new if new is not None else 0.0 if is_sum else _UNKNOWN
        return self._known.get(key, _UNKNOWN)

    def _computed(self, call: Call, inputs: list[float]) -> tuple[float | None, str]:
        """Return the degree of the first result by running a call twice, and how the results differ if none fits.

        The degree is None if the result is 0 or not finite.
        """
        op, (args, kwargs) = call.op, call.arguments()
        tensors = {id(tensor): degree for tensor, degree in zip(call.tensors, inputs, strict=True)}
        tensors |= {id(call.before[key]): degree for key, degree in tensors.items() if key in call.before}
        if op.base in _COMPARISONS:  # the difference of two numbers has a degree
            op = properties_of(getattr(torch.ops.aten.sub, op.func._overloadname))

        def divided(tensor: Tensor) -> Tensor:
            degree = tensors.get(id(tensor), 0.0)
            if not degree and op.base in _PRODUCTS and tensor.numel() == 1 and not tensor.requires_grad:
                degree = self._degree_of(float(tensor.detach()))
            return tensor.detach().double() / self._scale**degree if degree else tensor

        def divided_number(leaf: Any) -> Any:
            is_factor = op.base in _PRODUCTS and type(leaf) in (int, float)
            return leaf / self._scale ** self._degree_of(leaf) if is_factor else leaf

        try:
            scaled = run_in_float64(op, args, kwargs)[0]
            plain = run_in_float64(op, *map_tensors((args, kwargs), divided, divided_number))[0]
        except Exception:  # operators without float64 raise many kinds of errors
            return None, ""
        size, size_of_plain = float(scaled.norm()), float(plain.norm())
        if not math.isfinite(size + size_of_plain) or not (size or size_of_plain):
            return None, ""
        degree = round(2 * math.log(size / size_of_plain, self._scale)) / 2 if size and size_of_plain else 0.0
        difference = float((scaled - plain * self._scale**degree).norm())
        if difference <= (_NEGLIGIBLE if len(call.tensors) == 1 else 1e-6) * size:
            return degree, ""
        largest, largest_of_plain = float(scaled.abs().max()), float(plain.abs().max())
        text = f"the result of {call.op.base} is up to {largest:.4g} with the loss scale {self._scale:g}"
        return None, f"{text}, up to {largest_of_plain:.4g} without"

    def _degree_of(self, number: float) -> float:
        """Return the power of the loss scale that a factor of the code is."""
        if not number or not math.isfinite(number):
            return 0.0
        degree = math.log(abs(number), self._scale)
        if not self._scale_is_read or abs(degree) <= 0.25:
            return round(degree) if abs(abs(degree) - 1) < 1e-6 else 0.0
        return math.copysign(1.0, degree) if 0.65 <= abs(degree) <= 1.35 else _UNKNOWN

    def _note_read(self, call: Call, known: _Scaled | None) -> None:
        """Note that the program reads a scaled number, except to check that it is finite."""
        if known is None or not known.degree or math.isnan(known.degree) or call.phase != "forward":
            return
        if call.site not in self._reads and not re.search(_IS_FINITE, linecache.getline(*call.caller.line())):
            why = f"{float(call.tensors[0].detach()):.4g} carries the loss scale {self._scale:g}"
            self._reads[call.site] = self.run.place(call), why, self.run.step

    def ended(self) -> None:
        what = "the program reads a number that carries the loss scale"
        grade: Grade = "note" if self._scale_is_read else "error"  # it may divide by the scale afterwards
        for place, why, step in self._reads.values():
            self.found(place, grade, Cause("scaled", why), what, _FIX, step=step)
