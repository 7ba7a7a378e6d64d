"""What a gradient scaler computes with single numbers, in one launch each: inverse scale and next scale.

Contract. scale: one float32 element; growth_tracker and hysteresis_left: one int32 element each; found_inf: one float32
element; all on one CUDA device. `inverse_scale` reads the scale and returns new memory. `update_scale_` writes the
state in place, as torch's `_amp_update_scale_` does: products with the scale are taken in float64 and rounded once, a
growth that would reach inf is dropped. Neither synchronises. torch takes four operators for the first, and with
hysteresis about thirty for the second.
"""

import torch
import triton.language as tl
from torch import Tensor

from .launch import entry, on_device


@entry
def inverse_kernel(scale_ptr, result_ptr):
    scale = tl.load(scale_ptr)
    tl.store(result_ptr, (1.0 / scale.to(tl.float64)).to(tl.float32))
    tl.store(result_ptr + 1, 0.0)
    tl.store(result_ptr + 2, scale)


@entry
def update_kernel(scale_ptr, tracker_ptr, left_ptr, found_inf_ptr, growth_factor: tl.float64,
                  backoff_factor: tl.float64, growth_interval: tl.int64, min_scale: tl.float64, max_scale: tl.float64,
                  hysteresis: tl.int32, REFILLS_WHEN_CLEAN: tl.constexpr):
    scale, tracker, left = tl.load(scale_ptr), tl.load(tracker_ptr), tl.load(left_ptr)
    overflow = tl.load(found_inf_ptr) != 0.0
    grown = (scale.to(tl.float64) * tl.full((), growth_factor, tl.float64)).to(tl.float32)
    grown = tl.where(grown - grown == 0.0, grown, scale)
    shrunk = (scale.to(tl.float64) * tl.full((), backoff_factor, tl.float64)).to(tl.float32)
    finite_run = tracker + 1
    grows = (overflow == 0) & (finite_run.to(tl.int64) == tl.full((), growth_interval, tl.int64))
    scale = tl.where(overflow & (left <= 1), shrunk, tl.where(grows, grown, scale))
    scale = tl.minimum(tl.maximum(scale, tl.full((), min_scale, tl.float32)), tl.full((), max_scale, tl.float32))
    left = tl.where(overflow, tl.maximum(left - 1, 1), left)
    refill = grows
    if REFILLS_WHEN_CLEAN:
        refill = overflow == 0
    tl.store(scale_ptr, scale)
    tl.store(tracker_ptr, tl.where(overflow | grows, 0, finite_run))
    tl.store(left_ptr, tl.where(refill, tl.full((), hysteresis, tl.int32), left))


def inverse_scale(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """1 / scale, a clear flag, and a copy of the scale: 0-d float32 tensors in one piece of memory."""
    result = torch.empty(3, dtype=torch.float32, device=scale.device)
    with on_device(scale.device):
        inverse_kernel[(1,)](scale, result, num_warps=1, enable_fp_fusion=False)
    inverse, flag, used = result.unbind()
    return inverse, flag, used


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_left: Tensor,
    found_inf: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis: int,
    refills_when_clean: bool,
) -> None:
    """Update the scale by `DynamicLossScale`'s rule; the first three are its `ScaleState`."""
    with on_device(scale.device):
        update_kernel[(1,)](
            scale, growth_tracker, hysteresis_left, found_inf, growth_factor, backoff_factor, growth_interval,
            min_scale, max_scale, hysteresis, REFILLS_WHEN_CLEAN=refills_when_clean, num_warps=1,
            enable_fp_fusion=False,
        )
