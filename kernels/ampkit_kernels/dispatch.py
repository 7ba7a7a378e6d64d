"""Which implementation serves a call, and why: Triton on a CUDA device that can run it, PyTorch elsewhere.

`impl="auto"` may choose; `"triton"` and `"reference"` are explicit requests, and one that cannot be met raises.
Triton is imported here at first use, never when the package is imported.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .tensors import FlatList, is_dense

IMPLS = ("auto", "triton", "reference")
MINIMUM_CAPABILITY = (8, 0)


class TritonUnavailable(RuntimeError):
    """`impl="triton"` was asked for where it cannot run; the message says why."""


def interpreting() -> bool:
    """Whether Triton runs, or would run, in its interpreter: TRITON_INTERPRET as Triton itself reads it."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def _triton_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'triton>=3.6'"
    return None


@functools.cache
def _device_too_old(index: int) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    if capability < MINIMUM_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(index)} has compute capability {capability[0]}.{capability[1]}; "
            f"the kernels need {MINIMUM_CAPABILITY[0]}.{MINIMUM_CAPABILITY[1]} or newer"
        )
    return None


def why_not_triton(device: torch.device) -> str | None:
    """None where the Triton kernels can run on `device`, else a sentence with the reason."""
    missing = _triton_missing()
    if missing:
        return missing
    if device.type == "cpu":
        if interpreting():
            return None
        return (
            "the tensors are on the CPU: set TRITON_INTERPRET=1 before Triton is imported to interpret there"
        )
    if device.type != "cuda":
        return f"the tensors are on {device.type}; the kernels run on CUDA devices"
    if interpreting():
        return (
            "TRITON_INTERPRET is set: the interpreter copies its arguments to the host but not the memory "
            "that a pointer table names; unset TRITON_INTERPRET, or move the tensors to the CPU"
        )
    if torch.version.hip is not None:
        return "the kernels have not been verified on ROCm"
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _device_too_old(index)


def uses_triton(impl: str, device: torch.device) -> bool:
    """Whether a call with this `impl` on this device goes to Triton; raises when an explicit request cannot be met."""
    if impl == "auto":
        # The interpreter is for tests: "auto" never selects it.
        return device.type == "cuda" and why_not_triton(device) is None
    if impl == "triton":
        reason = why_not_triton(device)
        if reason:
            raise TritonUnavailable(f"impl='triton' cannot run here: {reason}")
        return True
    if impl == "reference":
        return False
    raise ValueError(f"unknown impl {impl!r}; expected 'auto', 'triton' or 'reference'")


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on this device now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def served(
    impl: str, op: str, *lists: Sequence[Tensor], torch_ops: ModuleType = reference, keep_empty: bool = False
) -> list[tuple[ModuleType, Sequence[Sequence[Tensor]], Sequence[int]]]:
    """Which implementation serves which rows of parallel lists: (implementation, its part of each list, row indices).

    An implementation is a module that has the operation under its public name: `triton_ops` for the rows that a kernel
    can address as flat memory, where `impl` and the device allow it, and `torch_ops` for the others. With Triton,
    rows without elements are dropped, or with `keep_empty` go to `torch_ops`.
    """
    n = len(lists[0])
    if not n:
        return []
    if not uses_triton(impl, lists[0][0].device):
        return [(torch_ops, lists, range(n))]
    if type(lists[0]) is FlatList and len(lists) == 1:
        return [(triton_ops(), lists, range(n))]
    flat, other = split(impl, op, *lists)
    if len(flat) == n:
        return [(triton_ops(), lists, flat)]
    if keep_empty and len(flat) + len(other) < n:
        other += [i for i, t in enumerate(lists[0]) if not t.numel()]
    return [
        (ops, [pick(tensors, rows) for tensors in lists], rows)
        for ops, rows in ((triton_ops(), flat), (torch_ops, other)) if rows
    ]


@functools.cache
def triton_ops() -> ModuleType:
    """The operations as kernels, imported when they are first wanted."""
    return importlib.import_module(".triton_ops", __package__)


def split(impl: str, op: str, *lists: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Indices that a kernel can address as flat memory, and indices left to PyTorch.

    A row of parallel lists is flat when every tensor in it is dense and all have the same strides. Rows
    without elements are in neither. With `impl="triton"` a row that is not flat raises instead.
    """
    if all(all(map(Tensor.is_contiguous, tensors)) and all(map(Tensor.numel, tensors)) for tensors in lists):
        return list(range(len(lists[0]))), []
    flat: list[int] = []
    other: list[int] = []
    for i, row in enumerate(zip(*lists, strict=True)):
        first = row[0]
        if first.numel() == 0:
            continue
        if all(t.is_contiguous() for t in row) or (
            is_dense(first) and all(t.stride() == first.stride() for t in row)
        ):
            flat.append(i)
        else:
            other.append(i)
    if other and impl == "triton":
        strides = [tuple(tensors[other[0]].stride()) for tensors in lists]
        raise ValueError(
            f"{op}: impl='triton' needs dense tensors with the same strides across lists; tensor {other[0]} "
            f"has strides {strides}: use impl='auto', which leaves such tensors to PyTorch, "
            f"or pass tensor.contiguous()"
        )
    return flat, other


def pick(tensors: Sequence[Tensor], indices: Sequence[int]) -> list[Tensor]:
    """The tensors at these indices."""
    return list(tensors) if len(indices) == len(tensors) else [tensors[i] for i in indices]
