"""`CastRecord`, the result of `record_casts`: tables of calls and casts, and of sizes that tensor cores must pad."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from math import prod
from typing import NamedTuple, TypeVar

import torch

from ampkit.dtypes import dtype_name
from ampkit.policy.module_paths import starred
from ampkit.policy.rules import Rule
from ampkit.records.float8_losses import Float8Losses, Float8Notes
from ampkit.text_tables import table

__all__ = ["CastRecord", "MisalignedProduct", "MisalignedProducts", "RecordedCall"]

T = TypeVar("T")
Shape = tuple[int, ...]

_SUM_FIRST = frozenset({"addmm", "baddbmm", "addbmm"})  # their first argument is added to the product of the others
_PRODUCTS = frozenset({"mm", "bmm", "matmul", "linalg_matmul", *_SUM_FIRST})
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})
_HEADER = ("calls", "operator", "rule, set by", "module", "operands", "computed in", "casts", "cached", "MB")


class RecordedCall(NamedTuple):
    """One call of an operator with a rule."""

    op: str  # "aten::linear"
    rule: Rule
    layer: str  # the layer of the policy that set the rule: "torch", "default", "with_rules[0]"
    why: str  # the reason for the rule
    module: str  # path from the outermost module (for that one its class); "" outside any
    line: str  # the call site in the user's code: "model.py:67"
    operands: tuple[torch.dtype, ...]  # dtypes of the tensors in the arguments, lists included
    computed_in: tuple[torch.dtype, ...]  # their dtypes after the casts, or the `dtype` argument of the operator
    casts: int  # copies made for this call
    cached: int  # casts of weights that the cache had
    nbytes: int  # bytes read and written by the casts
    shapes: tuple[tuple[int, ...], ...] = ()  # of the tensors in the arguments; () for a nested tensor
    float8: str = ""  # under an FP8 rule: its name, or why the call followed LOWER
    upcast_by: str = ""  # the autograd nodes whose float32 results, of 16-bit inputs, this call cast back to 16 bits
    upcast_nbytes: int = 0  # bytes of these float32 tensors


class MisalignedProduct(NamedTuple):
    """A matrix product or convolution with a size that tensor cores must pad."""

    op: str  # "aten::linear"
    module: str  # as one key of `Policy.for_modules`; "" outside any
    line: str  # the call site in the user's code: "model.py:67"
    dtype: torch.dtype  # of the operands after the casts
    sizes: dict[str, int]  # {"rows": 4096, "in": 768, "out": 50257}
    padded: dict[str, int]  # the sizes to change, rounded up: {"out": 50264}
    calls: int  # with these sizes

    def cells(self) -> tuple[str, ...]:
        """Return the cells of this product's row in the table."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        change = ", ".join(f"{name} {self.sizes[name]} -> {size}" for name, size in self.padded.items())
        return str(self.calls), self.op, self.module, self.line, _names([self.dtype]), sizes, change


class MisalignedProducts(tuple[MisalignedProduct, ...]):
    """The products to pad; prints as a table."""

    def __str__(self) -> str:
        if not self:
            return "no size to pad in the matrix products and convolutions that were recorded"
        header = ("calls", "operator", "module", "line", "computed in", "sizes", "pad")
        return "\n".join(table([header, *(product.cells() for product in self)], {"calls"}))


