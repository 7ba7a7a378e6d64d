"""Looks at every step of `examine` that cost one pass over few tensors: sums, casts, gradients, integers in 16 bits."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampkit.debugging.call_sites import Caller, find_caller
from ampkit.debugging.causes import largest_finite, run_in_float64
from ampkit.debugging.operator_calls import OperatorCall, Ran
from ampkit.debugging.operator_facts import converted_arguments, item_of, tensors_in
from ampkit.debugging.report import Operation, Problem, Suggestion
from ampkit.debugging.storage_map import StorageMap
from ampkit.dtypes import SIXTEEN_BIT, dtype_name
from ampkit.torch_internals.operator_tracing import is_opaque, storage_key

_SUMS = frozenset(
    f"{foreach}{name}"
    for foreach in ("", "_foreach_")
    for name in ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv")
) | {"index_add", "scatter_add", "copy", "_to_copy", "clone"}
_MAX_SHADOW = 4096  # the most elements of a sum that are followed in float64
_MAX_FLOAT32 = 16  # of a sum in float32, which rounds only counters and totals away
_MIN_CALLS = 8  # so many additions before a sum is judged
_LOST_SHARE = 0.1  # so much of what was added must be missing
_MAX_ELEMENTS = 1 << 16  # the most elements of a parameter that are checked
_MIN_STEPS = 3  # so many steps before a gradient or an update is judged


Site = tuple[int, int]  # a line of code that calls an operator: the code object and the instruction


@dataclass(slots=True)
class _Sum:
    """The call sites that computed a tensor from itself, and the tensor in float64."""

    sites: tuple[Site, ...]
    exact: Tensor | None = None  # some or all of its elements
    start: Tensor | None = None  # these elements before the first addition
    moved: float = 0.0  # 2-norm of the largest difference from the start, in float64
    calls: int = 0
    made: OperatorCall | None = None  # the call that made the tensor at first


class _Drift(NamedTuple):
    """How far a sum is from its value in float64."""

    operation: Operation
    made: Operation | None
    first: int
    last: int
    calls: int
    share: float
    text: str


class Sums:
    """Finds sums, counts and averages that rounding keeps from moving.

    A call site that reads what it wrote before adds to something. From then on a float64 copy of (some of) its elements
    is kept beside it, to which the same numbers are added.
    """

    def __init__(self, observer: Any) -> None:
        self._observer = observer
        self._sums: StorageMap[_Sum] = StorageMap()
        self._found: dict[Site, _Drift] = {}

    def operator_ran(self, ran: Ran) -> None:
        """Look at an operator."""
        call, outputs = ran.call, ran.outputs
        base = call.facts.base
        if call.phase != "forward" or base not in _SUMS or call.caller.code is None or not outputs:
            for output in outputs:
                if call.phase == "forward" and (not call.tensors or call.facts.literal or call.facts.shape_only):
                    self._sums.set(output, _Sum((), made=call))
                elif call.facts.mutable:
                    self._sums.discard(output)
            return
        args, kwargs = ran.arguments()
        if base.startswith("_foreach_"):
            index = max(range(len(outputs)), key=lambda i: outputs[i].numel())
            (args, kwargs), outputs = item_of((args, kwargs), index, len(outputs)), [outputs[index]]
        output = outputs[0]
        operands = tensors_in((args, kwargs))
        if output.numel() > 1 and torch.is_grad_enabled() and any(each.requires_grad for each in operands):
            return  # activations: a residual stream is no sum over steps
        site = (id(call.caller.code), call.caller.instruction)
        sources = {id(each): self._sums.get(each) for each in operands}
        if call.facts.mutable:  # the operand that is written was copied, and has the sum of the output
            sources[id(operands[0])] = self._sums.get(output)
        followed = max((s for s in sources.values() if s is not None), key=lambda s: site in s.sites, default=None)
        if followed is None or site not in followed.sites:
            new = _Sum((site,), made=call) if followed is None else replace(followed, sites=(site, *followed.sites[:3]))
            if base not in ("copy", "_to_copy", "clone"):
                new.exact = new.start = None
            elif base == "_to_copy" and new.exact is None:
                new.made = call
            self._sums.set(output, new)
            return
        item = ran._replace(args=args, kwargs=kwargs, outputs=outputs)
        self._sums.set(output, self._follow(item, site, followed, sources))

    def _follow(self, ran: Ran, site: Site, followed: _Sum, sources: dict[int, _Sum | None]) -> _Sum:
        """The sum after a call that adds to it."""
        call, func, args, kwargs, _, (output,), _ = ran
        result = _Sum((site, *[each for each in followed.sites if each != site][:3]), made=followed.made)
        small = output.numel() <= _MAX_SHADOW
        if output.dtype not in SIXTEEN_BIT and output.numel() > _MAX_FLOAT32:
            return result
        stride = 1 if small else math.ceil(output.numel() / _MAX_SHADOW)
        shape = output.shape

        def part(tensor: Tensor) -> Tensor:
            return tensor.detach() if small or tensor.numel() == 1 else tensor.detach().reshape(-1)[::stride]

        def widened(tensor: Tensor) -> Tensor:
            known = sources.get(id(tensor))
            if known is not None and known.exact is not None and known.exact.shape == part(tensor).shape:
                return known.exact
            return part(tensor).double() if tensor.is_floating_point() else part(tensor)

        operands = tensors_in((args, kwargs))
        if not small and any(each.shape != shape and each.numel() > 1 for each in operands):
            return result
        start = followed.start
        if start is None:
            own = next((each for each in operands if sources.get(id(each)) is followed), operands[0])
            start = part(own).double()
        wide = converted_arguments(
            func, args, kwargs, lambda t: widened(t).clone(), lambda d: torch.float64 if d.is_floating_point else d
        )
        with torch.no_grad():
            try:
                func(*wide[0], **wide[1]) if call.facts.mutable else None
                exact = tensors_in(wide[0])[0] if call.facts.mutable else tensors_in(func(*wide[0], **wide[1]))[0]
            except Exception:  # operators without float64 raise many kinds of errors
                return result
            value = part(output).double()
            if exact.shape != value.shape or start.shape != exact.shape or not bool(torch.isfinite(exact).all()):
                return result
            result.exact, result.start, result.calls = exact, start, followed.calls + 1
            result.moved = max(followed.moved, float((exact - start).norm()))
            drift, size = float((value - exact).norm()), float(exact.norm())
        unit = torch.finfo(output.dtype).eps * max(size, float(value.norm()))
        if result.calls >= _MIN_CALLS and drift > max(_LOST_SHARE * result.moved, 2 * unit):
            self._note(call, output, site, result, value, drift)
        return result

    def _note(self, call: OperatorCall, output: Tensor, site: Site, now: _Sum, value: Tensor, drift: float) -> None:
        known = self._found.get(site)
        share = drift / now.moved if now.moved else 0.0
        if known is not None and known.share > share and known.calls > now.calls:
            return
        assert now.exact is not None
        if output.numel() == 1:
            text = f"it is {float(value):.6g}, and {float(now.exact):.6g} with the same numbers in float64"
        else:
            text = f"{min(share, 1.0):.0%} of what was added is missing"
        operation = self._observer._operation(call, dtype=dtype_name(output.dtype), shape=tuple(output.shape))
        first = self._observer.step if known is None else known.first
        made = None if now.made is None else self._observer._operation(now.made)
        self._found[site] = _Drift(operation, made, first, self._observer.step, now.calls, share, text)

    def problems(self) -> list[Problem]:
        """The sums that lost what was added; one for each line."""
        problems: dict[tuple[str, int], Problem] = {}
        for drift in self._found.values():
            operation, dtype = drift.operation, drift.operation.dtype
            made = f"; it is made at {drift.made.file}:{drift.made.line}" if drift.made is not None else ""
            problem = Problem.at(
                operation,
                grade="lost",
                look="absorbed",
                kind="absorbed",
                what=f"a sum in {dtype} does not take up what is added",
                why=f"{drift.text}, after {drift.calls} calls: {dtype} has too few digits{made}",
                made=drift.made,
                suggestion=Suggestion(
                    "keep it in float32 from where it is made (in float64 beyond 16,777,216)", "advice"
                ),
                step=drift.first,
                last=drift.last,
                times=drift.calls,
            )
            known = problems.get((operation.file, operation.line))
            if known is None or problem.times > known.times:
                problems[operation.file, operation.line] = problem
        return list(problems.values())


@dataclass(slots=True)
class _Weight:
    """A parameter that was cast."""

    tensor: weakref.ref[Tensor]
    written: int = -1  # index of the last call that wrote it after it was cast


@dataclass(slots=True)
class _Cast:
    """A cast of a parameter."""

    weight: _Weight
    index: int
    caller: Caller
    region: tuple[str, int] | None  # where the region that made it was entered


class StaleCasts:
    """Finds operators that use a cast of a parameter that was made before the parameter's last change."""

    def __init__(self, observer: Any) -> None:
        self._observer = observer
        self._weights: StorageMap[_Weight] = StorageMap()
        self._casts: StorageMap[_Cast] = StorageMap()
        self._noted: set[int] = set()

    def operator_ran(self, call: OperatorCall, outputs: list[Tensor]) -> Problem | None:
        """Look at an operator; returns a problem if it uses an old cast."""
        if call.facts.mutable:
            for output in outputs:
                weight = self._weights.get(output)
                if weight is not None:
                    weight.written = call.index
                self._casts.discard(output)
        tensors = call.tensors
        if call.facts.name == "aten::_to_copy":
            source, output = tensors[0], outputs[0] if outputs else None
            if output is not None and output.dtype in SIXTEEN_BIT and source.is_leaf and source.requires_grad:
                weight = self._weights.get(source)
                if weight is None:
                    weight = _Weight(weakref.ref(source))
                    self._weights.set(source, weight)
                self._casts.set(output, _Cast(weight, call.index, call.caller, self._observer.region_line))
            return None
        if call.phase != "forward":
            return None
        for tensor in tensors:
            if tensor.dtype in SIXTEEN_BIT and not is_opaque(tensor):
                cast = self._casts.get(tensor)
                if cast is not None and cast.weight.written > cast.index and id(cast) not in self._noted:
                    self._noted.add(id(cast))
                    return self._problem(call, cast)
        return None

    def _problem(self, call: OperatorCall, cast: _Cast) -> Problem:
        operation = self._observer._operation(call)
        weight = cast.weight.tensor()
        name = (weight is not None and self._observer._name_of(weight)) or "a weight"
        made = "{}:{}".format(*cast.caller.line())
        if cast.region is None:
            return Problem.at(
                operation,
                grade="note",
                look="casts",
                kind="stale cast",
                what="a 16-bit copy of a weight is used that is older than the weight",
                why=f"{name} was cast at {made}, and was changed since",
                suggestion=Suggestion("cast after each update, unless the old values are wanted"),
                step=self._observer.step,
            )
        file, line = cast.region
        return Problem(
            "wrong",
            "casts",
            "stale cast",
            "the forward uses weights from before the last update",
            f"the region keeps its casts of the weights until it is left, and the optimizer steps inside of it: "
            f"{operation.op} at {operation.file}:{operation.line} reads an old {name}",
            file,
            line,
            operation.op,
            operation.module,
            suggestion=Suggestion(
                "open the region in each step, around the forward only, or autocast(..., cache_enabled=False)"
            ),
            step=self._observer.step,
        )


