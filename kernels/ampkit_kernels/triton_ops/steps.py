"""What the optimizers' launchers share: rows that one launch steps, device scalars, the cache of a step's launches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..configs import Config
from ..step_cache import Launch, StepCache
from .launch import TRITON_DTYPES, accumulator, flat_rows, groups, pick
from .pointer_table import Table, step_table, table_for


@dataclass
class Rows:
    """Rows of parallel lists that one launch steps: their table, room for coefficients of each, constants.

    `n_wide` is the number of lists that a kernel walks; the table's columns behind them have one element per row.
    """

    table: Table
    coefficients: Tensor
    constants: dict[str, Any]
    indices: list[int]
    n_wide: int


def run_step(
    lists: Mapping[str, Sequence[Tensor] | None],
    per_row: Mapping[str, Sequence[Tensor] | None],
    launch: Callable[..., None],
    fallback: Callable[..., None],
    configs: Mapping[int, Config],
    n_coefficients: int,
    cache: StepCache | None,
    options: Mapping[str, Any],
) -> None:
    """One optimizer step over parallel lists: parameters, gradients, state, then copies or remainders, in this order.

    `per_row` are lists of one element per parameter: steps, streams. A list that is None is left out. `launch` takes
    `Rows` and options, `fallback` lists by name and options, for the rows that no kernel can address. The cache is
    filled where there are none of those.
    """
    lists = {name: tensors for name, tensors in lists.items() if tensors is not None}
    per_row = {name: tensors for name, tensors in per_row.items() if tensors is not None}
    flat, other, empty = flat_rows(*lists.values())
    rest = [*other, *empty]
    if rest:
        cache = None
        fallback(**{name: pick(tensors, rest) for name, tensors in {**lists, **per_row}.items()}, **options)
        if not flat:
            return
    writes = {"COPY": "copies" in lists, "REMAINDER": "remainders" in lists, "STOCHASTIC": "streams" in per_row}
    wide, narrow = ([pick(tensors, flat) for tensors in part.values()] for part in (lists, per_row))
    found = _rows_of(wide, narrow, writes, configs, n_coefficients, cache)
    for rows in found:
        launch(rows, **options)
    if cache is not None:
        launches = [
            Launch(rows.table, None if len(rows.indices) == len(flat) else rows.indices, partial(launch, rows))
            for rows in found
        ]
        cache.fill([*wide, *narrow], len(wide), launches)


def _rows_of(
    lists: Sequence[Sequence[Tensor]], per_row: Sequence[Sequence[Tensor]], writes: Mapping[str, bool],
    configs: Mapping[int, Config], n_coefficients: int, cache: StepCache | None,
) -> list[Rows]:
    """The lists cut into launches. A cache has tables of its own; without one they are the thread's.

    The table's last columns are the lists of one element per row. The constants name the dtypes of columns 0, 1, 2 and
    the last list.
    """
    found = []
    for parts, indices, aligned in groups(*lists):
        acc = accumulator(parts[0][0].dtype)
        dtypes = [TRITON_DTYPES[part[0].dtype] for part in parts]
        constants = {
            "PARAM": dtypes[0], "GRAD": dtypes[1], "MOMENT": dtypes[2] if len(dtypes) > 2 else dtypes[0],
            "COPY_TO": tl.int16 if writes["REMAINDER"] else dtypes[-1], "ACC": acc, "ALIGNED": aligned, **writes,
        }
        columns = [*parts, *(pick(tensors, indices) for tensors in per_row)]
        config = configs[8 if acc is tl.float64 else 4]
        # Every table is made before the first launch: no two of them may be one, so alignment tells them apart.
        table = table_for(columns, config, aligned=aligned) if cache is None else step_table(columns, config)
        dtype = torch.float64 if acc is tl.float64 else torch.float32
        coefficients = torch.empty((table.n_tensors, n_coefficients), dtype=dtype, device=table.device)
        found.append(Rows(table, coefficients, constants, indices, len(parts)))
    return found


@triton.jit
def rate_and_factor(one, lr_ptr, lr, multiplier_ptr, grad_scale_ptr, HAS_LR: tl.constexpr, HAS_MULTIPLIER: tl.constexpr,
                    HAS_GRAD_SCALE: tl.constexpr, MAXIMIZE: tl.constexpr):
    """The learning rate and the factor on gradients, as `one` times a number."""
    rate = one * lr
    if HAS_LR:
        rate = one * tl.load(lr_ptr).to(tl.float64)
    factor = one
    if HAS_MULTIPLIER:
        factor = factor * tl.load(multiplier_ptr).to(tl.float64)
    if HAS_GRAD_SCALE:
        inverse = (one / tl.load(grad_scale_ptr).to(tl.float64)).to(tl.float32)
        factor = factor * inverse.to(tl.float64)
    if MAXIMIZE:
        factor = -factor
    return rate, factor


def scalars(
    unused: Tensor, lr: float | Tensor, multiplier: Tensor | None, grad_scale: Tensor | None, found_inf: Tensor | None
) -> dict[str, Any]:
    """The arguments of a kernel for what an optimizer may be given as a device scalar; `unused` where there is none."""
    lr_is_tensor = isinstance(lr, Tensor)
    return {
        "lr_ptr": lr if lr_is_tensor else unused, "lr": 0.0 if lr_is_tensor else lr, "HAS_LR": lr_is_tensor,
        "multiplier_ptr": unused if multiplier is None else multiplier, "HAS_MULTIPLIER": multiplier is not None,
        "grad_scale_ptr": unused if grad_scale is None else grad_scale, "HAS_GRAD_SCALE": grad_scale is not None,
        "found_inf_ptr": unused if found_inf is None else found_inf, "HAS_FOUND_INF": found_inf is not None,
    }
