"""How a kernel is declared (`jit_kernel`), and how lists of tensors are sorted into launches."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..configs import on_device as on_device
from ..tensor_lists import FlatList, all_aligned

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float64: tl.float64,
}
FOUR_WARPS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}  # of small kernels
_DTYPE = attrgetter("dtype")
_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


def jit_kernel(function: Callable[..., None]) -> Any:
    """Declare a kernel that is compiled once per set of `tl.constexpr` arguments, whatever the run-time arguments are.

    Triton would otherwise examine every integer and address for divisibility by 16 and compile another variant for each
    pattern: host time in every call, and a compilation during the capture of a CUDA graph, where code cannot be loaded.
    The kernels state the alignment that wide accesses need themselves (`tl.multiple_of`).
    """
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.annotation is not tl.constexpr]
    return triton.jit(do_not_specialize=names)(function)


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """Return the type of the arithmetic on `dtype`: float64 for float64, otherwise float32."""
    return tl.float64 if dtype is torch.float64 else tl.float32


@functools.cache
def list_constants(dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of a kernel that walks one list of this dtype."""
    return {"DTYPE": TRITON_DTYPES[dtype], "ACC": accumulator(dtype), "ITEMSIZE": dtype.itemsize}


def groups(*lists: Sequence[Tensor]) -> Iterator[tuple[list[list[Tensor]], list[int], bool]]:
    """Divide parallel lists into launches: one per combination of dtypes, and of alignment where it differs.

    Yields for each launch its part of every list, the indices of its rows, and whether all addresses are 16-byte
    aligned.
    """
    if all(len(set(map(_DTYPE, tensors))) == 1 for tensors in lists) and all(
        all_aligned(list(map(Tensor.data_ptr, tensors))) for tensors in lists
    ):
        yield [list(tensors) for tensors in lists], list(range(len(lists[0]))), True
        return
    rows: dict[tuple, list[int]] = {}
    for i, row in enumerate(zip(*lists, strict=True)):
        key = (*(t.dtype for t in row), all_aligned([t.data_ptr() for t in row]))
        rows.setdefault(key, []).append(i)
    for key, indices in rows.items():
        whole = len(indices) == len(lists[0])
        parts = [list(tensors) if whole else [tensors[i] for i in indices] for tensors in lists]
        yield parts, indices, key[-1]


def flat_rows(*lists: Sequence[Tensor]) -> tuple[Sequence[int], list[int], list[int]]:
    """Return the rows of parallel lists for kernels, the rows for PyTorch, and the rows without elements.

    A kernel addresses a row as flat memory: its tensors are dense and have the same strides.
    """
    n = len(lists[0])
    if (type(lists[0]) is FlatList and len(lists) == 1) or all(
        all(map(Tensor.is_contiguous, tensors)) and all(map(Tensor.numel, tensors)) for tensors in lists
    ):
        return range(n), [], []
    flat: list[int] = []
    other: list[int] = []
    empty: list[int] = []
    for i, row in enumerate(zip(*lists, strict=True)):
        first = row[0]
        if first.numel() == 0:
            empty.append(i)
        elif all(t.is_contiguous() for t in row) or (
            _is_dense(first) and all(t.stride() == first.stride() for t in row)
        ):
            flat.append(i)
        else:
            other.append(i)
    return flat, other, empty


def pick(tensors: Sequence[Tensor], rows: Sequence[int]) -> Sequence[Tensor]:
    """Return the tensors of these rows, in the rows' order."""
    return tensors if len(rows) == len(tensors) else [tensors[i] for i in rows]