# Operators whose exact results are seldom 0 where their operands are not.
_MAKE_SMALL = frozenset({"mul", "div", "exp", "pow", "_to_copy", "square", "prod", "mm", "bmm", "addmm"})
_LOOKS = 3  # so many calls of a line are looked at, and then one of 64


def _exact(ran: Ran) -> list[Tensor]:
    """The results of a call in float64; none if it has no float64."""
    try:
        return run_in_float64(ran.func, ran.call.facts, *ran.arguments())
    except Exception:  # operators without float64 raise many kinds of errors
        return []


class Roundings:
    """Finds numbers that 16 bits cannot hold: integers that become equal, results that become 0, float32 state."""

    def __init__(self, observer: Any) -> None:
        self._observer = observer
        self._seen: set[Site] = set()
        self._calls: dict[Site, int] = {}
        self._rounded: StorageMap[tuple[int, str]] = StorageMap()  # by cast: the storage of its source, the dtype
        self._in_backward: dict[Site, list[float]] = {}  # errors of the user's casts in backward, by 2-norm
        self._lines: dict[Site, Operation] = {}

    def operator_ran(self, ran: Ran) -> Problem | None:
        """Look at an operator; returns a problem if it rounds away what it is given."""
        call, args, outputs = ran.call, ran.args, ran.outputs
        if call.phase == "backward" and not call.caller.outside and call.facts.name == "aten::_to_copy" and outputs:
            self._cast_in_backward(call, args[0], outputs[0])
        if call.phase != "forward" or not outputs:
            return None
        output, base = outputs[0], call.facts.base
        if base == "copy":
            return self._state(call, args)
        if base == "_to_copy":
            self._note_cast(args[0], output)
        if output.dtype not in SIXTEEN_BIT or not ran.ranges:
            return None
        if base in _MAKE_SMALL:
            found = self._zeros(ran)
            if found is not None:
                return found
        return self._integers(call, base, output) if base in ("arange", "_to_copy") else None

    def _cast_in_backward(self, call: OperatorCall, source: Tensor, output: Tensor) -> None:
        """Note what a cast in a hook, or in a custom function's backward, changes."""
        if output.dtype not in SIXTEEN_BIT or source.dtype in SIXTEEN_BIT or call.caller.code is None:
            return
        site = (id(call.caller.code), call.caller.instruction)
        errors = self._in_backward.setdefault(site, [])
        exact = source.detach().double()
        size = float(exact.norm())
        if size and math.isfinite(size):
            error = float((output.detach().double() - exact).norm()) / size
            errors.append(error)
            if error >= max(errors):
                self._lines[site] = self._observer._operation(call, dtype=dtype_name(output.dtype))

    def problems(self) -> list[Problem]:
        """The casts in backward that lose much of many gradients; a single one may be nothing but rounding itself."""
        found = []
        for site, errors in self._in_backward.items():
            bad = [error for error in errors if _LOST_SHARE < error <= 1]
            if len(bad) >= _MIN_CALLS and 3 * len(bad) > len(errors):
                dtype = self._lines[site].dtype
                found.append(
                    Problem.at(
                        self._lines[site],
                        grade="lost",
                        look="rounded",
                        kind="underflow",
                        what=f"gradients lose up to {max(bad):.0%} by a cast to {dtype} in a hook",
                        why=f"they underflow: they are below the smallest numbers of {dtype}, in {len(bad)} of "
                        f"{len(errors)} casts",
                        suggestion=Suggestion("leave out the cast: keep gradients in float32 in the hook"),
                        last=self._observer.step,
                    )
                )
        return found

    def _problem(self, call: OperatorCall, **fields: Any) -> Problem:
        """The problem of a call that has just run."""
        return Problem.at(self._observer._operation(call), look="rounded", step=self._observer.step, **fields)

    def _note_cast(self, source: Tensor, output: Tensor) -> None:
        """Remember which tensor a cast has its values from."""
        if is_opaque(source) or (source.requires_grad and not source.is_leaf):
            return
        known = self._rounded.get(source)
        if known is not None:
            self._rounded.set(output, known)
        elif output.dtype in SIXTEEN_BIT and source.is_floating_point():
            self._rounded.set(output, (storage_key(source), dtype_name(output.dtype)))

    def _state(self, call: OperatorCall, args: tuple[Any, ...]) -> Problem | None:
        """Look at a tensor that is overwritten with its own values, rounded."""
        target, source = args[0], args[1]
        if target.dtype in SIXTEEN_BIT or not isinstance(source, Tensor) or is_opaque(source):
            return None
        known = self._rounded.get(source)
        if known is None or is_opaque(target) or known[0] != storage_key(target):
            return None
        owner, name = self._observer.state_name(target)
        dtype = dtype_name(target.dtype)
        return self._problem(
            call,
            grade="wrong",
            kind="rounded",
            what=f"{owner} is rounded to {known[1]} in place",
            why=f"{name} is {dtype}, and its own values are written back to it after a cast",
            suggestion=Suggestion(f"leave out the cast: keep the values in {dtype}"),
        )

    def _zeros(self, ran: Ran) -> Problem | None:
        """Look at elements that are 0 where the exact result is not."""
        call, output, (low, high) = ran.call, ran.outputs[0], ran.ranges[0]
        smallest, largest = torch.finfo(output.dtype).tiny, max(-low, high)
        is_subnormal = 0 < largest < smallest
        if not is_subnormal and (not low <= 0 <= high or (output.dtype is torch.bfloat16 and low != high)):
            return None
        site = (id(call.caller.code), call.caller.instruction)
        calls = self._calls[site] = self._calls.get(site, 0) + 1
        if calls > _LOOKS and calls % 64:
            return None
        zeros = output == 0
        if not is_subnormal and not bool(zeros.any()):
            return None
        exact = next(iter(_exact(ran)), None)
        if exact is None:
            return None
        if is_subnormal:
            return self._subnormal(call, output, float((output.double() - exact).norm() / exact.norm()), largest)
        wanted = int((exact != 0).sum())
        lost = int((zeros & (exact != 0)).sum())
        if not wanted or lost < 0.5 * wanted or wanted < 2:
            return None
        name = dtype_name(output.dtype)
        return self._problem(
            call,
            grade="lost" if lost == wanted else "note",
            kind="underflow",
            what=f"{'all' if lost == wanted else 'most'} of a result becomes 0 in {name}",
            why=f"{lost} of {wanted} elements are below the smallest number of {name}; the largest is "
            f"{float(exact.abs().max()):.3g}",
            suggestion=Suggestion("compute this line in float32"),
        )

    def _subnormal(self, call: OperatorCall, output: Tensor, error: float, largest: float) -> Problem:
        """A result of which every element is too small for all digits of its dtype; `error` is a share of its norm."""
        name, smallest = dtype_name(output.dtype), torch.finfo(output.dtype).tiny
        return self._problem(
            call,
            grade="lost" if error > _LOST_SHARE or (output.dtype is torch.bfloat16 and output.numel() > 1) else "note",
            kind="underflow",
            what=f"a result is too small for {name}",
            why=f"it underflows: its largest magnitude is {largest:.3g}, below {smallest:.3g} {name} loses digits, and "
            f"the result is {error:.0%} off",
            suggestion=Suggestion("compute this line in float32, or scale by less"),
        )

    def _integers(self, call: OperatorCall, base: str, output: Tensor) -> Problem | None:
        """Look at integers that become equal."""
        is_range = base == "arange"
        site = (id(call.caller.code), call.caller.instruction)
        first = 2.0 / torch.finfo(output.dtype).eps  # up to here, each integer has a number
        if site in self._seen or output.numel() < 2 or largest_finite(output) < first:
            return None
        values, distinct = output.detach().reshape(-1), output.numel()
        if not is_range:
            source = call.tensors[0].detach().reshape(-1)[:_MAX_SHADOW]
            if call.tensors[0].requires_grad or (
                source.is_floating_point() and not bool((source == source.round()).all())
            ):
                return None
            values, distinct = values[:_MAX_SHADOW], source.unique().numel()
        left = values.unique().numel()
        if left >= distinct:
            return None
        self._seen.add(site)
        name = dtype_name(output.dtype)
        return self._problem(
            call,
            grade="lost" if is_range or 2 * left <= distinct else "note",
            kind="rounded",
            what=f"{distinct - left} of {distinct} integers become equal to others in {name}",
            why=f"{name} holds each integer up to {first:g} only",
            suggestion=Suggestion("make it in float32, and keep what is computed from it in float32"),
        )


