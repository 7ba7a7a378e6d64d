"""The operators that make a result inf or NaN by rounding: the calls that lead to it run again, some of them exactly.

An exact call computes in float64, and its result is not rounded. Each other call that reads an exact result also
computes in float64, and its result is rounded to the dtype of the recorded one. The calls whose exactness makes the
result finite are its rounding sources. If the result is not finite although all calls are exact, precision is not the
cause.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampkit.debugging.observe.call import Call
from ampkit.debugging.observe.operator_properties import converted_arguments, tensors_in
from ampkit.debugging.observe.rerun import can_run_again, float64_dtype
from ampkit.debugging.observe.tape import Recorded, Values, View
from ampkit.dtypes import dtype_name
from ampkit.matmul.float8_matmul import WIDE_PRODUCTS

_MAX_CALLS = 512  # maximum number of calls that are made exact
_MAX_SOURCES = 4
_JITTER = 1e-12  # relative change of each result: shows which exact values are only float64's rounding
# Operators whose results are elements of their operands, or the same with another sign.
_MOVES = re.compile(
    r"_to_copy|copy|clone|detach|lift_fresh|index|index_select|gather|take|cat|stack|where|masked_select|abs|neg|"
    r"masked_fill|relu|clamp|clamp_min|clamp_max|index_put|scatter|(arg)?(max|min)|a(max|min)|(max|min)imum|sort|"
    r"topk|flip|roll|repeat|embedding|constant_pad_nd|threshold_backward|max_pool2d_with_indices|nan_to_num|"
    r"(slice|select)_(scatter|backward)"
)


class RoundingSource(NamedTuple):
    """A call whose rounding makes a result inf or NaN."""

    call: Call
    dtype: torch.dtype
    share: float  # fraction of the non-finite elements that are finite if this call, or its set, is exact
    scalar: float | None  # a Python number among its arguments that the dtype rounds


@dataclass(frozen=True)
class Explanation:
    """Why a result is not finite.

    With `sources`, rounding is the reason, and `text` describes it. Without, `exact` is True if all calls that lead to
    it were computed exactly: the result is not finite in exact arithmetic either.
    """

    sources: tuple[RoundingSource, ...] = ()
    text: str = ""
    exact: bool = False
    is_number: bool = False  # a number written in the code is rounded


def explain(recorded: Recorded) -> Explanation:
    """Find the calls whose rounding makes the result of a call inf or NaN.

    The call itself must be undefined for its operands: computed exactly on them, its result is not finite either.
    Synchronizes with the device often, and computes parts of the step again in float64.
    """
    with torch.no_grad():
        try:
            return _Search(recorded).explanation()
        except _Unavailable:
            return Explanation()


def zero_producer(recorded: Recorded) -> Call | None:
    """Return the call that computed a 0 among the operands of a call, before operators that only move elements."""
    for view in recorded.operands():
        flat = view.values.flat() if view.is_float else None
        if flat is None or bool(view.of(flat).all()):
            continue
        while (producer := view.values.producer) is not None:
            sources = [operand for operand in producer.operands() if operand.is_float]
            if not _moves(producer) or len(sources) != 1:
                return producer.call
            view = sources[0]
    return None


class _Unavailable(Exception):
    """Values are needed that are freed, and that cannot be computed again."""


class _Search:
    """Finds the rounding sources of one result."""

    def __init__(self, recorded: Recorded) -> None:
        floats = [view for view in recorded.outputs if view.is_float]
        nonfinite = next((view for view in floats if not bool(torch.isfinite(_recorded(view)).all())), None)
        if nonfinite is None:
            raise _Unavailable
        self._target = recorded.item(nonfinite)
        self._outputs = [view for view in self._target.outputs if view.is_float]
        self._native: dict[Values, Tensor] = {}
        self._inexact: set[int] = set()  # calls that cannot be computed exactly
        self._levels = self._chain()
        self._calls = {each.call.index: each for level in self._levels for each in level}

    def explanation(self) -> Explanation:
        """Return the rounding sources of the elements that are not finite."""
        while True:
            explanation, calls = self._explanation()
            wrong = [index for index in calls if not self._is_reproduced(self._calls[index])]
            if not wrong:
                return explanation
            self._inexact.update(wrong)

    def _explanation(self) -> tuple[Explanation, set[int]]:
        """Return an explanation, and the indices of the calls that it is based on."""
        nonfinite = self._nonfinite(())
        exact = list(self._calls)
        fixed = self._significant(_without(nonfinite, self._nonfinite(exact)), exact)
        if not _count(fixed):
            is_complete = not self._levels[-1] and not self._inexact
            return Explanation(exact=is_complete), set()
        depth = 1
        while depth < len(self._levels):  # the shortest chain with an effect
            chain = [each.call.index for level in self._levels[: depth + 1] for each in level]
            if self._suffices(chain, fixed):
                exact = chain
                break
            depth *= 2
        sources: list[RoundingSource] = []
        calls: set[int] = set()
        remaining, target = fixed, self._target.call.index
        while _count(remaining) and len(sources) < _MAX_SOURCES and self._suffices(exact, remaining):
            found = self._smallest(exact, remaining)
            together = _without(nonfinite, self._nonfinite([*found, target]))
            share = _count(together) / _count(nonfinite)
            sources += [self._source(index, share) for index in sorted(found) if index != target or len(found) == 1]
            producers = (values.producer for values in self._run([*found, target]))
            calls |= {producer.call.index for producer in producers if producer is not None}
            exact = [index for index in exact if index not in found or index == target]
            remaining = _without(remaining, together)
        if not sources:  # a call ran in float64 with some exact operands, and failed with others
            return Explanation(), set()
        sources.sort(key=lambda source: -source.share)
        text, is_number = self._text(sources[0])
        return Explanation(tuple(sources), text, is_number=is_number), calls

    def _is_reproduced(self, recorded: Recorded) -> bool:
        """Return whether a call gives the recorded result again: not if a kernel that is not observed wrote it."""
        for view in recorded.outputs:
            flat = view.values.flat()
            if flat is None or not view.is_float:
                continue
            self._native.pop(view.values, None)
            for operand in recorded.operands():
                self._own(operand.values)
            self._again(recorded)
            dtype = float64_dtype(view.dtype)
            again, own = view.of(self._native[view.values]).to(dtype), view.of(flat).to(dtype)
            finite = torch.isfinite(own)
            if not torch.equal(finite, torch.isfinite(again)):
                return False
            difference = torch.where(finite, again - own, 0.0).abs()
            if own.numel() and bool(difference.max() > 0.05 * torch.where(finite, own, 0.0).abs().max()):
                return False
        return True

    # --- the chain

    def _chain(self) -> list[list[Recorded]]:
        """Return the calls that lead to the target, by their distance from it."""
        levels, seen = [[self._target]], {self._target.call.index}
        while levels[-1] and len(seen) < _MAX_CALLS:
            level: dict[int, Recorded] = {}
            for each in levels[-1]:
                for view in (*each.operands(), *(before for before, _ in each.writes)):
                    producer = view.values.producer
                    if producer is not None and producer.call.index not in seen:
                        level[producer.call.index] = producer.item(view)
            seen.update(level)
            levels.append(list(level.values()))
        return levels

    def _significant(self, fixed: list[Tensor], exact: list[int]) -> list[Tensor]:
        """Return the elements that are finite because an operand differs by more than float64's own rounding.

        If an operand is 0 in real arithmetic, float64 may compute 1e-17, of which the logarithm is finite by chance.
        """
        if not _count(fixed):
            return fixed
        indices = [index for index in exact if index != self._target.call.index]
        carried, jittered = self._run(indices), self._run(indices, _JITTER)
        significant = [torch.zeros_like(each) for each in fixed]
        operands = [view for view in self._target.operands() if view.is_float]
        from_inf = any(not bool(torch.isfinite(view.of(self._own(view.values))).all()) for view in operands)
        for view in self._target.operands():
            if view.values not in carried:
                continue
            own, reference = view.of(self._own(view.values)), view.of(carried[view.values])
            if from_inf:  # with inf in the data, another weight moves the inf elsewhere, and removes none
                differs = torch.isfinite(reference) & ~torch.isfinite(own)
            else:
                differs = (own - reference).abs() > 10 * (view.of(jittered[view.values]) - reference).abs()
            for elements in significant:
                try:
                    elements |= differs.expand(elements.size())
                except RuntimeError:  # an operand of another shape
                    elements |= differs.any()
        return [each & other for each, other in zip(fixed, significant, strict=True)]

    def _smallest(self, exact: list[int], wanted: list[Tensor]) -> list[int]:
        """Return a smallest set of calls near the target whose exactness makes most elements of `wanted` finite.

        Parts that are not needed are removed: halves, then quarters, and so on to single calls.
        """
        size = len(exact)
        while size > 1:
            size = min(math.ceil(size / 2), len(exact))
            for start in reversed(range(0, len(exact), size)):
                rest = exact[:start] + exact[start + size :]
                if rest and self._suffices(rest, wanted):
                    exact = rest
        return exact

    def _suffices(self, indices: Sequence[int], wanted: list[Tensor]) -> bool:
        """Return whether the exactness of calls, and of the target, makes half of the elements of `wanted` finite."""
        fixed = _without(wanted, self._nonfinite([*indices, self._target.call.index]))
        return 2 * _count(fixed) >= _count(wanted)

    def _source(self, index: int, share: float) -> RoundingSource:
        recorded = self._calls[index]
        dtype = next((view.dtype for view in recorded.outputs if view.is_float), torch.float32)
        scalar = next((each for each in recorded.scalars if float(torch.tensor(each, dtype=dtype)) != each), None)
        return RoundingSource(recorded.call, dtype, share, scalar)

    def _text(self, source: RoundingSource) -> tuple[str, bool]:
        """Return an operand of the target and its exact value, in words, and whether it is a number of the code."""
        if source.scalar is not None:
            rounded = float(torch.tensor(source.scalar, dtype=source.dtype))
            if rounded in (0.0, 1.0, -1.0) or not math.isfinite(rounded):
                return f"{source.scalar:.10g} is {rounded:g} in {dtype_name(source.dtype)}", True
        carried = self._run(index for index in self._calls if index != self._target.call.index)
        most, text = 0.0, "its operands are rounded"
        for view in self._target.operands():
            exact = carried.get(view.values)
            if exact is None or not view.is_float or view.dtype.is_complex:
                continue
            own, reference = view.of(self._own(view.values)).double().reshape(-1), view.of(exact).reshape(-1)
            error = ((own - reference).abs() / reference.abs().clamp_min(1e-300)).nan_to_num(0.0)
            if own.numel() and float(error.max()) > most:
                position = int(error.argmax())
                most = float(error[position])
                value, true = float(own[position]), float(reference[position])
                text = f"{value:.4g} in {dtype_name(source.dtype)}, and {true:.4g} if not rounded"
                if value == 0 and abs(true) < torch.finfo(source.dtype).smallest_normal:
                    text += ": it underflows"
        return text, False

    # --- running calls again

    def _nonfinite(self, exact: Iterable[int]) -> list[Tensor]:
        """Return, for each output of the target, which elements are not finite if some calls are exact."""
        carried = self._run(exact)
        outputs = []
        for view in self._outputs:
            flat = carried.get(view.values)
            outputs.append(~torch.isfinite(_recorded(view) if flat is None else view.of(flat)))
        return outputs

    def _run(self, exact: Iterable[int], jitter: float = 0.0) -> dict[Values, Tensor]:
        """Return the values that differ from the recorded ones if some calls are exact, in float64.

        With `jitter`, each exact result is changed by this fraction of it.
        """
        exact = set(exact)
        carried: dict[Values, Tensor] = {}
        for index in sorted(self._calls):
            recorded = self._calls[index]
            touched = any(view.values in carried for view in recorded.operands())
            if index in self._inexact or not (touched or index in exact):
                continue
            try:
                self._compute(recorded, carried, exact=index in exact, jitter=jitter)
            except Exception:  # operands are freed, no float64, or another number of elements
                self._inexact.add(index)
        return carried

    def _compute(self, recorded: Recorded, carried: dict[Values, Tensor], *, exact: bool, jitter: float) -> None:
        """Compute a call in float64, and add the values that it writes to `carried`."""

        def upcast(values: Values) -> Tensor:
            flat = carried.get(values)
            return self._own(values).to(float64_dtype(values.dtype)) if flat is None else flat

        for view, flat in self._execute(recorded, upcast, float64_dtype):
            tensor = view.of(flat)
            if view.is_float and not exact and _rounds(recorded, view.dtype):
                tensor.copy_(tensor.to(view.dtype))  # rounded
            elif view.is_float and jitter and not _moves(recorded):
                phase = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device) + recorded.call.index
                tensor.mul_(1 + jitter * phase.cos().view(tensor.size()))
            carried[view.values] = flat

    def _own(self, values: Values) -> Tensor:
        """Return the recorded elements of a storage, computed again if they are freed."""
        pending = [values]
        while pending:
            last = pending[-1]
            if last in self._native:
                pending.pop()
                continue
            flat = last.flat()
            if flat is None:
                if last.producer is None:
                    raise _Unavailable
                needed = [view.values for view in last.producer.operands()]
                missing = [each for each in needed if each not in self._native]
                if missing:
                    pending += missing
                    continue
                self._again(last.producer)
                if last not in self._native:
                    raise _Unavailable
            else:
                self._native[last] = flat
        return self._native[values]

    def _again(self, recorded: Recorded) -> None:
        """Run a call unchanged, on the recorded values of its operands."""
        for view, flat in self._execute(recorded, self._native.__getitem__, None):
            self._native[view.values] = flat

    def _execute(
        self,
        recorded: Recorded,
        values_of: Callable[[Values], Tensor],
        convert: Callable[[torch.dtype], torch.dtype] | None,
    ) -> list[tuple[View, Tensor]]:
        """Run a call on the elements that `values_of` returns; with `convert`, in these dtypes.

        Return its outputs: their views, and all elements of their storages.
        """
        op, flats = recorded.call.op, {before.values: values_of(before.values).clone() for before, _ in recorded.writes}

        def read(view: View) -> Tensor:
            flat = flats.get(view.values)
            return view.of(values_of(view.values) if flat is None else flat)

        func: Any = op.func
        args, kwargs = _filled(recorded.args, read), _filled(recorded.kwargs, read)
        if convert is not None:
            args, kwargs = converted_arguments(op, args, kwargs, lambda tensor: tensor, convert)
            if op.takes_dtype and not kwargs.get("dtype") and any(view.is_float for view in recorded.outputs):
                kwargs["dtype"] = torch.float64
            func = WIDE_PRODUCTS.get(op.name, func)
        if not can_run_again(op, args, kwargs):
            raise _Unavailable
        outputs = [(after, flats[before.values]) for before, after in recorded.writes]
        for view, result in zip(recorded.results, tensors_in(func(*args, **kwargs)), strict=True):
            if view is not None:
                if result.size() != view.size:
                    raise _Unavailable  # the number of elements depends on values
                dtype = view.values.dtype if convert is None else convert(view.values.dtype)
                flat = torch.zeros(view.values.count, dtype=dtype, device=result.device)
                view.of(flat).copy_(result)
                outputs.append((view, flat))
        return outputs


def _moves(recorded: Recorded) -> bool:
    """Return whether all results of a call are elements of its operands."""
    return not recorded.scalars and _MOVES.fullmatch(recorded.call.op.base) is not None


def _rounds(recorded: Recorded, dtype: torch.dtype) -> bool:
    """Return whether a call rounds its results, of a dtype: not if it only moves elements that this dtype holds."""
    return not _moves(recorded) or any(
        operand.is_float and torch.promote_types(operand.dtype, dtype) is not dtype for operand in recorded.operands()
    )


def _recorded(view: View) -> Tensor:
    flat = view.values.flat()
    if flat is None:
        raise _Unavailable
    return view.of(flat)


def _filled(value: Any, read: Callable[[View], Tensor]) -> Any:
    """Return arguments with tensors instead of views."""
    if isinstance(value, View):
        return read(value)
    if isinstance(value, dict):
        return {key: _filled(item, read) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, read) for item in value)
    return value


def _without(elements: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [each & ~other for each, other in zip(elements, others, strict=True)]


def _count(elements: list[Tensor]) -> int:
    return sum(int(each.sum()) for each in elements)
