"""What the launchers of `adamw_` and `sgd_` share: rows of one launch, device scalars, the cache of launches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..configs import Config
from ..step_cache import Launch, StepCache
from .launch import TRITON_DTYPES, accumulator, flat_rows, groups, pick
from .pointer_table import step_table, table_for


def run_step(
    lists: Mapping[str, Sequence[Tensor]],
    run: Callable[..., None],
    fallback: Callable[..., None],
    configs: Mapping[int, Config],
    n_coefficients: int,
    cache: StepCache | None,
    options: Mapping[str, Any],
) -> None:
    """Take one optimizer step over parallel lists.

    Args:
        lists: by name: parameters, gradients, state, then remainders; and `steps` and `streams`, of one
            element per parameter, which come last in the table and in the cache.
        run: launches the kernels; takes a `Launch` and the options.
        fallback: steps the rows that no kernel can address; takes lists and the options.
        configs: launch parameters by bytes of the arithmetic.
        n_coefficients: coefficients of a row that the kernels compute on the device.
        cache: has tables of its own, and is filled where kernels can address all rows. None: the thread's tables.
        options: the arguments of `adamw_` or `sgd_` from `lr` on.
    """
    per_parameter = [name for name in ("steps", "streams") if name in lists]
    elementwise = [name for name in lists if name not in per_parameter]
    flat, other, empty = flat_rows(*(lists[name] for name in elementwise))
    rest = [*other, *empty]
    if rest:
        cache = None
        fallback({name: pick(tensors, rest) for name, tensors in lists.items()}, **options)
        if not flat:
            return
    picked = {name: pick(lists[name], flat) for name in (*elementwise, *per_parameter)}
    writes = {"REMAINDER": "remainders" in lists, "STOCHASTIC": "streams" in lists}
    launches = []
    for parts, indices, aligned in groups(*(picked[name] for name in elementwise)):
        acc = accumulator(parts[0][0].dtype)
        dtypes = [TRITON_DTYPES[part[0].dtype] for part in parts]
        constants = {
            "PARAM": dtypes[0],
            "GRAD": dtypes[1],
            "MOMENT": dtypes[2] if len(dtypes) > 2 else dtypes[0],
            "ACC": acc,
            "ALIGNED": aligned,
            **writes,
        }
        # All tables are made before the first launch, so no two launches may share one; alignment is in the key.
        columns = [*parts, *(pick(picked[name], indices) for name in per_parameter)]
        config = configs[8 if acc is tl.float64 else 4]
        table = table_for(columns, config, aligned=aligned) if cache is None else step_table(columns, config)
        dtype = torch.float64 if acc is tl.float64 else torch.float32
        coefficients = torch.empty((table.n_tensors, n_coefficients), dtype=dtype, device=table.device)
        rows = None if len(indices) == len(flat) else indices
        launches.append(Launch(run, table, coefficients, constants, rows, n_elementwise=len(parts)))
    for launch in launches:
        run(launch, **options)
    torch.autograd.graph.increment_version(picked["params"])
    if cache is not None:
        cache.fill(list(picked.values()), launches)


@triton.jit
def rate_and_factor(
    one,
    lr_ptr,
    lr,
    multiplier_ptr,
    grad_scale_ptr,
    HAS_LR: tl.constexpr,
    HAS_MULTIPLIER: tl.constexpr,
    HAS_GRAD_SCALE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
):
    """The learning rate and the factor on gradients, each times `one`, which gives shape and type."""
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
    unused: Tensor,
    lr: float | Tensor,
    multiplier: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> dict[str, Any]:
    """A kernel's arguments for the numbers that may be device scalars; `unused` is the pointer where there is none."""
    lr_is_tensor = isinstance(lr, Tensor)
    return {
        "lr_ptr": lr if lr_is_tensor else unused,
        "lr": 0.0 if lr_is_tensor else lr,
        "HAS_LR": lr_is_tensor,
        "multiplier_ptr": unused if multiplier is None else multiplier,
        "HAS_MULTIPLIER": multiplier is not None,
        "grad_scale_ptr": unused if grad_scale is None else grad_scale,
        "HAS_GRAD_SCALE": grad_scale is not None,
        "found_inf_ptr": unused if found_inf is None else found_inf,
        "HAS_FOUND_INF": found_inf is not None,
    }
