"""What `record_casts` noted: calls by kind, their casts and bytes, and sizes that tensor cores take badly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ampkit.dtypes import dtype_name
from ampkit.policy.module_paths import starred
from ampkit.policy.rules import Rule
from ampkit.region.float8_losses import Float8Losses, Float8Notes
from ampkit.text_tables import table

__all__ = ["CastRecord", "MisalignedProduct", "MisalignedProducts", "RecordedCall"]

T = TypeVar("T")
Shape = tuple[int, ...]

_ADDED = frozenset({"addmm", "baddbmm", "addbmm"})     # what is added comes first
_PRODUCTS = frozenset({"mm", "bmm", "matmul", "linalg_matmul", *_ADDED})
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
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


class MisalignedProduct(NamedTuple):
    """A matrix product or convolution with a size that is no multiple of what tensor cores take at once."""

    op: str                     # "aten::linear"
    module: str                 # as one key of `Policy.for_modules`; "" outside any
    line: str                   # the call site in the user's code: "model.py:67"
    dtype: torch.dtype          # of the operands it computed with
    sizes: dict[str, int]       # {"rows": 4096, "in": 768, "out": 50257}
    padded: dict[str, int]      # those of them to change, to the next multiple: {"out": 50264}
    calls: int

    def cells(self) -> tuple[str, ...]:
        """The cells of a row of the table."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        change = ", ".join(f"{name} {self.sizes[name]} -> {size}" for name, size in self.padded.items())
        return str(self.calls), self.op, self.module, self.line, _named([self.dtype]), sizes, change


class MisalignedProducts(tuple[MisalignedProduct, ...]):
    """The rows; `str()` of it is a table."""

    def __str__(self) -> str:
        if not self:
            return "no size to pad in the matrix products and convolutions that were recorded"
        header = ("calls", "operator", "module", "line", "computed in", "sizes", "pad")
        return "\n".join(table([header, *(one.cells() for one in self)], {"calls"}))


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

    def misaligned(self, multiple: int = 8) -> MisalignedProducts:
        """Matrix products and convolutions with sizes that tensor cores take badly: a tuple that prints as a table.

        Tensor cores read 16 bytes at once: 8 elements of float16 or bfloat16, 16 of FP8 or int8. Where a size is no
        multiple of that, a kernel pads it or computes without them. NVIDIA's "Train With Mixed Precision" (tensor core
        shape constraints) asks for multiples of 8 in batches, widths of layers, channels, vocabularies and sequences;
        its "Matrix Multiplication Background" for 128 bytes on an A100, which is `misaligned(64)`.

        Looked at are `linear`, `matmul` and its kind with all three sizes, convolutions with the channels of one group,
        and attention with the width of a head; not what is computed in float32, `einsum`, recurrent layers, and
        products with a vector, which no padding helps.

        Args:
            multiple: elements of 16 bits; of those of one byte, twice as many.

        Raises:
            ValueError: a `multiple` below 1.
        """
        if multiple < 1:
            raise ValueError(f"multiple is {multiple}; expected a number of elements of 16 bits, such as 8")
        found = []
        for call in self.calls:
            sizes, nbytes = _sizes(call.op, call.shapes), call.computed_in[0].itemsize if call.computed_in else 4
            if nbytes > 2 or 1 in sizes.values():
                continue
            step = multiple * 2 // nbytes
            padded = {name: -(-size // step) * step for name, size in sizes.items() if size % step}
            if padded:
                found.append(
                    MisalignedProduct(call.op, call.module, call.line, call.computed_in[0], sizes, padded, 1)
                )
        groups = _grouped(
            found, lambda one: (one.op, starred(one.module), one.line, one.dtype, tuple(one.sizes.items()))
        )
        return MisalignedProducts(
            some[0]._replace(module=_path([one.module for one in some]), calls=len(some)) for some in groups
        )

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


def _sizes(op: str, shapes: Sequence[Shape]) -> dict[str, int]:
    """The sizes of the product that an operator computes from tensors of these shapes; none of what is not known."""
    name = op.removeprefix("aten::").partition(".")[0]
    if name in _ADDED:
        shapes = shapes[1:]
    if len(shapes) < 2 or min(len(shape) for shape in shapes[:2]) < 2:      # a vector, or a nested tensor
        return {}
    a, b = shapes[:2]
    if name == "linear":
        return {"rows": prod(a[:-1]), "in": a[-1], "out": b[0]}
    if name in _PRODUCTS:
        return {"rows": prod(a[:-1]) if len(b) == 2 else a[-2], "inner": a[-1], "columns": b[-1]}
    if name in _CONVOLUTIONS:       # [out, in / groups, *kernel]
        groups = max(1, a[1 - len(b)] // max(1, b[1]))
        return {"in channels": b[1], "out channels": b[0] // groups}
    if name in _TRANSPOSED:         # [in, out / groups, *kernel]; without a bias, `groups` is not in the shapes
        groups = max(1, shapes[2][0] // max(1, b[1])) if len(shapes) > 2 else 1
        return {"in channels": b[0] // groups, "out channels": b[1]}
    if name == "scaled_dot_product_attention" and len(shapes) > 2:
        return {"head": a[-1], "value": shapes[2][-1]}
    return {}


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
    runs = [(dtype_name(dtype), len(list(run))) for dtype, run in groupby(dtypes)]
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in runs)


def _times(calls: int) -> str:
    return "1 call" if calls == 1 else f"{calls} calls"
