"""What the regions of a step did, call by call: which operators followed a rule, who set it, what was cast, where.

While a record is being taken, regions are given a mode that notes what it does; at other times nothing is asked and
nothing costs. A record holds names, dtypes and numbers, and no tensor.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ampkit.policy import casting
from ampkit.policy.module_paths import path_of
from ampkit.policy.op_table import Rule
from ampkit.policy.policy import Policy
from ampkit.region.mode import AutocastMode
from ampkit.region.region_cache import RegionCache
from ampkit.region.restoring import Restoring
from ampkit.region.weight_cache import WeightCache
from ampkit.torch_internals.dynamo import TracingContext
from ampkit.torch_internals.kernels import GENERAL
from ampkit.torch_internals.modules import CALL
from ampkit.torch_internals.operators import OpOverload

__all__ = ["CastRecord", "RecordedCall", "record_casts"]

_LIBRARIES = tuple(f"{Path(str(package.__file__)).parent}/" for package in (torch, sys.modules["ampkit"]))
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_HEADER = ("calls", "operator", "rule, set by", "module", "operands", "computed in", "casts", "cached", "MB")
_FLUSH_RIGHT = frozenset({"calls", "casts", "cached", "MB"})


class RecordedCall(NamedTuple):
    """One call of an operator that a rule names."""

    op: str                             # "aten::linear"
    rule: Rule
    layer: str                          # of the policy, that set the rule: "torch", "default", "with_rules[0]", ...
    why: str
    module: str                         # path from the outermost module, a class for that one itself; "" outside any
    line: str                           # of the user's code: "model.py:67"
    operands: tuple[torch.dtype, ...]   # of the tensors given, lists looked into
    computed_in: tuple[torch.dtype, ...]    # of the tensors the operator got, or the `dtype` that it was asked for
    casts: int                          # copies made for this call
    cached: int                         # casts of weights that were there already
    nbytes: int                         # read and written by the casts made


class CastRecord:
    """What `record_casts` noted; prints as a table, the calls that cast most first."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []

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

    def __str__(self) -> str:
        if not self.calls:
            return "no operator with a rule was called in a region that was entered while recording"
        rows = [_HEADER, *(_row(calls) for calls in _alike(self.calls))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if name in _FLUSH_RIGHT else cell.ljust(width)
                for name, cell, width in zip(_HEADER, row, widths, strict=True)
            ).rstrip()
            for row in rows
        ]
        calls = "1 call" if len(self.calls) == 1 else f"{len(self.calls)} calls"
        total = f"{calls}, {self.casts} casts made ({self.nbytes / 1e6:.3f} MB read and written), "
        return "\n".join([*lines, f"{total}{self.cached} taken from the cache"])


class record_casts(Restoring[CastRecord], contextlib.ContextDecorator):
    """Note what every region entered in here does, in all threads: forward, recomputation, and casts in backward.

    Shows why an operator was cast, and what casting costs in a step::

        with record_casts() as record:
            with autocast("cuda"):
                loss = model(x).mean()
            loss.backward()
        print(record)

    Operators that no rule names do not appear, for a region never sees them, nor do regions that were open before. What
    `torch.compile` traces is left out, unless its backend runs operators one by one ("eager"): record the function
    before it is compiled. FakeTensors are recorded like others, those of a GPU that is not there too. A record inside a
    record takes the regions for itself. The record holds no tensors. Never syncs.
    """

    def record(self) -> None:
        self.taken = CastRecord()

    def change(self) -> CastRecord:
        _taken.append(self.taken)
        return self.taken

    def restore(self, *, again: bool) -> None:
        _taken[:] = [record for record in _taken if record is not self.taken]      # not always the last: threads


_taken: list[CastRecord] = []


def current() -> CastRecord | None:
    """The record that is being taken, if any; the one begun last."""
    return next(reversed(_taken), None) if _taken else None     # threads: it may be empty by now


def new_mode(policies: tuple[tuple[str, Policy], ...], cache: WeightCache | RegionCache | None) -> AutocastMode:
    """A mode for these policies and this cache, which takes notes if a record is being taken."""
    record = current()
    return AutocastMode(policies, cache) if record is None else _RecordingMode(policies, cache, record)


