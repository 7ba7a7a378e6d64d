"""The launches of an optimizer's step, kept so that the next step over alike lists need not validate them again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, call, is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .configs import is_capturing, place
from .tensor_lists import ALIGNMENT, PLAIN, all_aligned

_DTYPE, _NBYTES, _SHAPE = attrgetter("dtype"), attrgetter("nbytes"), attrgetter("shape")
_Columns = list[list[int]]
_COMPARED_ALWAYS = 2  # lists: parameters and gradients, which may be other objects at every step


@dataclass
class Launch:
    """One launch of a step, over some rows of parallel lists.

    Args:
        run: takes this object and the step's options, and launches.
        table, coefficients: on the device: the addresses of the rows, and memory for the coefficients of each row.
        constants: the kernels' constants that follow from the lists.
        rows: indices of the rows; None for all.
        n_elementwise: how many lists have an element for each element of a row. Later ones, steps and streams, have one
            element per row.
    """

    run: Callable[..., None]
    table: Any
    coefficients: Tensor
    constants: tuple[Any, ...]
    rows: Sequence[int] | None
    n_elementwise: int


class StepCache:
    """The launches of a step over parallel lists, for a next step over alike lists.

    Pass one to `adamw_` or `sgd_` for each parameter group. The next step calls `fits` and then `launch`, which
    validates nothing; if `fits` is False, take the step as the first one, which fills the cache again. `fits` compares
    types, dtypes, sizes and layouts of parameters and gradients, and of other lists unless they hold the same objects.
    A cache belongs to the device, stream and thread of the step that filled it, and never fits while a CUDA graph is
    being captured. It keeps no tensor alive.
    """

    def __init__(self) -> None:
        self._launches: list[Launch] = []
        self.device = torch.device("cpu")  # of the lists

    def fits(self, lists: Sequence[Sequence[Tensor]]) -> bool:
        """Whether `launch` can step these lists, given in the order of `fill`."""
        if not self._launches or len(lists) != len(self._facts):
            return False
        if is_capturing(self.device) or place(self.device) != self._place:
            return False
        try:
            for i, (tensors, references, facts) in enumerate(zip(lists, self._references, self._facts, strict=True)):
                if (
                    references is not None
                    and len(tensors) == len(references)
                    and all(map(is_, tensors, map(call, references)))
                ):
                    continue  # the same objects
                if _facts(tensors) != facts:
                    return False
                if references is not None:
                    self._references[i] = list(map(ref, tensors))
            if any(map(Tensor.is_neg, lists[1])):
                return False
            columns = [list(map(Tensor.data_ptr, tensors)) for tensors in lists]
        except (RuntimeError, TypeError):  # tensors without contiguity or address, such as sparse ones; other objects
            return False
        if columns != self._columns:
            if not self._moved_alike(columns, lists):
                return False
            self._columns = columns
        return True

    def launch(self, options: Mapping[str, Any]) -> None:
        """Step the lists that `fits` compared last. `options` are the arguments of `adamw_` or `sgd_` from `lr` on."""
        columns = self._columns
        for launch in self._launches:
            rows = launch.rows
            launch.table.refresh(columns if rows is None else [[column[i] for i in rows] for column in columns])
            launch.run(launch, **options)

    def fill(self, lists: Sequence[Sequence[Tensor]], launches: list[Launch]) -> None:
        """Keep the launches of a step over all rows of these lists.

        Keeps nothing during a capture, nor for tensors that are not plain.
        """
        if is_capturing(lists[0][0].device):
            return
        self._launches, self.device = [], lists[0][0].device
        facts = list(map(_facts, lists))
        if not all(is_plain for _, _, _, is_plain in facts) or any(map(Tensor.is_neg, lists[1])):
            return
        self._place, self._facts = place(self.device), facts
        self._references = [
            list(map(ref, tensors)) if i >= _COMPARED_ALWAYS else None for i, tensors in enumerate(lists)
        ]
        self._columns = [list(map(Tensor.data_ptr, tensors)) for tensors in lists]
        self._n_elementwise = launches[0].n_elementwise
        self._aligned = _aligned_rows(self._columns[: self._n_elementwise])
        self._launches = launches

    def _moved_alike(self, columns: _Columns, lists: Sequence[Sequence[Tensor]]) -> bool:
        """Whether tensors that moved are on the same device with the same facts, and all rows as aligned as before."""
        index = self.device.index if self.device.type == "cuda" else -1
        for i, (tensors, addresses) in enumerate(zip(lists, columns, strict=True)):
            if addresses != self._columns[i] and (
                set(map(Tensor.get_device, tensors)) != {index} or _facts(tensors) != self._facts[i]
            ):
                return False
        return _aligned_rows(columns[: self._n_elementwise]) == self._aligned


def _facts(tensors: Sequence[Tensor]) -> tuple[list[torch.dtype], list[int], Any, bool]:
    """Return a list's properties other than addresses: dtypes, bytes, layouts, and whether all tensors are plain.

    The layouts are shapes and strides, or None where all tensors are contiguous.
    """
    layouts = None
    if not all(map(Tensor.is_contiguous, tensors)):
        layouts = list(map(_SHAPE, tensors)), list(map(Tensor.stride, tensors))
    return list(map(_DTYPE, tensors)), list(map(_NBYTES, tensors)), layouts, set(map(type, tensors)) <= PLAIN


def _aligned_rows(columns: _Columns) -> list[bool] | None:
    """Whether each row allows 128-bit accesses; None where all do."""
    if all(map(all_aligned, columns)):
        return None
    return [not any(address % ALIGNMENT for address in row) for row in zip(*columns, strict=True)]
