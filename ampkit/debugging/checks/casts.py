"""Values that a dtype cannot hold: integers that wrap around, values that become equal."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampkit.debugging.checks.check import Add, Check
from ampkit.debugging.finding import Cause, Grade
from ampkit.debugging.observe.call import Call, Phase
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_properties import OperatorProperties
from ampkit.debugging.observe.rerun import float64_results
from ampkit.debugging.observe.storage_map import StorageMap
from ampkit.debugging.observe.tensor_values import extremes, largest_finite
from ampkit.debugging.torch_private import is_opaque
from ampkit.dtypes import SIXTEEN_BIT, dtype_name

_MAX_ELEMENTS = 4096  # the most elements whose values are compared
_MANY = 32  # values that are expected to differ
_CASTS = frozenset({"_to_copy", "copy"})
_RANGES = frozenset({"arange", "cumsum"})
_ARITHMETIC = frozenset({"add", "sub", "mul", "neg", "rsub"})


class Casts(Check):
    """Compares values before and after casts, ranges, and arithmetic on small integers."""

    name = "casts"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._coarse: StorageMap[bool] = StorageMap()  # results that lie on few numbers

    def observes(self, op: OperatorProperties, phase: Phase) -> bool:
        return phase == "forward"

    def operator_ran(self, call: Call) -> None:
        base, output = call.op.base, call.result
        if not isinstance(output, Tensor) or is_opaque(output) or not output.numel():
            return
        if call.ranges:
            self._check_spacing(call, output)
        is_real = output.dtype.is_floating_point or output.is_complex()
        is_integer = not is_real and output.dtype not in (torch.bool, torch.int64)
        if base in _CASTS or base in _RANGES or (base in _ARITHMETIC and is_integer and output.itemsize <= 2):
            if not self.is_chosen(call.site):
                return
            source = next((each for each in call.tensors[::-1] if each is not output), None) if base in _CASTS else None
            if base == "cumsum":
                source = next(iter(float64_results(call)), None)
            if source is not None and source.dtype in SIXTEEN_BIT and not is_real:
                self._check_ids(call, source)
            if is_integer:
                self._check_range(call, output, source)
            elif output.is_floating_point() and output.dtype is not torch.float64:
                self._check_distinct(call, output, source)

    def _check_range(self, call: Call, output: Tensor, source: Tensor | None) -> None:
        """Check that integers did not wrap around."""
        if source is None:
            args, kwargs = call.arguments()
            widened = [each.long() if isinstance(each, Tensor) else each for each in args]
            values: Tensor = getattr(torch.ops.aten, call.op.base)(*widened, **kwargs)
        elif source.is_complex() or (source.itemsize <= output.itemsize and not source.is_floating_point()):
            return
        else:
            values = source.detach() if source.is_floating_point() else source.long()
        low, high = (float(each) for each in torch.aminmax(values))
        name, limits = dtype_name(output.dtype), torch.iinfo(output.dtype)
        if (limits.min - 1 < low and high < limits.max + 1) or not math.isfinite(high - low):
            return
        worst, index = (low, values.argmin()) if low <= limits.min - 1 else (high, values.argmax())
        result = int(output.reshape(-1)[index])
        why = f"{worst:.10g} becomes {result}: {name} has the integers from {limits.min} to {limits.max}"
        cause = Cause("rounded", why)
        self.found(call, "precision loss", cause, f"integers wrap around in {name}", "use a wider dtype, such as int64")

    def _check_ids(self, call: Call, source: Tensor) -> None:
        """Check that a table had no ids in a 16-bit dtype: many integers that are larger than its last odd one."""
        name, first = dtype_name(source.dtype), 2.0 / torch.finfo(source.dtype).eps
        values = source.detach()
        large = values[values.abs() > first]
        if large.numel() < _MANY or not bool((values == values.round()).all()):
            return
        why = f"{large.numel()} of {values.numel()} are larger than {first:g}; beyond it {name} has no odd integers"
        fix = "keep integers, such as ids, in int64 or float64 before this line, in NumPy and pandas as well"
        self.found(call, "note", Cause("rounded", why), f"integers are stored in {name}", fix)

    def _check_distinct(self, call: Call, output: Tensor, source: Tensor | None) -> None:
        """Check that values which differ are not equal in a lower precision, unless they are activations."""
        (low, high), name = call.ranges[0], dtype_name(output.dtype)
        first = 2.0 / torch.finfo(output.dtype).eps  # up to here, each integer has a number
        largest = max(-low, high) if math.isfinite(high - low) else largest_finite(output)
        has_offset = high - low < largest / 16
        if source is not None and source.requires_grad:
            return
        if largest < first and (source is None or source.itemsize <= output.itemsize or not has_offset):
            return
        values, distinct, kind = output.detach().reshape(-1), output.numel(), "integers"
        if source is not None:
            given, values = source.detach().reshape(-1)[:_MAX_ELEMENTS], values[:_MAX_ELEMENTS]
            distinct = given.unique().numel()
            if source.is_floating_point() and not bool((given == given.round()).all()):
                is_data = call.module is None or any(ref() is source for ref in self.run.modules.inputs)
                if not has_offset or not (source.dtype is torch.float64 or (is_data and torch.is_grad_enabled())):
                    return
                kind = "values"
        remaining = values.unique().numel()
        if remaining >= distinct or (kind == "values" and 2 * remaining > distinct):
            return
        why, fix = (
            f"{name} holds each integer up to {first:g} only",
            "make it in float32, and keep in float32 the numbers ",
        )
        fix += "that are computed from it"
        if kind == "values":
            why = f"near {largest:.6g} the numbers of {name} are {largest * 2 / first:.2g} apart"
            fix = "compute them in float32, or subtract their offset in a wider dtype first"
        what = f"{distinct - remaining} of {distinct} {kind} become equal to others in {name}"
        grade: Grade = "precision loss" if source is None or 2 * remaining <= distinct else "note"
        self.found(call, grade, Cause("rounded", why), what, fix)

    def _check_spacing(self, call: Call, output: Tensor) -> None:
        """Check that 16-bit results, and data that is subtracted, do not lie on a few numbers far from 0."""
        low, high = call.ranges[0]
        coarse: list[tuple[Grade, Tensor, float, float]] = []
        if output.dtype in SIXTEEN_BIT:
            coarse = [("note", output, low, high)]  # the same training in float32 shows whether it matters
        if call.op.base == "sub":
            for each in call.tensors:
                if each.is_floating_point() and each.numel() > 1 and not each.requires_grad:
                    coarse.append(("precision loss", each, *extremes(each)))
        known = any(self._coarse.get(each) for each in call.tensors)
        for grade, tensor, low, high in coarse:
            if not _is_coarse(tensor, low, high):
                continue
            self._coarse.set(tensor, True)
            if not known:
                eps, name = torch.finfo(tensor.dtype).eps, dtype_name(tensor.dtype)
                apart = eps * 2.0 ** math.floor(math.log2(max(-low, high)))
                why = f"they are from {low:.10g} to {high:.10g}, where {name} has a number each {apart:.3g}"
                what = f"values lie on at most {(high - low) / apart + 1:.0f} numbers of {name}"
                fix = "compute them in float32, or subtract their offset in a wider dtype first"
                self.found(call, grade, Cause("rounded", why), what, fix)


def _is_coarse(tensor: Tensor, low: float, high: float) -> bool:
    """Return whether values differ by a few spacings of their dtype, and are larger than the integers that it holds."""
    eps, largest = torch.finfo(tensor.dtype).eps, max(-low, high)
    return tensor.numel() >= _MANY and 2 / eps <= largest < math.inf and 0 < high - low <= 8 * eps * largest
