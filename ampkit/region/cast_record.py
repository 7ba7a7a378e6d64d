"""What `record_casts` noted: calls by kind, their casts and bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ampkit.policy.module_paths import starred
from ampkit.policy.rules import Rule
from ampkit.region.float8_record import Float8Losses, Float8Notes, table

__all__ = ["CastRecord", "RecordedCall"]

T = TypeVar("T")

_HEADER = ("calls", "operator", "rule, set by", "module", "operands", "computed in", "casts", "cached", "MB")


class RecordedCall(NamedTuple):
    """One call of an operator that a rule names."""

    op: str                             # "aten::linear"
    rule: Rule
    layer: str                          # of the policy, that set the rule: "torch", "default", "with_rules[0]", ...
    why: str
    module: str                         # path from the outermost module, a class for that one itself; "" outside any
    line: str                           # the call site in the user's code: "model.py:67"
    operands: tuple[torch.dtype, ...]   # of the tensors given, lists looked into
    computed_in: tuple[torch.dtype, ...]    # of the tensors the operator got, or the `dtype` that it was asked for
    casts: int                          # copies made for this call
    cached: int                         # casts of weights that were there already
    nbytes: int                         # read and written by the casts made
    shapes: tuple[tuple[int, ...], ...] = ()        # of the tensors given
    float8: str = ""                    # under an FP8 rule: its name, or why the call followed LOWER


class CastRecord:
    """What `record_casts` noted; prints as a table, the calls that cast most first.

    `compiled` is True where compiled code may have run operators unseen: `torch.compile` traced a region meanwhile, or
    nothing was recorded in a process that has compiled something. `merged` has the calls whose casts made distinct
    integers equal, known when the record has ended.
    """

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.compiled = False
        self.integers: list[tuple[RecordedCall, Tensor]] | None = None      # calls, and whether a cast merges integers
        self.merged: list[RecordedCall] = []
        self.float8_notes = Float8Notes()

    @property
    def casts(self) -> int:
        """Copies made."""
        return sum(call.casts for call in self.calls)

    @property
    def cached(self) -> int:
        """Casts of weights that were there already."""
        return sum(call.cached for call in self.calls)

    @property
    def nbytes(self) -> int:
        """Bytes read and written by the copies."""
        return sum(call.nbytes for call in self.calls)

    def float8(self) -> Float8Losses:
        """What FP8 lost, for each module, product and operand: a tuple that prints as a table. Syncs.

        Backward is in it, also where it was called after the record was taken; compiled code and DTensors are not.
        """
        return self.float8_notes.losses()

    def __str__(self) -> str:
        lines = self._table() if self.calls else [
            "no operator with a rule was called in a region that was entered while recording"
        ]
        if self.compiled:
            lines.append(
                "compiled code runs operators unseen: record the step before it is compiled, or under "
                'torch.compiler.set_stance("force_eager")'
            )
        return "\n".join([*lines, *self.merged_lines()])

    def merged_lines(self) -> list[str]:
        """A line for each place whose casts made distinct integers equal."""
        found = _grouped(
            self.merged,
            lambda call: (call.op, starred(call.module) or call.line, call.operands, call.computed_in),
        )
        return [
            f"distinct integers became equal: {some[0].op} in {_path([call.module for call in some]) or some[0].line}, "
            f"{_named(some[0].operands)} cast to {_named(some[0].computed_in)}"
            for some in found
        ]

    def _table(self) -> list[str]:
        lines = table([_HEADER, *(_row(calls) for calls in _alike(self.calls))], {"calls", "casts", "cached", "MB"})
        total = f"{_times(len(self.calls))}, {self.casts} casts made ({self.nbytes / 1e6:.3f} MB read and written), "
        fallbacks = _grouped(
            [call for call in self.calls if call.float8 not in ("", call.rule.name)],
            lambda call: (call.op, starred(call.module), call.float8),
        )
        return [
            *lines, f"{total}{self.cached} taken from the cache",
            *(
                f"not in FP8: {some[0].op} in {_path([call.module for call in some]) or 'no module'}, "
                f"{_times(len(some))}: {some[0].float8}"
                for some in fallbacks
            ),
        ]


def _row(calls: Sequence[RecordedCall]) -> tuple[str, ...]:
    """The cells of calls that differ in numbers only."""
    first = calls[0]
    numbers = ((each.casts, each.cached, each.nbytes) for each in calls)
    casts, cached, nbytes = map(sum, zip(*numbers, strict=True))
    return (
        str(len(calls)), first.op, f"{first.rule.name}, {first.layer}", _path([call.module for call in calls]),
        _named(first.operands), _named(first.computed_in), str(casts), str(cached), f"{nbytes / 1e6:.3f}",
    )


def _alike(calls: Sequence[RecordedCall]) -> list[list[RecordedCall]]:
    """Calls in groups that share a row of the table: modules that differ in numbers only, `blocks.0` and `blocks.1`."""
    groups = _grouped(
        calls,
        lambda call: (call.op, call.rule, call.layer, starred(call.module), call.operands, call.computed_in),
    )
    return sorted(groups, key=lambda group: -sum(call.nbytes for call in group))


def _grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _path(paths: Sequence[str]) -> str:
    """Modules' paths, alike but for numbers, as one key of `Policy.for_modules`: a star where the numbers differ."""
    parts = (set(names) for names in zip(*(path.split(".") for path in paths), strict=True))
    return ".".join(names.pop() if len(names) == 1 else "*" for names in parts)


def _named(dtypes: Sequence[torch.dtype]) -> str:
    """`float32 x2, bfloat16`"""
    runs = [(str(dtype).removeprefix("torch."), len(list(run))) for dtype, run in groupby(dtypes)]
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in runs)


def _times(calls: int) -> str:
    return "1 call" if calls == 1 else f"{calls} calls"
