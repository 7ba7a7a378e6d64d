"""The step of bfloat16 weights or state on a CPU: torch's fused functions step float32 copies of a few elements.

Copies of weights with remainders are joined and split by integer operations on bit patterns, and stochastic rounding
adds 16 random bits to a pattern: see `ampkit_kernels.rounding`. The copies fit into a second-level cache. Small tensors
are copied together, large ones in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import torch
from torch import Tensor

import ampkit_kernels as kernels
from ampkit.torch_private import foreach_add_, foreach_copy_, unflattened

PIECE = 1 << 17  # elements that up to seven threads copy at a time: a power of 2, for the numbers of elements
GRADS = 1  # index of this list
_dtype_of = attrgetter("dtype")
Lists = list[list[Tensor]]
Fused = Callable[[list[int], Lists], None]


def step_in_float32(
    lists: Lists, remainders: list[Tensor] | None, streams: list[Tensor] | None, factor: float, fused: Fused
) -> None:
    """Step lists of plain CPU tensors in float32 and round each stored value once.

    Args:
        lists: parameters, gradients, then each list of state, which has one dtype for all parameters of a dtype. All
            are bfloat16 or float32, except gradients, which are only read.
        remainders: one for each parameter, all of which are bfloat16. None: no remainders.
        streams: one for each parameter, advanced in place. None: values are rounded to nearest.
        factor: gradients are multiplied by it.
        fused: takes indices of parameters, and float32 lists of these or of a piece of one, which it steps in place.

    Raises:
        ValueError: lists of different shapes.
    """
    every = lists if remainders is None else [*lists, remainders]
    kernels.check_parallel("step", params=lists[0], **{f"list {i}": tensors for i, tensors in enumerate(every[1:])})
    if remainders is not None:  # as the integers that they are: some of the patterns are NaN in float16
        every = [*lists, [each.view(torch.int16) for each in remainders]]
    if streams is not None:
        foreach_add_(streams, [kernels.rounding.STEP] * len(streams))
    for dtype in set(map(_dtype_of, lists[0])):
        rows = [i for i, param in enumerate(lists[0]) if param.dtype is dtype]
        chosen = every if len(rows) == len(lists[0]) else [[tensors[i] for i in rows] for tensors in every]
        of_rows = None if streams is None else [streams[i] for i in rows]
        _step_alike(
            chosen,
            remainders is not None,
            of_rows,
            factor,
            lambda part, stepped, rows=rows: fused([rows[i] for i in part], stepped),
        )


def _step_alike(lists: Lists, joins: bool, streams: list[Tensor] | None, factor: float, fused: Fused) -> None:
    """`step_in_float32` of parameters of one dtype; if `joins`, the last list has remainders."""
    n_lists = len(lists) - joins
    most = PIECE << max(0, torch.get_num_threads().bit_length() - 3)
    space = min(most, sum(map(Tensor.numel, lists[0])))
    memory = torch.empty((n_lists, space), dtype=torch.float32, device="cpu")
    lower = torch.empty(space, dtype=torch.int16, device="cpu")
    stored = [i for i in range(n_lists) if i != GRADS and not _is_float32(lists[i])]
    copied = stored if factor == 1.0 and _is_float32(lists[GRADS]) else [*stored, GRADS]
    rounded = [i for i in stored if lists[i][0].dtype is torch.bfloat16 and not (joins and i == 0)]
    random = kernels.rounding.RandomBits(streams, space) if streams is not None and rounded else None
    flat: Sequence[Tensor] = ()
    for rows, parts, n, first in _parts(lists, most):
        if not flat or len(flat[0]) != n:
            flat = memory[:, :n].unbind()
        is_piece = len(rows) == 1 and parts[0][0].dim() == 1
        stepped = parts[:n_lists]
        for i in copied:
            stepped[i] = [flat[i]] if is_piece else unflattened(flat[i], parts[i])
        if copied:
            foreach_copy_([t for i in copied for t in stepped[i]], [t for i in copied for t in parts[i]])
        if factor != 1.0:
            flat[GRADS].mul_(factor)
        if joins:
            alone = is_piece and parts[-1][0].is_contiguous()
            low = parts[-1][0] if alone else lower[:n]
            own = parts[-1] if alone else unflattened(low, parts[-1])
            foreach_copy_(own, parts[-1])
            kernels.rounding.join_(flat[0], low)
            fused(rows, stepped)
            kernels.rounding.split_(flat[0], low)
            foreach_copy_(parts[-1], own)
        else:
            fused(rows, stepped)
        if random is not None:
            drawn = [i for i in range(n_lists) if i != GRADS and i <= rounded[-1]]
            for i, bits in zip(drawn, random.draw(rows, parts[0], first), strict=False):
                if i in rounded:
                    kernels.rounding.round_(flat[i], bits)
        if stored:
            foreach_copy_([t for i in stored for t in parts[i]], [t for i in stored for t in stepped[i]])


def _is_float32(tensors: list[Tensor]) -> bool:
    return set(map(_dtype_of, tensors)) == {torch.float32} and all(map(Tensor.is_contiguous, tensors))


def _parts(lists: Lists, most: int) -> Iterator[tuple[list[int], Lists, int, int]]:
    """Cut lists into parts: tensors of several parameters, or pieces of one in the order of its memory.

    Yields:
        The indices of parameters, their tensors in each list, the number of their elements, and the number of the
        first element in memory.
    """
    rows: list[int] = []
    n = 0
    for i, size in enumerate(map(Tensor.numel, lists[0])):
        if size > most:
            for part, length, first in _pieces([tensors[i] for tensors in lists], most):
                yield [i], part, length, first
        elif size:
            if n + size > most:
                yield rows, [[tensors[j] for j in rows] for tensors in lists], n, 0
                rows, n = [], 0
            rows.append(i)
            n += size
    if rows:
        yield rows, [[tensors[j] for j in rows] for tensors in lists], n, 0


def _pieces(tensors: list[Tensor], most: int) -> Iterator[tuple[Lists, int, int]]:
    """`_parts` of one parameter."""
    param = tensors[0]
    strides = param.stride() if param.is_contiguous() else kernels.rounding.dense_strides(param)
    dense = [t if t.stride() == strides else _copied(t, strides) for t in tensors]
    flat = [t.as_strided((param.numel(),), (1,)).split(most) for t in dense]
    for number, piece in enumerate(zip(*flat, strict=True)):
        yield [[t] for t in piece], len(piece[0]), number * most
    for i, (t, used) in enumerate(zip(tensors, dense, strict=True)):
        if t is not used and i != GRADS:
            t.copy_(used)


def _copied(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu").copy_(tensor)
