"""Integers that become equal in 16 bits: positions and counts of a range, or of a cast."""

from __future__ import annotations

import torch

from ampkit.debugging.checks.check import Add, Check
from ampkit.debugging.finding import Cause, Finding, Fix
from ampkit.debugging.observe.call import Call
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.tensor_values import largest_finite
from ampkit.dtypes import SIXTEEN_BIT, dtype_name

_MAX_ELEMENTS = 4096  # the most elements that are compared


class Integers(Check):
    """Counts the distinct values of ranges in 16 bits, and of integers before and after a cast."""

    name = "integers"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._found: set[tuple[int, int]] = set()

    def operator_ran(self, call: Call) -> None:
        is_range = call.op.base == "arange"
        if call.phase != "forward" or not call.outputs or not (is_range or call.op.base == "_to_copy"):
            return
        output = call.outputs[0]
        if output.dtype not in SIXTEEN_BIT or output.numel() < 2 or call.site in self._found:
            return
        first = 2.0 / torch.finfo(output.dtype).eps  # up to here, each integer has a number
        if largest_finite(output) < first:
            return
        values, distinct = output.detach().reshape(-1), output.numel()
        if not is_range:
            source = call.tensors[0].detach().reshape(-1)[:_MAX_ELEMENTS]
            if call.tensors[0].requires_grad or (
                source.is_floating_point() and not bool((source == source.round()).all())
            ):
                return
            values, distinct = values[:_MAX_ELEMENTS], source.unique().numel()
        remaining = values.unique().numel()
        if remaining >= distinct:
            return
        self._found.add(call.site)
        name = dtype_name(output.dtype)
        self.add(
            Finding(
                grade="precision loss" if is_range or 2 * remaining <= distinct else "note",
                check=self.name,
                cause=Cause("rounded", f"{name} holds each integer up to {first:g} only"),
                what=f"{distinct - remaining} of {distinct} integers become equal to others in {name}",
                place=self.run.place(call),
                fix=Fix("make it in float32, and keep in float32 the numbers that are computed from it"),
                step=self.run.step,
            )
        )
