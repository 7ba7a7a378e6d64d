"""What the optimizers' launchers share: rows that one launch steps, and plans for lists that stay the same.

A step over a thousand parameters spends most of its host time examining its lists. A `Plan` keeps the result, with the
tables that it needs. The next step checks only what decides whether a kernel may touch the memory: dtype, size and
contiguity of parameters and gradients, that the other lists hold the same objects of the same size, and all addresses.
New addresses are sent; any other difference invalidates the plan, and the lists are validated as for the first time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..configs import Config, is_capturing
from ..tensors import ALIGNMENT, all_aligned
from .launch import TRITON_DTYPES, accumulator, groups, on_device
from .pointer_table import Table, place, table_for, uploaded

_DTYPE, _NBYTES = attrgetter("dtype"), attrgetter("nbytes")
_PARAMS_AND_GRADS = 2


@dataclass
class Rows:
    """Rows of parallel lists that one launch steps: their table, a row of coefficients for each, constants.

    `steps_column` is where the table has the step counts, if it has any.
    """

    table: Table
    coefficients: Tensor
    constants: dict[str, Any]
    indices: list[int]
    steps_column: int


def rows_of(
    lists: Sequence[Sequence[Tensor]],
    steps: Sequence[Tensor],
    configs: Mapping[int, Config],
    n_coefficients: int,
    *,
    own_tables: bool = False,
) -> list[Rows]:
    """Parallel lists (parameters, gradients, at most three of state, copies) cut into launches.

    `steps` goes into the table as its last column, unless it is empty. Tables come from the cache, or with `own_tables`
    are new, and then hold no addresses yet. The constants name the dtypes of columns 0, 1, 2 and the last.
    """
    found = []
    for parts, indices, aligned in groups(*lists):
        acc = accumulator(parts[0][0].dtype)
        dtypes = [TRITON_DTYPES[part[0].dtype] for part in parts]
        constants = {
            "PARAM": dtypes[0], "GRAD": dtypes[1], "MOMENT": dtypes[2] if len(dtypes) > 2 else dtypes[0],
            "COPY_TO": dtypes[-1], "ACC": acc, "ALIGNED": aligned,
        }
        config, device = configs[8 if acc is tl.float64 else 4], parts[0][0].device
        columns = [*parts, [steps[i] for i in indices]] if steps else parts
        if own_tables:
            table = uploaded(len(columns), list(map(Tensor.numel, parts[0])), config, device)
        else:
            table = table_for(columns, config)
        dtype = torch.float64 if acc is tl.float64 else torch.float32
        coefficients = torch.empty((table.n_tensors, n_coefficients), dtype=dtype, device=device)
        found.append(Rows(table, coefficients, constants, indices, len(parts)))
    return found


class Plan:
    """What is known of the parallel lists of a step, and the launches that serve them; see the module.

    Belongs to the device, stream and thread that it was made for. `launch` is called with each `Rows` and the options
    of `run`.
    """

    def __init__(
        self,
        lists: Sequence[Sequence[Tensor]],
        steps: Sequence[Tensor],
        configs: Mapping[int, Config],
        n_coefficients: int,
        launch: Callable[..., None],
    ) -> None:
        self.device = lists[0][0].device
        self._place = place(self.device)
        self._launch = launch
        with on_device(self.device):
            self._rows = rows_of(lists, steps, configs, n_coefficients, own_tables=True)
        everything = [*lists, steps] if steps else list(lists)
        self._kept = [list(tensors) for tensors in everything[_PARAMS_AND_GRADS:]]
        self._dtypes = [list(map(_DTYPE, tensors)) for tensors in everything]
        self._sizes = [list(map(_NBYTES, tensors)) for tensors in everything]
        self._addresses: list[list[int]] = [[] for _ in everything]
        self._contiguous = list(map(Tensor.is_contiguous, lists[0]))
        self._strides = [(i, lists[0][i].stride()) for i, plain in enumerate(self._contiguous) if not plain]
        self._aligned = _alignments([list(map(Tensor.data_ptr, tensors)) for tensors in lists])
        self._lengths = list(map(len, everything))
        self._n_lists = len(lists)
        # Only a tensor of one element can be contiguous and lazily negated.
        self._single = [i for i, t in enumerate(lists[1]) if t.numel() == 1]

    def run(self, lists: Sequence[Sequence[Tensor]], options: Mapping[str, Any]) -> bool:
        """Step these lists; False, with nothing done, if they differ, in another stream or thread, or under capture.

        The lists come in the order that the plan was made with, the steps last. The caller has checked that they are
        plain tensors.
        """
        if is_capturing(self.device) or place(self.device) != self._place:
            return False
        try:
            if not self._are_alike(lists):
                return False
            columns = [list(map(Tensor.data_ptr, tensors)) for tensors in lists]
        except RuntimeError:  # sparse tensors have no contiguity, and some others no address
            return False
        if columns != self._addresses:
            if not self._may_lie_at(columns, lists):
                return False
            n = len(columns[0])
            for rows in self._rows:
                whole = len(rows.indices) == n
                rows.table.refresh(columns if whole else [[column[i] for i in rows.indices] for column in columns])
            self._addresses = columns
        for rows in self._rows:
            self._launch(rows, **options)
        return True

    def _are_alike(self, lists: Sequence[Sequence[Tensor]]) -> bool:
        """Whether the lists are the planned ones, addresses aside."""
        if list(map(len, lists)) != self._lengths:
            return False
        params, grads, *kept = lists
        # Parameters and gradients may be other objects, if they have the same dtype, size and layout.
        for dtypes, sizes, tensors in zip(self._dtypes, self._sizes, (params, grads), strict=False):
            if (
                list(map(_DTYPE, tensors)) != dtypes
                or list(map(_NBYTES, tensors)) != sizes
                or list(map(Tensor.is_contiguous, tensors)) != self._contiguous
                or (self._strides and not self._have_strides(tensors))
            ):
                return False
        # The others must be the same objects; `_may_lie_at` checks those that have moved as closely.
        for known, tensors in zip(self._kept, kept, strict=True):
            if not all(map(is_, known, tensors)):
                return False
        for sizes, tensors in zip(self._sizes[_PARAMS_AND_GRADS : self._n_lists], kept, strict=False):
            if list(map(_NBYTES, tensors)) != sizes:
                return False
        return not (self._single and any(map(Tensor.is_neg, map(grads.__getitem__, self._single))))

    def _have_strides(self, tensors: Sequence[Tensor]) -> bool:
        return all(tensors[i].stride() == stride for i, stride in self._strides)

    def _may_lie_at(self, columns: list[list[int]], lists: Sequence[Sequence[Tensor]]) -> bool:
        """Whether lists at new addresses are on the planned device, otherwise unchanged, and aligned as planned."""
        index = lists[0][0].get_device()
        still_aligned = self._aligned is None
        for column, (addresses, before) in enumerate(zip(columns, self._addresses, strict=True)):
            if addresses == before:
                continue
            tensors = lists[column]
            if tensors[0].device != self.device or set(map(Tensor.get_device, tensors)) != {index}:
                return False
            is_step = column == self._n_lists
            still_aligned = still_aligned and (is_step or all_aligned(addresses))
            if column >= _PARAMS_AND_GRADS and not (
                list(map(_DTYPE, tensors)) == self._dtypes[column]
                and list(map(_NBYTES, tensors)) == self._sizes[column]
                and (is_step or list(map(Tensor.is_contiguous, tensors)) == self._contiguous)
                and (is_step or self._have_strides(tensors))
            ):
                return False
        return still_aligned or _alignments(columns[: self._n_lists]) == self._aligned


def _alignments(columns: Sequence[Sequence[int]]) -> list[bool] | None:
    """Whether each row allows 128-bit accesses; None where all do."""
    if all(map(all_aligned, columns)):
        return None
    return [not any(address % ALIGNMENT for address in row) for row in zip(*columns, strict=True)]
