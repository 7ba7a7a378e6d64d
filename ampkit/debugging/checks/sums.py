"""Sums, counts and averages that stop growing, or decaying: rounding removes the numbers that are added to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit.debugging.checks.check import Add, Check
from ampkit.debugging.finding import Cause, Grade
from ampkit.debugging.observe.call import Call, Phase
from ampkit.debugging.observe.observer import Observer
from ampkit.debugging.observe.operator_properties import OperatorProperties, converted_arguments, item_of, tensors_in
from ampkit.debugging.observe.rerun import float64_results
from ampkit.debugging.observe.storage_map import StorageMap
from ampkit.dtypes import SIXTEEN_BIT

_OPERATORS = frozenset(
    f"{foreach}{name}"
    for foreach in ("", "_foreach_")
    for name in ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv")
) | {"index_add", "scatter_add", "copy", "_to_copy", "clone"}
_MOVES = ("copy", "_to_copy", "clone")
# Operators that may add up in the dtype of their result.
_ACCUMULATES = frozenset({"index_add", "index_put", "_index_put_impl", "scatter_add", "scatter_reduce", "cumsum"}) | {
    "segment_reduce",
    "embedding_dense_backward",
    "_embedding_bag",
}
_LARGE_ERROR = 0.05  # of the result of such an operator, by 2-norm
_MAX_ELEMENTS = 4096  # the most elements of a sum that are tracked in float64
_MAX_FLOAT32 = 16  # of a sum in float32, which rounds only counters and totals away
_MIN_CALLS = 8  # additions before a finding
_MISSING = 0.1  # fraction of the added numbers that must be missing

Site = tuple[int, int]  # a line of code that calls an operator: the code object and the instruction
_View = tuple[int, torch.Size, tuple[int, ...]]  # how a tensor lies in its storage


@dataclass(slots=True)
class _Sum:
    """The call sites that computed a tensor from itself, and the tensor in float64."""

    sites: tuple[Site, ...]
    view: _View
    exact: Tensor | None = None  # some or all of its elements
    start: Tensor | None = None  # these elements before the first addition
    moved: float = 0.0  # 2-norm of the largest difference from the start, in float64
    calls: int = 0
    made: Call | None = None  # the call that made the tensor at first


class Sums(Check):
    """Tracks a tensor in float64 from the second call on that adds to it.

    A call site that reads the tensor that it wrote before adds to something. From then on a float64 copy of (some of)
    its elements is kept, to which the same numbers are added. Other views of the same storage are other sums.
    """

    name = "sums"

    def __init__(self, run: Observer, add: Add) -> None:
        super().__init__(run, add)
        self._sums: StorageMap[_Sum] = StorageMap()
        self._found: dict[Site, tuple[float, dict[str, Any]]] = {}  # the share of the added numbers that is missing
        self._accumulations: dict[Site, int] = {}  # calls of operators that accumulate

    def observes(self, op: OperatorProperties, phase: Phase) -> bool:
        return phase == "forward" or op.mutable or op.base in _ACCUMULATES

    def operator_ran(self, call: Call) -> None:
        outputs, base = call.outputs, call.op.base
        if base in _ACCUMULATES and outputs and outputs[0].dtype in SIXTEEN_BIT:
            self._check_accumulation(call, outputs[0])
        is_state = call.phase == "optimizer"
        is_sum = (call.phase == "forward" or is_state) and base in _OPERATORS and call.caller.code is not None
        if not is_sum or not outputs:
            is_made = not call.tensors or call.op.literal or call.op.shape_only
            for output in outputs:
                if is_made and call.phase in ("forward", "optimizer"):
                    self._sums.set(output, _Sum((), _view(output), made=call))
                elif call.op.mutable:
                    self._sums.discard(output)
            return
        if is_state and (outputs[0].dtype not in SIXTEEN_BIT or isinstance(outputs[0], Parameter)):
            for output in outputs:
                self._sums.discard(output)
            return  # `updates` checks parameters
        is_activation = torch.is_grad_enabled() and any(each.requires_grad for each in call.tensors)
        if is_activation and any(output.numel() > 1 for output in outputs):
            return  # a residual stream does not accumulate across steps
        args, kwargs = call.arguments()
        if base.startswith("_foreach_"):
            index = max(range(len(outputs)), key=lambda i: outputs[i].numel())
            (args, kwargs), outputs = item_of((args, kwargs), index, len(outputs)), [outputs[index]]
        output = outputs[0]
        operands = tensors_in((args, {key: value for key, value in kwargs.items() if key != "out"}))
        sources = {id(each): self._sum_of(each) for each in operands}
        if call.op.mutable and operands and "out" not in kwargs:
            sources[id(operands[0])] = self._sum_of(output)  # the operand that is written was copied
        site = call.site
        tracked = max((s for s in sources.values() if s is not None), key=lambda s: site in s.sites, default=None)
        if tracked is None or site not in tracked.sites:
            new = _Sum((site,), _view(output), made=call)
            if tracked is not None:
                new = replace(tracked, sites=(site, *tracked.sites[:3]), view=_view(output))
            if base not in _MOVES:
                new.exact = new.start = None
            elif base == "_to_copy" and new.exact is None:
                new.made = call
            self._sums.set(output, new)
            return
        self._sums.set(output, self._added(call, args, kwargs, output, tracked, sources))

    def _check_accumulation(self, call: Call, output: Tensor) -> None:
        """Compare the first call of a line, and then each that doubles their number, with float64."""
        forward = None if call.backward_number is None else self.run.forward_with(call.backward_number)
        site = call.site if forward is None else forward.site
        calls = self._accumulations[site] = self._accumulations.get(site, 0) + 1
        exact = float64_results(call) if calls & (calls - 1) == 0 else []
        error = float((output.double() - exact[0]).norm() / exact[0].norm()) if exact else 0.0
        if _LARGE_ERROR < error < math.inf:
            place = self.run.place(call, output)
            why = f"the result is {error:.0%} off the same sums in float64: {place.dtype} has too few digits"
            what = f"numbers are added up in {place.dtype} inside of one operator"
            fix = "call it with float32 tensors, and cast the result"
            self.found(place, "precision loss", Cause("stagnating sum", why), what, fix)

    def _sum_of(self, tensor: Tensor) -> _Sum | None:
        known = self._sums.get(tensor)
        return known if known is not None and known.view == _view(tensor) else None

    def _added(
        self, call: Call, args: Any, kwargs: Any, output: Tensor, tracked: _Sum, sources: dict[int, _Sum | None]
    ) -> _Sum:
        """Return the sum after a call that adds to it."""
        site = call.site
        result = _Sum((site, *[each for each in tracked.sites if each != site][:3]), _view(output), made=tracked.made)
        small = output.numel() <= _MAX_ELEMENTS
        if output.dtype not in SIXTEEN_BIT and output.numel() > _MAX_FLOAT32:
            return result
        stride = 1 if small else math.ceil(output.numel() / _MAX_ELEMENTS)

        def part(tensor: Tensor) -> Tensor:
            return tensor.detach() if small or tensor.numel() == 1 else tensor.detach().reshape(-1)[::stride]

        def widened(tensor: Tensor) -> Tensor:
            known = sources.get(id(tensor))
            if known is not None and known.exact is not None and known.exact.shape == part(tensor).shape:
                return known.exact
            return part(tensor).double() if tensor.is_floating_point() else part(tensor)

        operands = tensors_in((args, kwargs))
        if not small and any(each.shape != output.shape and each.numel() > 1 for each in operands):
            return result
        start = tracked.start
        if start is None:
            own = next((each for each in operands if sources.get(id(each)) is tracked), operands[0])
            start = part(own).double()
        with torch.no_grad():
            exact = _exact(call, args, kwargs, widened)
            value = part(output).double()
            if exact is None or not (exact.shape == value.shape == start.shape) or not bool(exact.isfinite().all()):
                return result
            result.exact, result.start, result.calls = exact, start, tracked.calls + 1
            result.moved = max(tracked.moved, float((exact - start).norm()))
            drift, size = float((value - exact).norm()), float(exact.norm())
        unit = torch.finfo(output.dtype).eps * max(size, float(value.norm()))
        if result.calls >= _MIN_CALLS and drift > max(_MISSING * result.moved, 2 * unit):
            self._note(call, output, result, value, drift)
        return result

    def _note(self, call: Call, output: Tensor, now: _Sum, value: Tensor, drift: float) -> None:
        share, known = drift / now.moved if now.moved else 0.0, self._found.get(call.site)
        if known is not None and known[0] > share and known[1]["times"] > now.calls:
            return
        assert now.exact is not None
        place, made = self.run.place(call, output), None if now.made is None else self.run.place(now.made)
        text = f"{min(share, 1.0):.0%} of the numbers that were added is missing"
        if output.numel() == 1:
            text = f"it is {float(value):.6g}, and {float(now.exact):.6g} with the same numbers in float64"
        text += f", after {now.calls} calls: {place.dtype} has too few digits"
        text += "" if made is None else f"; it is made at {made.file}:{made.line}"
        # Few trainings depend on the moments of an optimizer.
        grade: Grade = "note" if call.phase == "optimizer" else "precision loss"
        values = {"at": place, "grade": grade, "cause": Cause("stagnating sum", text), "producer": made}
        values["what"] = f"a sum in {place.dtype} does not take up the numbers that are added"
        values["fix"] = "keep it in float32 from where it is made (in float64 beyond 16,777,216)"
        values["step"] = self.run.step if known is None else known[1]["step"]
        self._found[call.site] = share, {**values, "last": self.run.step, "times": now.calls}

    def ended(self) -> None:
        found = sorted((values for _, values in self._found.values()), key=lambda each: each["times"])
        for values in {each["at"].site: each for each in found}.values():
            self.found(**values)


def _exact(call: Call, args: Any, kwargs: Any, widened: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return the result of a call in float64; None if it has no float64."""

    def wide_dtype(dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype.is_floating_point else dtype

    wide_args, wide_kwargs = converted_arguments(
        call.op, args, kwargs, lambda tensor: widened(tensor).clone(), wide_dtype
    )
    try:
        result = call.op.func(*wide_args, **wide_kwargs)
    except Exception:  # operators without float64 raise many kinds of errors
        return None
    if call.op.mutable and "out" not in wide_kwargs:
        return tensors_in(wide_args)[0]
    return tensors_in(result)[0]


def _view(tensor: Tensor) -> _View:
    return int(tensor.storage_offset()), tensor.size(), tensor.stride()
