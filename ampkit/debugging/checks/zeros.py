"""Results, and casts in hooks, that rounding turns into 0 or that are too small for all digits of their dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampkit.debugging.checks.check import Add, Check
from ampkit.debugging.finding import Cause, Place
from ampkit.debugging.observe.call import Call, Phase
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_properties import OperatorProperties
from ampkit.debugging.observe.rerun import float64_results
from ampkit.dtypes import SIXTEEN_BIT, dtype_name

# Operators whose exact results are seldom 0 if their operands are not.
_MAKE_SMALL = frozenset({"mul", "div", "exp", "pow", "_to_copy", "square", "prod", "mm", "bmm", "addmm"})
_MIN_CASTS = 8  # casts in hooks before a finding: a single one may be nothing but rounding itself
_LARGE_ERROR = 0.1  # of a 2-norm


class Zeros(Check):
    """Compares results with zeros or subnormal numbers with the same operator in float64."""

    name = "zeros"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._hook_errors: dict[tuple[int, int], list[float]] = {}  # of the user's casts in backward, by 2-norm
        self._hook_places: dict[tuple[int, int], Place] = {}

    def observes(self, op: OperatorProperties, phase: Phase) -> bool:
        return op.base in _MAKE_SMALL if phase == "forward" else phase == "backward" and op.base == "_to_copy"

    def operator_ran(self, call: Call) -> None:
        if not call.outputs or not call.ranges:
            return
        if call.phase == "forward" and call.outputs[0].dtype in SIXTEEN_BIT:
            self._check(call)
        elif call.phase == "backward" and not call.caller.outside:
            self._note_hook(call, call.args[0], call.outputs[0])

    def _check(self, call: Call) -> None:
        output, (low, high) = call.outputs[0], call.ranges[0]
        smallest, largest = torch.finfo(output.dtype).tiny, max(-low, high)
        is_subnormal = 0 < largest < smallest
        if not is_subnormal and (not low <= 0 <= high or (output.dtype is torch.bfloat16 and low != high)):
            return
        if not self.is_chosen(call.site):
            return
        zeros = output == 0
        if not is_subnormal and not bool(zeros.any()):
            return
        exact = next(iter(float64_results(call)), None)
        if exact is None:
            return
        name = dtype_name(output.dtype)
        nonzero, flushed = int((exact != 0).sum()), int((zeros & (exact != 0)).sum())
        if is_subnormal:
            error = float((output.double() - exact).norm() / exact.norm())
            is_loss = error > _LARGE_ERROR or (output.dtype is torch.bfloat16 and output.numel() > 1)
            what, fix = f"a result is too small for {name}", "compute this line in float32, or scale by less"
            why = (
                f"it underflows: its largest magnitude is {largest:.3g}, below {smallest:.3g} {name} loses digits, and "
            )
            why += f"the result is {error:.0%} off"
        elif nonzero >= 2 and flushed >= 0.5 * nonzero:
            is_loss, fix = flushed == nonzero, "compute this line in float32"
            what = f"{'all' if is_loss else 'most'} of a result becomes 0 in {name}"
            why = f"underflow: {flushed} of {nonzero} elements are below the smallest number of {name}; the largest is "
            why += f"{float(exact.abs().max()):.3g}"
        else:
            return
        self.found(call, "precision loss" if is_loss else "note", Cause("underflow", why), what, fix)

    def _note_hook(self, call: Call, source: Tensor, output: Tensor) -> None:
        """Note the error of a cast in a hook, or in a custom function's backward."""
        if output.dtype not in SIXTEEN_BIT or source.dtype in SIXTEEN_BIT or call.caller.code is None:
            return
        errors = self._hook_errors.setdefault(call.site, [])
        exact = source.detach().double()
        size = float(exact.norm())
        if size and math.isfinite(size):
            error = float((output.detach().double() - exact).norm()) / size
            errors.append(error)
            if error >= max(errors):
                self._hook_places[call.site] = self.run.place(call, output)

    def ended(self) -> None:
        for site, errors in self._hook_errors.items():
            large = [error for error in errors if _LARGE_ERROR < error <= 1]
            if len(large) >= _MIN_CASTS and 3 * len(large) > len(errors):
                place = self._hook_places[site]
                why = f"they underflow: they are below the smallest numbers of {place.dtype}"
                cause = Cause("underflow", f"{why}, in {len(large)} of {len(errors)} casts")
                what = f"gradients lose up to {max(large):.0%} by a cast to {place.dtype} in a hook"
                fix = "remove the cast: keep gradients in float32 in the hook"
                self.found(place, "precision loss", cause, what, fix, step=0, last=self.run.step - 1)
