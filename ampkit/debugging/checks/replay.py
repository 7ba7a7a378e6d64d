"""Which operators make a result inf or NaN by rounding: the calls that lead to it run again, some of them exactly.

A call that is exact computes in float64, and its result is not rounded. Every other call that reads an exact result
computes in float64 too, and its result is rounded to the dtype that it had. The calls whose exactness removes the fault
are its makers, whatever they are. If the result is not finite although all calls are exact, precision is not the cause.
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
from ampkit.debugging.observe.rerun import why_not_again
from ampkit.debugging.observe.tape import Recorded, Tape, Values, View
from ampkit.debugging.torch_private import without_dispatch
from ampkit.dtypes import dtype_name
from ampkit.matmul.float8_matmul import WIDE_PRODUCTS

_MAX_CALLS = 512  # the most calls that are made exact
_MAX_MAKERS = 4
_JITTER = 1e-12  # relative, of each result: shows which exact values are nothing but float64's rounding
# Operators whose results are elements of their operands, or the same with another sign.
_MOVES = re.compile(
    r"_to_copy|copy|clone|detach|lift_fresh|index|index_select|gather|take|cat|stack|where|masked_select|abs|neg|"
    r"masked_fill|relu|clamp|clamp_min|clamp_max|index_put|scatter|(arg)?(max|min)|a(max|min)|(max|min)imum|sort|"
    r"topk|flip|roll|repeat|embedding|constant_pad_nd|threshold_backward|max_pool2d_with_indices|nan_to_num|"
    r"(slice|select)_(scatter|backward)"
)


class Maker(NamedTuple):
    """A call whose rounding makes a result inf or NaN."""

    call: Call
    dtype: torch.dtype
    share: float  # of the elements that are not finite: those that are finite if this call, or its set, is exact
    number: float | None = None  # a Python number among its arguments that the dtype rounds


@dataclass(frozen=True)
class Explanation:
    """Why a result is not finite.

    With `makers` rounding made it so; `text` says how. Without, `exact` says whether all calls that lead to it were
    computed exactly, and the result is not finite in exact arithmetic either.
    """

    makers: tuple[Maker, ...] = ()
    text: str = ""
    exact: bool = False
    is_number: bool = False  # a number written in the code is rounded


def explain(tape: Tape, index: int) -> Explanation:
    """Find the calls whose rounding makes the result of the call with an index inf or NaN.

    The call itself must be undefined for its operands: computed exactly on them, its result is not finite either.
    Synchronizes with the device often, and computes parts of the step again in float64.
    """
    recorded = tape.get(index)
    if recorded is None:
        return Explanation()
    with without_dispatch(), torch.no_grad():
        try:
            return _Search(recorded).explanation()
        except _Gone:
            return Explanation()


def maker_of_zero(tape: Tape, index: int) -> Call | None:
    """The call that computed a 0 among the operands of a call; operators that only move elements are walked through."""
    recorded = tape.get(index)
    for view in recorded.operands() if recorded is not None else ():
        flat = view.values.flat() if view.is_float else None
        if flat is None or bool(view.of(flat).all()):
            continue
        while (maker := view.values.maker) is not None:
            sources = [operand for operand in maker.operands() if operand.is_float]
            if not _moves(maker) or len(sources) != 1:
                return maker.call
            view = sources[0]
    return None


class _Gone(Exception):
    """Values are needed that are freed and cannot be computed again."""


class _Search:
    """Looks for the makers of one result."""

    def __init__(self, recorded: Recorded) -> None:
        broken = [
            view for view in recorded.outputs if view.is_float and not bool(torch.isfinite(_recorded(view)).all())
        ]
        if not broken:
            raise _Gone
        self._target = recorded.item(broken[0])
        self._outputs = [view for view in self._target.outputs if view.is_float]
        self._native: dict[Values, Tensor] = {}
        self._inexact: set[int] = set()  # calls that cannot be computed exactly
        self._levels = self._chain()
        self._calls = {each.call.index: each for level in self._levels for each in level}

    def explanation(self) -> Explanation:
        """The makers of the elements that are not finite."""
        while True:
            explanation, calls = self._explanation()
            wrong = [index for index in calls if not self._is_reproduced(self._calls[index])]
            if not wrong:
                return explanation
            self._inexact.update(wrong)

    def _explanation(self) -> tuple[Explanation, set[int]]:
        """An explanation, and the indices of the calls that it is based on."""
        all_broken = self._broken(())
        exact = list(self._calls)
        cured = self._significant(_without(all_broken, self._broken(exact)), exact)
        if not _count(cured):
            return Explanation(exact=self._is_complete()), set()
        depth = 1
        while depth < len(self._levels):  # the shortest chain with an effect
            chain = [each.call.index for level in self._levels[: depth + 1] for each in level]
            if self._suffices(chain, cured):
                exact = chain
                break
            depth *= 2
        makers: list[Maker] = []
        calls: set[int] = set()
        left = cured
        target = self._target.call.index
        while _count(left) and len(makers) < _MAX_MAKERS and self._suffices(exact, left):
            found = self._smallest(exact, left)
            together = _without(all_broken, self._broken([*found, target]))
            share = _count(together) / _count(all_broken)
            makers += [self._maker(index, share) for index in sorted(found) if index != target or len(found) == 1]
            calls.update(self._calls_of(self._run([*found, target])))
            exact = [index for index in exact if index not in found or index == target]
            left = _without(left, together)
        makers.sort(key=lambda maker: -maker.share)
        text, is_number = self._text(makers[0])
        return Explanation(tuple(makers), text, is_number=is_number), calls

    def _calls_of(self, carried: Iterable[Values]) -> list[int]:
        return [values.maker.call.index for values in carried if values.maker is not None]

    def _is_reproduced(self, recorded: Recorded) -> bool:
        """Whether a call gives the recorded result again: not if code that is not seen wrote there, as a kernel may."""
        for view in recorded.outputs:
            flat = view.values.flat()
            if flat is None or not view.is_float:
                continue
            self._native.pop(view.values, None)
            for operand in recorded.operands():
                self._own(operand.values)
            self._again(recorded)
            dtype = _wide_dtype(view.dtype)
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
        """The calls that lead to the target, by their distance from it."""
        levels, seen = [[self._target]], {self._target.call.index}
        while levels[-1] and len(seen) < _MAX_CALLS:
            level: dict[int, Recorded] = {}
            for each in levels[-1]:
                for view in (*each.operands(), *(before for before, _ in each.writes)):
                    maker = view.values.maker
                    if maker is not None and maker.call.index not in seen:
                        level[maker.call.index] = maker.item(view)
            seen.update(level)
            levels.append(list(level.values()))
        return levels

    def _is_complete(self) -> bool:
        """Whether all calls that lead to the target were computed exactly."""
        return not self._levels[-1] and not self._inexact

    def _significant(self, cured: list[Tensor], exact: list[int]) -> list[Tensor]:
        """The elements that are finite because an operand is another one, by more than float64's own rounding.

        If an operand is 0 in real arithmetic, float64 may compute 1e-17, of which the logarithm is finite by chance.
        """
        if not _count(cured):
            return cured
        indices = [index for index in exact if index != self._target.call.index]
        carried, jittered = self._run(indices), self._run(indices, _JITTER)
        significant = [torch.zeros_like(each) for each in cured]
        operands = [view for view in self._target.operands() if view.is_float]
        from_inf = any(not bool(torch.isfinite(view.of(self._own(view.values))).all()) for view in operands)
        for view in self._target.operands():
            if view.values not in carried:
                continue
            own, wide = view.of(self._own(view.values)), view.of(carried[view.values])
            if from_inf:  # of inf in the data another weight makes inf elsewhere, and cures nothing
                differs = torch.isfinite(wide) & ~torch.isfinite(own)
            else:
                differs = (own - wide).abs() > 10 * (view.of(jittered[view.values]) - wide).abs()
            for elements in significant:
                try:
                    elements |= differs.expand(elements.size())
                except RuntimeError:  # an operand of another shape
                    elements |= differs.any()
        return [each & other for each, other in zip(cured, significant, strict=True)]

    def _smallest(self, exact: list[int], wanted: list[Tensor]) -> list[int]:
        """A smallest set among calls whose exactness makes most of the wanted elements finite, near the target.

        Parts that are not needed are left out: halves, then quarters, and so on to single calls.
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
        """Whether the exactness of calls, and of the target, makes at least half of the wanted elements finite."""
        cured = _without(wanted, self._broken([*indices, self._target.call.index]))
        return 2 * _count(cured) >= _count(wanted)

    def _maker(self, index: int, share: float) -> Maker:
        recorded = self._calls[index]
        dtype = next((view.dtype for view in recorded.outputs if view.is_float), torch.float32)
        number = next((each for each in recorded.call.scalars if float(torch.tensor(each, dtype=dtype)) != each), None)
        return Maker(recorded.call, dtype, share, number)

    def _text(self, maker: Maker) -> tuple[str, bool]:
        """Return an operand of the target and its exact value, in words, and whether it is a number of the code."""
        if maker.number is not None:
            rounded = float(torch.tensor(maker.number, dtype=maker.dtype))
            if rounded in (0.0, 1.0, -1.0) or not math.isfinite(rounded):
                return f"{maker.number:.10g} is {rounded:g} in {dtype_name(maker.dtype)}", True
        carried = self._run(index for index in self._calls if index != self._target.call.index)
        most, text = 0.0, "its operands are rounded"
        for view in self._target.operands():
            exact = carried.get(view.values)
            if exact is None or not view.is_float or view.dtype.is_complex:
                continue
            own, wide = view.of(self._own(view.values)).double().reshape(-1), view.of(exact).reshape(-1)
            error = ((own - wide).abs() / wide.abs().clamp_min(1e-300)).nan_to_num(0.0)
            if own.numel() and float(error.max()) > most:
                position = int(error.argmax())
                most = float(error[position])
                low, high = float(own[position]), float(wide[position])
                text = f"{low:.4g} in {dtype_name(maker.dtype)}, and {high:.4g} if not rounded"
                if low == 0 and abs(high) < torch.finfo(maker.dtype).smallest_normal:
                    text += ": it underflows"
        return text, False

    # --- running calls again

    def _broken(self, exact: Iterable[int]) -> list[Tensor]:
        """For each output of the target, which elements are not finite if some calls are exact."""
        carried = self._run(exact)
        outputs = []
        for view in self._outputs:
            flat = carried.get(view.values)
            outputs.append(~torch.isfinite(_recorded(view) if flat is None else view.of(flat)))
        return outputs

    def _run(self, exact: Iterable[int], jitter: float = 0.0) -> dict[Values, Tensor]:
        """What differs from the recorded values if some calls are exact, in float64.

        With `jitter` each exact result is changed by this share of it.
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
            except Exception:  # operands are gone, no float64, or another number of elements
                self._inexact.add(index)
        return carried

    def _compute(self, recorded: Recorded, carried: dict[Values, Tensor], *, exact: bool, jitter: float) -> None:
        """Compute a call in float64, and add what it writes to `carried`."""
        flats = {before.values: self._wide(before.values, carried).clone() for before, _ in recorded.writes}

        def read(view: View) -> Tensor:
            flat = flats.get(view.values)
            return view.of(self._wide(view.values, carried) if flat is None else flat)

        results = self._call(recorded, read, torch.float64)
        new = {
            after.values: (after, flats[before.values], after.of(flats[before.values]))
            for before, after in recorded.writes
        }
        for view, result in zip(recorded.results, results, strict=True):
            if view is not None:
                if result.size() != view.size:
                    raise ValueError("the number of elements depends on values")
                flat = torch.zeros(view.values.count, dtype=_wide_dtype(view.values.dtype), device=result.device)
                view.of(flat).copy_(result)
                new[view.values] = view, flat, view.of(flat)
        for values, (view, flat, tensor) in new.items():
            if view.is_float and not exact and _rounds(recorded, view.dtype):
                tensor.copy_(tensor.to(view.dtype))  # rounded
            elif view.is_float and jitter and not _moves(recorded):
                phase = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device) + recorded.call.index
                tensor.mul_(1 + jitter * phase.cos().view(tensor.size()))
            carried[values] = flat

    def _wide(self, values: Values, carried: dict[Values, Tensor]) -> Tensor:
        flat = carried.get(values)
        return self._own(values).to(_wide_dtype(values.dtype)) if flat is None else flat

    def _own(self, values: Values) -> Tensor:
        """The recorded elements of a storage, computed again if they are gone."""
        pending = [values]
        while pending:
            last = pending[-1]
            if last in self._native:
                pending.pop()
                continue
            flat = last.flat()
            if flat is None:
                if last.maker is None:
                    raise _Gone
                needed = [view.values for view in last.maker.operands()]
                missing = [each for each in needed if each not in self._native]
                if missing:
                    pending += missing
                    continue
                self._again(last.maker)
                if last not in self._native:
                    raise _Gone
            else:
                self._native[last] = flat
        return self._native[values]

    def _again(self, recorded: Recorded) -> None:
        """Run a call as it was, on the recorded values of its operands."""
        flats = {before.values: self._native[before.values].clone() for before, _ in recorded.writes}

        def read(view: View) -> Tensor:
            return view.of(flats.get(view.values, self._native[view.values]))

        results = self._call(recorded, read, None)
        for before, after in recorded.writes:
            self._native[after.values] = flats[before.values]
        for view, result in zip(recorded.results, results, strict=True):
            if view is not None:
                flat = torch.zeros(view.values.count, dtype=view.values.dtype, device=result.device)
                view.of(flat).copy_(result)
                self._native[view.values] = flat

    def _call(self, recorded: Recorded, read: Callable[[View], Tensor], wide: torch.dtype | None) -> list[Tensor]:
        """Run a call on operands that `read` returns; with `wide`, in this dtype."""
        args, kwargs = _filled(recorded.args, read), _filled(recorded.kwargs, read)
        op = recorded.call.op
        func: Any = op.func
        if wide is not None:
            args, kwargs = converted_arguments(op, args, kwargs, lambda tensor: tensor, _wide_dtype)
            if op.takes_dtype and not kwargs.get("dtype") and any(view.is_float for view in recorded.outputs):
                kwargs["dtype"] = wide
            func = WIDE_PRODUCTS.get(op.name, func)
        if why_not_again(op, args, kwargs):
            raise _Gone if wide is None else ValueError("it cannot run again")
        return tensors_in(func(*args, **kwargs))


def _moves(recorded: Recorded) -> bool:
    """Whether the results of a call are elements of its operands, and no other number."""
    if recorded.call.scalars:
        return False
    return _MOVES.fullmatch(recorded.call.op.base) is not None


def _rounds(recorded: Recorded, dtype: torch.dtype) -> bool:
    """Whether a call rounds its results, of a dtype: not if it only moves elements that this dtype holds."""
    return not _moves(recorded) or any(
        operand.is_float and torch.promote_types(operand.dtype, dtype) is not dtype for operand in recorded.operands()
    )


def _recorded(view: View) -> Tensor:
    flat = view.values.flat()
    if flat is None:
        raise _Gone
    return view.of(flat)


def _filled(value: Any, read: Callable[[View], Tensor]) -> Any:
    """Arguments with tensors in place of views."""
    if isinstance(value, View):
        return read(value)
    if isinstance(value, dict):
        return {key: _filled(item, read) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, read) for item in value)
    return value


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _without(elements: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [each & ~other for each, other in zip(elements, others, strict=True)]


def _count(elements: list[Tensor]) -> int:
    return sum(int(each.sum()) for each in elements)