class _Zeros(NamedTuple):
    """The operator that first returned nothing but zeros, although its inputs had others."""

    operation: Operation
    rounded: bool  # the exact result is not 0
    counts: bool  # it is more than rounding of the loss in float32


class Gradients:
    """Finds parameters that learn nothing: without a gradient, with zeros, or whose updates are rounded away."""

    def __init__(self, observer: Any) -> None:
        self._observer = observer
        self._zeros: StorageMap[_Zeros] = StorageMap()
        self._steps = 0
        self._without: dict[Tensor, str] | None = None  # parameters that never had a gradient; None before a step
        self._zero: dict[Tensor, _Zeros | None] = {}  # parameters whose gradient was 0 in each step
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._lost: dict[str, list[float]] = {}
        self._line = ("", 0)
        self._update = ""  # the operator that wrote the parameters last

    def parameters_written(self, call: OperatorCall, outputs: list[Tensor]) -> None:
        """Note the operator of an optimizer that writes parameters."""
        if self._before and any(output is parameter for output in outputs for parameter, _, _ in self._before[:1]):
            self._update = call.facts.name

    def operator_ran(self, ran: Ran) -> None:
        """Follow zeros through an operator of backward."""
        call = ran.call
        for output, (low, high) in zip(ran.outputs, ran.ranges, strict=False):
            if low != 0 or high != 0:
                if call.facts.mutable:
                    self._zeros.discard(output)
                continue
            known = next((zeros for zeros in map(self._zeros.get, call.tensors) if zeros is not None), None)
            if known is None:
                operation = self._observer._operation(call, dtype=dtype_name(output.dtype))
                known = _Zeros(operation, *self._is_rounded(ran))
            self._zeros.set(output, known)

    def _is_rounded(self, ran: Ran) -> tuple[bool, bool]:
        """Whether the exact result has elements other than 0, and whether they are more than rounding of the loss."""
        call = ran.call
        if not any(tensor.dtype in SIXTEEN_BIT for tensor in call.tensors) and "_to_copy" not in call.facts.name:
            return False, False
        if call.facts.communicates or call.facts.opaque_state or call.facts.random:
            return False, False
        size = sum(float(exact.abs().sum()) for exact in _exact(ran))
        losses = self._observer.losses
        loss = abs(losses[-1] if losses else 0.0) * (self._observer.scale or 1.0)
        # What rounding in float32 leaves of a gradient that is 0 is about a millionth of the loss, and not far less.
        return size > 0, size > 1e-5 * loss or 0 < size < 1e-20 * loss

    def step_starts(self, optimizer: Any) -> None:
        """Look at the gradients that an optimizer is about to use."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if not any(group.get("lr", 1.0) for group in optimizer.param_groups):
            return
        self._line = find_caller(1).line()
        first = self._without is None
        self._steps += 1
        without = self._without or {}
        self._without = {p: "" for p in parameters if p.grad is None and (first or p in without)}
        zero: dict[Tensor, _Zeros | None] = {}
        for p in parameters if first else [p for p in parameters if p in self._zero]:
            if p.grad is not None and type(p.grad) is Tensor and p.grad.layout is torch.strided and not p.grad.any():
                zero[p] = self._zeros.get(p.grad)
        self._zero = zero
        if (self._steps < 10 or self._steps % 10 == 0) and not type(optimizer).__module__.startswith("ampkit"):
            self._before = [entry for entry in before_update(optimizer) if entry[0].dtype in SIXTEEN_BIT]

    def step_ended(self) -> None:
        """Look at the updates that an optimizer made."""
        for parameter, before, wanted in self._before:
            if bool(wanted.any()):
                name = self._observer._name_of(parameter) or "a parameter"
                self._lost.setdefault(name, []).append(float(lost_share(parameter, before, wanted)))
        self._before = []

    def problems(self) -> list[Problem]:
        """What was found in all steps."""
        if self._steps < _MIN_STEPS:
            return []
        problems = []
        steps = f"in each of {self._steps} steps"
        rounded = {p: zeros for p, zeros in self._zero.items() if zeros is not None and zeros.rounded}
        for p, zeros in rounded.items():
            problem = Problem.at(
                zeros.operation,
                grade="lost" if zeros.counts else "note",
                look="gradients",
                kind="underflow",
                what=f"the gradient of {self._observer._name_of(p) or 'a parameter'} is 0 {steps}",
                why=f"rounding to {zeros.operation.dtype} makes all of it 0",
                suggestion=Suggestion(
                    "keep these numbers above 1e-38, where bfloat16 ends: another scale, or products in another order"
                    if zeros.operation.dtype == "bfloat16"  # the range of float32
                    else "scale the loss: ampkit.GradScaler, or compute this in float32"
                ),
            )
            if not any((problem.file, problem.line, problem.op) == (p.file, p.line, p.op) for p in problems):
                problems.append(problem)
        exact = [p for p in self._zero if p not in rounded]
        for parameters, what, kind in (
            (exact, "is exactly 0", "zero gradient"),
            (list(self._without or ()), "is missing", "no gradient"),
        ):
            if parameters:
                names = [self._observer._name_of(p) or "a parameter" for p in parameters]
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                what = f"the gradient of {', '.join(names[:3])}{more} {what} {steps}"
                origin = self._zero.get(parameters[0])
                if origin is not None:
                    why = f"{origin.operation.name()} returns only zeros, in float64 too"
                    problems.append(
                        Problem.at(origin.operation, grade="note", look="gradients", kind=kind, what=what, why=why)
                    )
                else:
                    problems.append(Problem("note", "gradients", kind, what))
        shares = {name: sum(each) / len(each) for name, each in self._lost.items() if len(each) >= _MIN_STEPS}
        most = max(shares, key=shares.__getitem__, default="")
        lost = sum(shares.values()) / max(1, len(shares))
        if lost > 0.2:
            problems.append(
                Problem(
                    "lost" if lost > 0.3 or shares[most] > 0.5 else "note",
                    "updates",
                    "lost update",
                    f"{lost:.0%} of the optimizer's updates of weights in 16 bits are rounded away",
                    f"{shares[most]:.0%} of the elements of {most} do not change: the update is below half a unit in "
                    "the last place",
                    *self._line,
                    self._update,
                    phase="optimizer",
                    suggestion=Suggestion(
                        "keep float32 masters: ampkit.FP16Optimizer(optimizer), or the model in float32 and a region"
                    ),
                )
            )
        return problems


@torch.no_grad()
def before_update(optimizer: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Parameters with a gradient of an optimizer that is about to step, a sample of each, and what should change."""
    return [
        (p, _sample(p).clone(), _sample(p.grad) != 0)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None and p.grad.layout is torch.strided and p.numel()
    ]


@torch.no_grad()
def lost_share(parameter: Tensor, before: Tensor, wanted: Tensor) -> Tensor:
    """The share of the elements that an update should change and did not."""
    return (wanted & (_sample(parameter) == before)).sum() / wanted.sum().clamp_min(1)


def _sample(tensor: Tensor) -> Tensor:
    """Evenly spaced elements of a tensor that is not empty."""
    return tensor.detach().flatten()[:: math.ceil(tensor.numel() / _MAX_ELEMENTS)]
