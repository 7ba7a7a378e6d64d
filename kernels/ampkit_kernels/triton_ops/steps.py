"""What the optimizers' launchers share: rows that one launch steps, their coefficients, the cache of a step's launches.

Hyperparameters reach a kernel as one row of coefficients per tensor. A small kernel per optimizer (`prepare_kernel`)
computes the rows in float64, from kernel arguments and from optional device scalars: a learning rate, factors on the
gradient, `found_inf`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ..configs import Config
from ..step_cache import Launch, StepCache
from .launch import TRITON_DTYPES, accumulator, groups, on_device, pick
from .pointer_table import Table, new_table, table_for

_BLOCK = 128     # rows of coefficients that a program computes


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

    `steps` goes into the table as its last column, unless it is empty. Tables are the thread's, or with `own_tables`
    new ones. The constants name the dtypes of columns 0, 1, 2 and the last.
    """
    found = []
    for parts, indices, aligned in groups(*lists):
        acc = accumulator(parts[0][0].dtype)
        dtypes = [TRITON_DTYPES[part[0].dtype] for part in parts]
        constants = {
            "PARAM": dtypes[0], "GRAD": dtypes[1], "MOMENT": dtypes[2] if len(dtypes) > 2 else dtypes[0],
            "COPY_TO": dtypes[-1], "ACC": acc, "ALIGNED": aligned,
        }
        columns = [*parts, pick(steps, indices)] if steps else parts
        config = configs[8 if acc is tl.float64 else 4]
        # Every table is made before the first launch: no two of them may be one, so alignment tells them apart.
        table = new_table(columns, config) if own_tables else table_for(columns, config, aligned=aligned)
        dtype = torch.float64 if acc is tl.float64 else torch.float32
        coefficients = torch.empty((table.n_tensors, n_coefficients), dtype=dtype, device=table.device)
        found.append(Rows(table, coefficients, constants, indices, len(parts)))
    return found


def fill(
    cache: StepCache, lists: Sequence[Sequence[Tensor]], steps: Sequence[Tensor], rows: Sequence[Rows],
    launch: Callable[..., None],
) -> None:
    """Keep a step over all rows of these lists; `launch` takes one of the `rows`, and options."""
    n = len(lists[0])
    launches = [Launch(one.table, None if len(one.indices) == n else one.indices, partial(launch, one)) for one in rows]
    cache.fill([*lists, steps] if steps else lists, len(lists), launches)


def prepare(
    kernel: Any,
    device: torch.device,
    n: int,
    coefficients: Tensor,
    lr: float | Tensor,
    multiplier: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    **arguments: Any,
) -> None:
    """Launch a `prepare_kernel` for `n` rows of coefficients, with the arguments that all of them share, and others.

    The pointer of a scalar that is absent is not read.
    """
    lr_is_tensor = isinstance(lr, Tensor)
    with on_device(device):
        kernel[(-(-n // _BLOCK),)](
            coefficients_ptr=coefficients, n=n,
            lr_ptr=lr if lr_is_tensor else coefficients, lr=0.0 if lr_is_tensor else lr, HAS_LR=lr_is_tensor,
            multiplier_ptr=coefficients if multiplier is None else multiplier, HAS_MULTIPLIER=multiplier is not None,
            grad_scale_ptr=coefficients if grad_scale is None else grad_scale, HAS_GRAD_SCALE=grad_scale is not None,
            found_inf_ptr=coefficients if found_inf is None else found_inf, HAS_FOUND_INF=found_inf is not None,
            **arguments, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )
