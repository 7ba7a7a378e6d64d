"""Numbers that carry the loss scale and are used without removing it: in a penalty, a threshold, noise or a log.

The degree of a tensor is the power of the loss scale in it: 1 for a scaled loss and its gradients, 2 for their squares.
An operator on such tensors runs again in float64, as it was and as if the loss scale were 1. If the results differ by a
power of the scale, this power is the degree of the result. Otherwise the operator mixes scaled numbers with others.
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Iterator, Sequence
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
from ampkit.debugging.observe.rerun import run_in_float64
from ampkit.debugging.observe.storage_map import StorageMap
from ampkit.debugging.torch_private import is_opaque
from ampkit.gradients.collect import parameters as parameters_of

_FIX = "divide by scaler.get_scale() before this line; for gradients in .grad: scaler.unscale_(optimizer)"
_SMALLEST_SCALE = 256.0  # smaller scales cannot be distinguished from other numbers of the code
_CHECKED_CALLS = 3  # calls of a line that run again; then one of 64
_NEGLIGIBLE = 1e-2  # share of a result that a constant, such as an eps, may add
_UNKNOWN = math.nan  # a degree
_MIXED = math.inf  # a degree: scaled numbers and others
_IS_FINITE = "isfinite|isnan|isinf"  # a line that reads a number for this may read a scaled one
_LEAF = 2**63  # from here on, sequence numbers of nodes belong to parameters
_ZERO = -math.inf  # a degree: the result is 0 with any
_COMPARISONS = frozenset({"gt", "ge", "lt", "le"})
_PRODUCTS = frozenset({"mul", "div", "_foreach_mul", "_foreach_div"})


class _Scaled(NamedTuple):
    """A storage with the loss scale in its numbers."""

    degree: float
    made: Call  # the call since which its degree is not 1


class ScaledNumbers(Check):
    """Follows the loss scale from `scaler.scale` to calls that mix scaled numbers with others, or read them."""

    name = "scaled numbers"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._scaled: StorageMap[_Scaled] = StorageMap()
        self._known: dict[Any, tuple[int, list[float]]] = {}  # calls that ran again, and the degrees of the results
        self._reads: dict[tuple[int, int], tuple[Place, str, int]] = {}
        self._scale = 0.0  # 0: nothing is scaled
        self._scale_is_read = False  # by the program, which may divide by it
        self._is_mixed = False  # a finding explains gradients that are
        self._clips = False  # `loop_order` reports gradients that are clipped while they are scaled

    def clip(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        self._clips = True
        try:
            yield
        finally:
            self._clips = False

    read_norm = clip

    def unscale(self, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Iterator[None]:
        gradients = [p.grad for p in parameters_of(optimizer)]
        for gradient in gradients if scaler.is_enabled() else ():
            known = None if gradient is None or is_opaque(gradient) else self._scaled.get(gradient)
            if known is not None and (known.degree == 0 or (known.degree == _MIXED and not self._is_mixed)):
                what = "gradients are divided by the loss scale before the scaler divides them"
                if known.degree:
                    what = "gradients of a scaled loss are added to gradients of a loss that is not scaled"
                why = "the scaler divides all of them by the loss scale"
                self.found(known.made, "error", Cause("scaled", why), what, _FIX)
                break
        yield

    scaler_step = unscale

    def backward_starts(self, roots: Sequence[Tensor], scaled: bool) -> None:
        for root in roots:
            known = None if is_opaque(root) else self._scaled.get(root)
            if known is not None and math.isfinite(known.degree) and known.degree not in (0, 1):
                what = f"the loss is multiplied by the loss scale to the power of {known.degree:g}"
                why = "gradients in it were not divided by the loss scale"
                self.found(known.made, "error", Cause("scaled", why), what, _FIX)

    def observes(self, op: OperatorProperties, phase: Phase) -> bool:
        return phase != "optimizer"

    def operator_ran(self, call: Call) -> None:
        if call.phase == "scaler":
            self._note_scaler(call)
        elif self._scale and call.phase != "optimizer":
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
        op = call.op
        if op.base == "_local_scalar_dense":
            self._note_read(call, known[0])
            return
        outputs = [each for each in op.outputs(call.result, call.args, call.kwargs) if not is_opaque(each)]
        outputs = [each for each in outputs if each.is_floating_point() or each.is_complex()]
        if op.overwrites:
            known = [None, *known[1:]]
            if not any(known) and outputs and outputs[0].nbytes < outputs[0].untyped_storage().nbytes():
                return  # the rest of the storage keeps its numbers
        inputs = [each.degree if each else 0.0 for each in known]
        is_new = op.shape_only or op.uninitialized
        degrees = [0.0] * len(outputs)
        if any(inputs) and not is_new and (outputs or op.base in _COMPARISONS):
            degrees = self._degrees(call, inputs)
        by_user = _is_by_user(call)
        # A gradient that has lost the scale: in place, in a hook, or from such a gradient.
        lost = (op.mutable and op.base in _PRODUCTS) or (call.phase == "backward" and (by_user or not any(inputs)))
        origin = next((each.made for each in known if each and each.degree != 1), call)
        for output, degree in zip(outputs, degrees, strict=False):
            if degree == 0 and (is_new or not lost or not any(known)):
                self._scaled.discard(output)
            else:
                is_sum = degree == _MIXED and (call.backward_number or 0) >= _LEAF  # the gradient of a parameter
                self._scaled.set(output, _Scaled(degree if is_sum or degree != _MIXED else _UNKNOWN, origin))

    def _degrees(self, call: Call, inputs: list[float]) -> list[float]:
        """Return the degrees of the results, and add a finding if one of them is mixed."""
        op, args = call.op, (call.args, call.kwargs)
        tensors = {id(tensor): degree for tensor, degree in zip(call.tensors, inputs, strict=True)}
        count = max(1, len(op.outputs(call.result, *args)))
        not_again = op.random or op.communicates or op.opaque_state
        if self._clips or not_again or not all(map(math.isfinite, inputs)):
            return [_MIXED if _MIXED in inputs else _UNKNOWN] * count
        by_user = _is_by_user(call)
        numbers = tuple(map(self._degree_of, call.scalars)) if op.base in _PRODUCTS else call.scalars
        key = (call.site if by_user else None, op.name, tuple(inputs), numbers)
        times, degrees = self._known.get(key, (0, []))
        again = by_user or (op.base == "add" and 0.0 in inputs)
        if times < (_CHECKED_CALLS if again else 1) or (again and times % 64 == 0):
            before = degrees or [0.0 if by_user else max(inputs)] * count
            degrees, evidence = self._computed(call, tensors)
            degrees = [old if new == _ZERO else new for old, new in zip(before, degrees, strict=False)]
            if _MIXED in degrees and by_user:
                self._is_mixed = True
                what = "numbers that carry the loss scale are combined with numbers that do not"
                self.found(call, "error", Cause("scaled", evidence), what, _FIX)
        self._known[key] = times + 1, degrees
        return degrees

    def _computed(self, call: Call, tensors: dict[int, float]) -> tuple[list[float], str]:
        """Return the degrees of the results by running a call twice, and in words how the results differ."""
        func, op, (args, kwargs) = call.op.func, call.op, call.arguments()
        tensors |= {id(call.before[key]): degree for key, degree in tensors.items() if key in call.before}
        assert func is not None
        if op.base in _COMPARISONS:  # the difference of two numbers has a degree
            func = getattr(torch.ops.aten.sub, func._overloadname)
            op = properties_of(func)

        def divided(tensor: Tensor) -> Tensor:
            degree = tensors.get(id(tensor), 0.0)
            if not degree and op.base in _PRODUCTS and tensor.numel() == 1 and not tensor.requires_grad:
                degree = self._degree_of(float(tensor.detach()))
            return tensor.detach().double() / self._scale**degree if degree else tensor

        def divided_number(leaf: Any) -> Any:
            is_factor = op.base in _PRODUCTS and type(leaf) in (int, float)
            return leaf / self._scale ** self._degree_of(leaf) if is_factor else leaf

        try:
            scaled = run_in_float64(op, args, kwargs)
            args, kwargs = map_tensors((args, kwargs), divided, divided_number)
            plain = run_in_float64(op, args, kwargs)
        except Exception:  # operators without float64 raise many kinds of errors
            return [_UNKNOWN] * len(op.outputs(call.result, call.args, call.kwargs)), ""
        negligible = _NEGLIGIBLE if len(call.tensors) == 1 else 1e-6
        pairs = list(zip(scaled, plain, strict=True))
        degrees = [self._degree_between(a, b, negligible) for a, b in pairs]
        a, b = next((pair for pair, degree in zip(pairs, degrees, strict=True) if degree == _MIXED), (None, None))
        if a is None or b is None:
            return degrees, ""
        with_scale, without = (f"up to {float(each.abs().max()):.4g}" for each in (a, b))
        return (
            degrees,
            f"the result of {op.base} is {with_scale} with the loss scale {self._scale:g}, {without} without",
        )

    def _degree_between(self, scaled: Tensor, plain: Tensor, negligible: float) -> float:
        """Return the power of the loss scale by which two results differ."""
        size, size_of_plain = float(scaled.norm()), float(plain.norm())
        if not math.isfinite(size + size_of_plain):
            return _UNKNOWN
        if not size or not size_of_plain:
            return _MIXED if size or size_of_plain else _ZERO
        degree = round(2 * math.log(size / size_of_plain, self._scale)) / 2
        difference = float((scaled - plain * self._scale**degree).norm())
        return degree if difference <= negligible * size else _MIXED

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
        if known is None or not math.isfinite(known.degree or math.inf) or call.phase != "forward" or self._clips:
            return
        if call.site not in self._reads and not re.search(_IS_FINITE, linecache.getline(*call.caller.line())):
            degree = f"the loss scale {self._scale:g}" + (f" to the power of {known.degree:g}" * (known.degree != 1))
            why = f"{float(call.tensors[0].detach()):.4g} is multiplied by {degree}"
            self._reads[call.site] = self.run.place(call), why, self.run.step

    def ended(self) -> None:
        what = "the program reads a number that carries the loss scale"
        grade: Grade = "note" if self._scale_is_read else "error"  # it may divide by the scale afterwards
        for place, why, step in self._reads.values():
            self.found(place, grade, Cause("scaled", why), what, _FIX, step=step)


def _is_by_user(call: Call) -> bool:
    """Return whether the program calls an operator itself: in forward, between steps, or in a hook of backward."""
    return call.phase == "forward" or (
        call.phase == "backward" and call.caller.code is not None and not call.caller.outside
    )