class CastRecord:
    """Result of `record_casts`; prints as a table, calls that cast the most bytes first.

    `calls` has a `RecordedCall` for each call of an operator with a rule, in order. `compiled` is True if compiled code
    may have run operators that were not recorded: `torch.compile` traced a region in between, or nothing was recorded
    in a process that has compiled something. Only `float8` synchronizes with the device.
    """

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.compiled = False
        self.float8_notes = Float8Notes()

    @property
    def casts(self) -> int:
        """The number of casts, without casts reused from the cache."""
        return sum(call.casts for call in self.calls)

    @property
    def cached(self) -> int:
        """The number of weight casts that were reused from the cache."""
        return sum(call.cached for call in self.calls)

    @property
    def nbytes(self) -> int:
        """Bytes that the casts read and wrote."""
        return sum(call.nbytes for call in self.calls)

    def float8(self) -> Float8Losses:
        """Return FP8's rounding losses for each module, product and operand. Synchronizes with the device.

        Includes products of backward, even if it runs after the record has ended; leaves out compiled code and
        DTensors.

        Returns:
            A tuple of `Float8Loss` that prints as a table.
        """
        return self.float8_notes.losses()

    def misaligned(self, multiple: int = 8) -> MisalignedProducts:
        """Return the matrix products and convolutions with sizes that tensor cores must pad. Never synchronizes.

        Tensor cores read 16 bytes per access: 8 elements of float16 or bfloat16, 16 of FP8 or int8. If a size is not a
        multiple of that, a kernel pads it or computes without tensor cores. NVIDIA's "Train With Mixed Precision"
        (tensor core shape constraints) recommends multiples of 8 in batches, widths of layers, channels, vocabularies
        and sequences; its "Matrix Multiplication Background" for 128 bytes on an A100, which is `misaligned(64)`.

        The record checks all three sizes of `linear` and `matmul` and its variants, the channels of one group of
        convolutions, and the width of a head in attention. It leaves out float32, `einsum`, recurrent layers, and
        products with a vector, which padding does not help.

        Args:
            multiple: the number of 16-bit elements that a size should be a multiple of; twice as many of one byte.

        Returns:
            A tuple of `MisalignedProduct` that prints as a table.

        Raises:
            ValueError: `multiple` is below 1.
        """
        if not isinstance(multiple, int) or multiple < 1:
            raise ValueError(f"multiple is {multiple!r}; expected a number of 16-bit elements, such as 8")
        misaligned = []
        for call in self.calls:
            sizes, nbytes = _sizes(call.op, call.shapes), call.computed_in[0].itemsize if call.computed_in else 4
            if nbytes > 2 or 1 in sizes.values():
                continue
            step = multiple * 2 // nbytes
            padded = {name: (size // step + 1) * step for name, size in sizes.items() if size % step}
            if padded:
                misaligned.append(
                    MisalignedProduct(call.op, call.module, call.line, call.computed_in[0], sizes, padded, 1)
                )
        groups = _grouped(
            misaligned,
            lambda product: (
                product.op,
                starred(product.module),
                product.line,
                product.dtype,
                tuple(product.sizes.items()),
            ),
        )
        return MisalignedProducts(
            group[0]._replace(module=_path([product.module for product in group]), calls=len(group)) for group in groups
        )

    def __str__(self) -> str:
        lines = (
            self._table()
            if self.calls
            else ["no operator with a rule was called in a region that was entered while recording"]
        )
        if self.compiled:
            lines.append(
                "operators in compiled code are not recorded: record the step before it is compiled, or under "
                'torch.compiler.set_stance("force_eager")'
            )
        return "\n".join(lines)

    def _table(self) -> list[str]:
        lines = table([_HEADER, *map(_row, _row_groups(self.calls))], {"calls", "casts", "cached", "MB"})
        total = f"{_count(len(self.calls))}, {self.casts} casts ({self.nbytes / 1e6:.3f} MB read and written), "
        fallbacks = _grouped(
            [call for call in self.calls if call.float8 not in ("", call.rule.name)],
            lambda call: (call.op, starred(call.module), call.float8),
        )
        undone = _grouped(
            [call for call in self.calls if call.upcast_by],
            lambda call: (call.op, starred(call.module), call.upcast_by),
        )
        return [
            *lines,
            f"{total}{self.cached} reused from the cache",
            *(
                f"upcast and cast back: {calls[0].op} in {_path([call.module for call in calls]) or 'no module'}, "
                f"{_count(len(calls))}: {sum(call.upcast_nbytes for call in calls) / 1e6:.3f} MB of float32 from "
                f"{calls[0].upcast_by}"
                for calls in undone
            ),
            *(
                f"not in FP8: {calls[0].op} in {_path([call.module for call in calls]) or 'no module'}, "
                f"{_count(len(calls))}: {calls[0].float8}"
                for calls in fallbacks
            ),
        ]


def _sizes(op: str, shapes: Sequence[Shape]) -> dict[str, int]:
    """Return the sizes of the product that an operator computes from tensors of these shapes; {} if unknown."""
    name = op.removeprefix("aten::").partition(".")[0]
    if name in _SUM_FIRST:
        shapes = shapes[1:]
    if len(shapes) < 2 or min(len(shape) for shape in shapes[:2]) < 2:  # a vector, or a nested tensor
        return {}
    a, b = shapes[:2]
    if name == "linear":
        return {"rows": prod(a[:-1]), "in": a[-1], "out": b[0]}
    if name in _PRODUCTS:
        return {"rows": prod(a[:-1]) if len(b) == 2 else a[-2], "inner": a[-1], "columns": b[-1]}
    if name in _CONVOLUTIONS:  # [out, in / groups, *kernel]
        groups = max(1, a[1 - len(b)] // max(1, b[1]))
        return {"in channels": b[1], "out channels": b[0] // groups}
    if name in _TRANSPOSED:  # [in, out / groups, *kernel]; without a bias, `groups` is not in the shapes
        groups = max(1, shapes[2][0] // max(1, b[1])) if len(shapes) > 2 else 1
        return {"in channels": b[0] // groups, "out channels": b[1]}
    if name == "scaled_dot_product_attention" and len(shapes) > 2:
        return {"head": a[-1], "value": shapes[2][-1]}
    return {}


def _row(calls: Sequence[RecordedCall]) -> tuple[str, ...]:
    """Return the cells of the row for a group of `_row_groups`."""
    first = calls[0]
    casts, cached, nbytes = (sum(getattr(call, name) for call in calls) for name in ("casts", "cached", "nbytes"))
    return (
        str(len(calls)),
        first.op,
        f"{first.rule.name}, {first.layer}",
        _path([call.module for call in calls]),
        _names(first.operands),
        _names(first.computed_in),
        str(casts),
        str(cached),
        f"{nbytes / 1e6:.3f}",
    )


def _row_groups(calls: Sequence[RecordedCall]) -> list[list[RecordedCall]]:
    """Group calls by row of the table: paths of modules may differ in numbers, such as `blocks.0` and `blocks.1`."""
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
    """Paths of modules that differ only in numbers as one key of `Policy.for_modules`, with stars for those numbers."""
    parts = (set(names) for names in zip(*(path.split(".") for path in paths), strict=True))
    return ".".join(names.pop() if len(names) == 1 else "*" for names in parts)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    """Return the names of dtypes, repeated ones counted: `float32 x2, bfloat16`."""
    runs = [(dtype_name(dtype), len(list(run))) for dtype, run in groupby(dtypes)]
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in runs)


def _count(calls: int) -> str:
    return "1 call" if calls == 1 else f"{calls} calls"
