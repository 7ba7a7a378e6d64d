"""What an optimizer's step has found out about its lists, kept for the next step over lists that are alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, call, is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from .configs import is_capturing, place
from .tensors import ALIGNMENT, PLAIN, all_aligned

_DTYPE, _NBYTES, _SHAPE = attrgetter("dtype"), attrgetter("nbytes"), attrgetter("shape")
_Columns = list[list[int]]
_NEW_EVERY_STEP = 2     # parameters and gradients, which may be other objects


@dataclass
class Launch:
    """Rows of parallel lists that `run` steps with one launch, given this and options.

    `table` and `coefficients` are on the device, the latter with room for each row; `constants` are those of the
    kernel. `rows` is None for all rows. `n_wide` is the number of lists that a kernel walks: the table's columns behind
    them have one element per row.
    """

    run: Callable[..., None]
    table: Any
    coefficients: Tensor
    constants: dict[str, Any]
    rows: Sequence[int] | None
    n_wide: int


class StepCache:
    """The launches of a step over parallel lists, for a next step over lists that are alike.

    Pass one to `adamw_` or `sgd_` for each parameter group. The next step asks `fits` and then calls `launch`, which
    spares it all that the first one validated; where `fits` is False, the step is taken as the first one, and fills the
    cache again. Types, dtypes, sizes and layouts of parameters and gradients are compared, and those of other lists
    unless they hold the same objects at the same addresses. Addresses are sent where they differ. Belongs to the
    device, stream and thread of the step that filled it; never fits while a CUDA graph is being captured. Keeps none of
    the tensors alive.
    """

    def __init__(self) -> None:
        self._launches: list[Launch] = []
        self.device = torch.device("cpu")   # of the lists

    def fits(self, lists: Sequence[Sequence[Tensor]]) -> bool:
        """Whether `launch` can step these lists, which come in the order in which the cache was filled."""
        if not self._launches or len(lists) != len(self._facts):
            return False
        if is_capturing(self.device) or place(self.device) != self._place:
            return False
        try:
            for i, (tensors, kept, facts) in enumerate(zip(lists, self._kept, self._facts, strict=True)):
                if kept is not None and len(tensors) == len(kept) and all(map(is_, tensors, map(call, kept))):
                    continue
                if _facts(tensors) != facts:
                    return False
                if kept is not None:
                    self._kept[i] = list(map(ref, tensors))
            if any(map(Tensor.is_neg, lists[1])):
                return False
            columns = [list(map(Tensor.data_ptr, tensors)) for tensors in lists]
        except (RuntimeError, TypeError):   # no contiguity or no address, as sparse tensors; no tensor
            return False
        if columns != self._columns:
            if not self._may_lie_at(columns, lists):
                return False
            self._columns = columns
        return True

    def launch(self, options: Mapping[str, Any]) -> None:
        """Step the lists that `fits` has seen last. `options` are those of `adamw_` or `sgd_`, from `lr` on."""
        columns = self._columns
        for one in self._launches:
            one.table.refresh(columns if one.rows is None else [[column[i] for i in one.rows] for column in columns])
            one.run(one, **options)

    def fill(self, lists: Sequence[Sequence[Tensor]], launches: list[Launch]) -> None:
        """Keep the launches of a step over all rows of these lists.

        Keeps nothing under capture, nor for tensors that are not plain.
        """
        if is_capturing(lists[0][0].device):
            return
        self._launches, self.device = [], lists[0][0].device
        facts = list(map(_facts, lists))
        if not all(is_plain for _, _, _, is_plain in facts) or any(map(Tensor.is_neg, lists[1])):
            return
        self._place, self._facts = place(self.device), facts
        self._kept = [list(map(ref, tensors)) if i >= _NEW_EVERY_STEP else None for i, tensors in enumerate(lists)]
        self._columns = [list(map(Tensor.data_ptr, tensors)) for tensors in lists]
        self._n_wide = launches[0].n_wide
        self._aligned = _aligned_rows(self._columns[: self._n_wide])
        self._launches = launches

    def _may_lie_at(self, columns: _Columns, lists: Sequence[Sequence[Tensor]]) -> bool:
        """Whether what has moved is on the same device, and its rows as aligned as they were."""
        index = self.device.index if self.device.type == "cuda" else -1
        for i, (tensors, addresses) in enumerate(zip(lists, columns, strict=True)):
            if addresses != self._columns[i] and (
                set(map(Tensor.get_device, tensors)) != {index} or _facts(tensors) != self._facts[i]
            ):
                return False
        return _aligned_rows(columns[: self._n_wide]) == self._aligned


def _facts(tensors: Sequence[Tensor]) -> tuple[list[torch.dtype], list[int], Any, bool]:
    """What a kernel relies on beside addresses.

    Dtypes, bytes, shapes and strides unless all are contiguous, whether all are plain tensors.
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