class _RecordingMode(AutocastMode):
    """A mode that notes each call it prepares."""

    def __init__(
        self, policies: tuple[tuple[str, Policy], ...], cache: WeightCache | RegionCache | None, record: CastRecord
    ) -> None:
        super().__init__(policies, cache)
        self.kernels = GENERAL
        self.record = record
        self.reused = _Reused()
        if cache is not None:
            self.lookup = functools.partial(_look_up, cache, self.reused)

    def prepare(self, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.reused.casts = []
        call = super().prepare(op, args, kwargs)
        if call is not None and TracingContext.try_get() is None:
            self.record.calls.append(self._noted(op, (*args, *kwargs.values()), (*call[1], *call[2].values())))
        self.reused.casts = []
        return call

    def _noted(self, op: OpOverload, given: tuple[Any, ...], got: tuple[Any, ...]) -> RecordedCall:
        before, after = list(casting.tensors(given)), list(casting.tensors(got))
        cast = [(old, new) for old, new in zip(before, after, strict=True) if old is not new]
        made = [(old, new) for old, new in cast if not any(new is kept for kept in self.reused.casts)]
        policy = next(
            policy
            for device, policy in self.policies
            if op in policy.rules()
            and torch.is_autocast_enabled(device)
            and (len(self.policies) == 1 or any(tensor.device.type == device for tensor in before))
        )
        _, rule, layer, why = policy.explain(op)
        asked = tuple(value for value in got if rule is Rule.FLOAT32_DTYPE_ARG and isinstance(value, torch.dtype))
        module, line = _whereabouts(sys._getframe(1))
        return RecordedCall(
            op.name(), rule, layer, why, module, line, _dtypes(before), asked or _dtypes(after),
            len(made), len(cast) - len(made), sum(_nbytes(old) + _nbytes(new) for old, new in made),
        )


class _Reused(threading.local):
    """The casts that a thread's current call has from the cache."""

    def __init__(self) -> None:
        self.casts: list[Tensor] = []


def _look_up(cache: WeightCache | RegionCache, reused: _Reused, leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """`cache.cast`, noted if it was there. No method of the mode: the casts of a recompute would wait for the gc."""
    hits = cache.hits
    cast = cache.cast(leaf, dtype)
    if cache.hits > hits:
        reused.casts.append(cast)
    return cast


def _whereabouts(frame: FrameType | None) -> tuple[str, str]:
    """The path of the module that runs, and the line of the user's code that called the operator."""
    modules: list[Module] = []
    line = ""
    while frame is not None:
        code = frame.f_code
        if code is CALL:
            modules.append(frame.f_locals["self"])
        elif not line and not code.co_filename.startswith((*_LIBRARIES, "<")):
            line = f"{Path(code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    if not modules:
        return "", line
    return path_of(modules[-1], modules[0]) or type(modules[0]).__name__, line


def _nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; of a sparse one's, those that it stores; at a symbolic size, of its example's."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in _COMPRESSED:
        tensor = tensor.values()
    numel: Any = tensor.numel()
    if isinstance(numel, torch.SymInt):
        numel = numel.node.hint or 0        # asking for its value would fix the size
    return numel * tensor.element_size()


def _dtypes(tensors: Sequence[Tensor]) -> tuple[torch.dtype, ...]:
    return tuple(tensor.dtype for tensor in tensors)


def _row(calls: Sequence[RecordedCall]) -> tuple[str, ...]:
    """The cells of calls that differ in numbers only."""
    first = calls[0]
    casts, cached, nbytes = (sum(numbers) for numbers in zip(*(call[-3:] for call in calls), strict=True))
    return (
        str(len(calls)), first.op, f"{first.rule.name}, {first.layer}", _pattern(first.module), _named(first.operands),
        _named(first.computed_in), str(casts), str(cached), f"{nbytes / 1e6:.3f}",
    )


def _alike(calls: Sequence[RecordedCall]) -> list[list[RecordedCall]]:
    """Calls in groups that share a row of the table: modules that differ in numbers only, `blocks.0` and `blocks.1`."""
    groups: dict[Any, list[RecordedCall]] = {}
    for call in calls:
        key = (call.op, call.rule, call.layer, _pattern(call.module), call.operands, call.computed_in)
        groups.setdefault(key, []).append(call)
    return sorted(groups.values(), key=lambda group: -sum(call.nbytes for call in group))


def _pattern(path: str) -> str:
    """A module's path as a key of `Policy.for_modules` that means its likes too."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _named(dtypes: Sequence[torch.dtype]) -> str:
    """`float32 x2, bfloat16`"""
    runs = [(str(dtype).removeprefix("torch."), len(list(run))) for dtype, run in groupby(dtypes)]
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in runs)
