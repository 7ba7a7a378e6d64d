"""The step of bfloat16 weights or state on a CPU: torch's fused functions step float32 copies of a few elements.

Copies of weights with remainders are joined and split by integer operations on bit patterns, and stochastic rounding
adds 16 random bits to a pattern: see `ampkit_kernels.rounding`. The copies fit into a second-level cache. Small tensors
are copied together, large ones in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

import torch
from torch import Tensor

import ampkit_kernels as kernels
from ampkit.torch_private import foreach_add_, foreach_copy_, foreach_mul, unflattened

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
    copies = torch.empty((n_lists, space), dtype=torch.float32, device="cpu")
    lower = torch.empty(space, dtype=torch.int16, device="cpu")
    copied = [i for i in range(n_lists) if i != GRADS and not _is_float32(lists[i])]
    rounded = [i for i in copied if lists[i][0].dtype is torch.bfloat16 and not (joins and i == 0)]
    random = kernels.rounding.RandomBits(streams, space) if streams is not None and rounded else None
    # random bits of several tensors take longer than of one
    for rows, parts, first in _parts(lists, most, most if random is None else most // 8):
        stepped, n = parts[:n_lists], sum(map(Tensor.numel, parts[0]))
        stepped[GRADS] = list(map(Tensor.float, parts[GRADS]))
        if not all(map(Tensor.is_contiguous, stepped[GRADS])):
            stepped[GRADS] = list(map(Tensor.contiguous, stepped[GRADS]))
        if factor != 1.0:
            stepped[GRADS] = foreach_mul(stepped[GRADS], factor)
        for i in copied:
            stepped[i] = unflattened(copies[i, :n], parts[i])
            foreach_copy_(stepped[i], parts[i])
        if joins:
            alone = len(rows) == 1 and parts[-1][0].is_contiguous()
            low = parts[-1][0].view(-1) if alone else lower[:n]
            own = parts[-1] if alone else unflattened(low, parts[-1])
            foreach_copy_(own, parts[-1])
            kernels.rounding.join_(copies[0, :n], low)
            fused(rows, stepped)
            kernels.rounding.split_(copies[0, :n], low)
            foreach_copy_(parts[-1], own)
        else:
            fused(rows, stepped)
        if random is not None:
            drawn = [i for i in range(n_lists) if i != GRADS and i <= rounded[-1]]
            for i, bits in zip(drawn, random.draw(rows, parts[0], first), strict=False):
                if i in rounded:
                    kernels.rounding.round_(copies[i, :n], bits)
        for i in copied:
            foreach_copy_(parts[i], stepped[i])


def _is_float32(tensors: list[Tensor]) -> bool:
    return set(map(_dtype_of, tensors)) == {torch.float32} and all(map(Tensor.is_contiguous, tensors))


def _parts(lists: Lists, most: int, most_together: int) -> Iterator[tuple[list[int], Lists, int]]:
    """Cut lists into parts: tensors of several parameters, or of one in the order of its memory, or pieces of these.

    Yields:
        The indices of parameters, their tensors in each list, and the number of the first element in memory.
    """
    rows: list[int] = []
    n = 0
    for i, size in enumerate(map(Tensor.numel, lists[0])):
        if size > most_together:
            yield from _pieces(i, [tensors[i] for tensors in lists], most)
        elif size:
            if n + size > most:
                yield rows, [[tensors[j] for j in rows] for tensors in lists], 0
                rows, n = [], 0
            rows.append(i)
            n += size
    if rows:
        yield rows, [[tensors[j] for j in rows] for tensors in lists], 0


def _pieces(row: int, tensors: list[Tensor], most: int) -> Iterator[tuple[list[int], Lists, int]]:
    """`_parts` of one parameter."""
    param = tensors[0]
    strides = param.stride() if param.is_contiguous() else kernels.rounding.dense_strides(param)
    dense = [t if t.stride() == strides else _copied(t, strides) for t in tensors]
    flat = [t.as_strided((param.numel(),), (1,)) for t in dense]
    for first in range(0, param.numel(), most):
        yield [row], [[t[first : first + most]] for t in flat], first
    for i, (t, used) in enumerate(zip(tensors, dense, strict=True)):
        if t is not used and i != GRADS:
            t.copy_(used)


def _copied(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu").copy_(tensor)
