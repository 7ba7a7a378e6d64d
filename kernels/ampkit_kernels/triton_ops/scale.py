"""Single numbers of a gradient scaler, in one launch each: inverse scale, next scale, counts of updates.

Contract. scale: one float32 element; growth_tracker and counters: one int32 element each; found_inf: one float32
element; all on one CUDA device. `inverse_scale` reads the scale and returns new memory. `update_scale_` writes the
state in place, as torch's `_amp_update_scale_` does: products with the scale are taken in float64 and rounded once, a
growth that would reach inf is dropped. `tally_update_` adds one update to int64 totals. None synchronizes. PyTorch's
operators take four launches for the first, about fifty with hysteresis for the second, and thirty for the third.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .launch import jit_kernel, on_device

_ONE_WARP: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}


@jit_kernel
def inverse_kernel(scale_ptr, result_ptr):
    scale = tl.load(scale_ptr)
    tl.store(result_ptr, (1.0 / scale.to(tl.float64)).to(tl.float32))
    tl.store(result_ptr + 1, 0.0)
    tl.store(result_ptr + 2, scale)


@jit_kernel
def update_kernel(
    scale_ptr,
    tracker_ptr,
    left_ptr,
    updates_ptr,
    overflows_ptr,
    found_inf_ptr,
    growth_factor: tl.float64,
    backoff_factor: tl.float64,
    growth_interval: tl.int64,
    min_scale: tl.float64,
    max_scale: tl.float64,
    hysteresis: tl.int32,
    tolerance: tl.float64,
    REFILLS_WHEN_CLEAN: tl.constexpr,
):
    scale, tracker, left = tl.load(scale_ptr), tl.load(tracker_ptr), tl.load(left_ptr)
    overflow = tl.load(found_inf_ptr) != 0.0
    updates, overflows = tl.load(updates_ptr) + 1, tl.load(overflows_ptr) + overflow.to(tl.int32)
    grown = (scale.to(tl.float64) * tl.full((), growth_factor, tl.float64)).to(tl.float32)
    grown = tl.where(grown - grown == 0.0, grown, scale)
    shrunk = (scale.to(tl.float64) * tl.full((), backoff_factor, tl.float64)).to(tl.float32)
    finite_run = tracker + 1
    grows = (overflow == 0) & (finite_run.to(tl.int64) == tl.full((), growth_interval, tl.int64))
    forgiven = overflows.to(tl.float32) < tl.full((), tolerance, tl.float32) * updates.to(tl.float32)
    counted = overflow & (forgiven == 0)
    backs_off = counted & (left <= 1)
    scale = tl.where(backs_off, shrunk, tl.where(grows, grown, scale))
    scale = tl.minimum(tl.maximum(scale, tl.full((), min_scale, tl.float32)), tl.full((), max_scale, tl.float32))
    left = tl.where(counted, tl.maximum(left - 1, 1), left)
    refill = grows
    if REFILLS_WHEN_CLEAN:
        refill = overflow == 0
    tl.store(scale_ptr, scale)
    tl.store(tracker_ptr, tl.where(overflow | grows, 0, finite_run))
    tl.store(left_ptr, tl.where(refill, tl.full((), hysteresis, tl.int32), left))
    tl.store(updates_ptr, tl.where(backs_off | grows, 0, updates))
    tl.store(overflows_ptr, tl.where(backs_off | grows, 0, overflows))


@jit_kernel
def tally_kernel(totals_ptr, used_ptr, scale_ptr, found_inf_ptr, steps_ptr, n_steps):
    used, scale = tl.load(used_ptr), tl.load(scale_ptr)
    overflow = (tl.load(found_inf_ptr) != 0.0).to(tl.int64)
    run, skips = tl.load(totals_ptr + 2), tl.load(totals_ptr + 6)
    step = 0
    while step < n_steps:
        skips += (tl.load(steps_ptr + step) != 0.0).to(tl.int64)
        step += 1
    tl.store(totals_ptr, tl.load(totals_ptr) + 1)
    tl.store(totals_ptr + 1, tl.load(totals_ptr + 1) + overflow)
    tl.store(totals_ptr + 2, tl.where(overflow != 0, run + 1, 0))
    tl.store(totals_ptr + 3, tl.load(totals_ptr + 3) + (scale > used).to(tl.int64))
    tl.store(totals_ptr + 4, tl.load(totals_ptr + 4) + (scale < used).to(tl.int64))
    tl.store(totals_ptr + 5, tl.load(totals_ptr + 5) + n_steps)
    tl.store(totals_ptr + 6, skips)


def compile_one(device: torch.device) -> None:
    """Build Triton's driver and compile `inverse_kernel` for a device; raises what its first launch would raise.

    Nothing is loaded or launched here, and the kernel's first launch does not compile again.
    """
    with on_device(device):
        inverse_kernel.warmup(torch.float32, torch.float32, grid=(1,), **_ONE_WARP)


def inverse_scale(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """1 / scale, a flag of 0, and a copy of the scale: 0-d float32 tensors in one allocation."""
    result = torch.empty(3, dtype=torch.float32, device=scale.device)
    with on_device(scale.device):
        inverse_kernel[(1,)](scale, result, **_ONE_WARP)
    inverse, flag, used = result.unbind()
    return inverse, flag, used


def update_scale_(
    state: Sequence[Tensor],
    found_inf: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis: int,
    refills_when_clean: bool,
    tolerance: float,
) -> None:
    """Update the scale by `DynamicLossScale`'s rule; `state` holds the five tensors of its `ScaleState`."""
    with on_device(found_inf.device):
        update_kernel[(1,)](
            *state,
            found_inf,
            growth_factor,
            backoff_factor,
            growth_interval,
            min_scale,
            max_scale,
            hysteresis,
            tolerance,
            REFILLS_WHEN_CLEAN=refills_when_clean,
            **_ONE_WARP,
        )
    torch.autograd.graph.increment_version(state)  # a scaled loss has saved the scale for backward


def tally_update_(totals: Tensor, used: Tensor, scale: Tensor, found_inf: Tensor, steps: Sequence[Tensor]) -> None:
    """Add one update to running totals.

    Args:
        totals: int64, at least seven elements: updates, overflows, overflows since the last clean update, growths,
            backoffs, steps tried, steps skipped.
        used, scale: the scale before and after the update.
        found_inf: the update's flag.
        steps: the flags of its steps, one float32 element each.
    """
    if len(steps) > 1:
        flags = torch.stack(list(steps))
    else:
        flags = steps[0] if steps else found_inf
    with on_device(totals.device):
        tally_kernel[(1,)](totals, used, scale, found_inf, flags, len(steps), **_ONE_WARP)
