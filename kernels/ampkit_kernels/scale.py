"""update_scale_: the next loss scale, growth tracker and patience, in place. One launch of one program.

Contract. scale, found_inf: one float32 element each; growth_tracker and hysteresis_tracker (optional): one
int32 element each. The rule is written out in `ampkit_kernels.update_scale_`. Products in float64, rounded
to float32 once. Does not synchronise, reads no host memory, and may be captured: the factors are constants
of the graph, the state is not.

Bytes: four scalars.
"""

# Kernel code is Triton's language, which a Python type checker cannot follow.
# pyright: reportInvalidTypeForm=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false

import triton.language as tl
from torch import Tensor

from .entry import entry
from .launch import on_device


@entry
def update_scale_kernel(scale_ptr, growth_tracker_ptr, hysteresis_tracker_ptr, found_inf_ptr,
                        growth_factor: tl.float64, backoff_factor: tl.float64, growth_interval, hysteresis,
                        min_scale: tl.float64, max_scale: tl.float64, HAS_HYSTERESIS: tl.constexpr,
                        REFILL_AT_GROWTH: tl.constexpr, HAS_MIN: tl.constexpr,
                        HAS_MAX: tl.constexpr):  # fmt: skip
    scale = tl.load(scale_ptr)
    overflow = tl.load(found_inf_ptr) != 0.0
    successes = tl.load(growth_tracker_ptr) + 1
    grows = (successes == growth_interval) & (overflow == 0)
    backs_off = overflow
    if HAS_HYSTERESIS:
        patience = tl.load(hysteresis_tracker_ptr)
        backs_off = overflow & (patience <= 1)
        refills = overflow == 0
        if REFILL_AT_GROWTH:
            refills = grows
        left = tl.where(overflow, tl.maximum(patience - 1, 1), tl.where(refills, hysteresis, patience))
        tl.store(hysteresis_tracker_ptr, left)
    grown = (scale.to(tl.float64) * growth_factor).to(tl.float32)
    if HAS_MAX:
        grown = tl.minimum(grown, tl.maximum(scale, tl.full((), max_scale, tl.float32)))
    backed = (scale.to(tl.float64) * backoff_factor).to(tl.float32)
    if HAS_MIN:
        backed = tl.maximum(backed, tl.minimum(scale, tl.full((), min_scale, tl.float32)))
    grown = tl.where(grown - grown == 0.0, grown, scale)
    backed = tl.where(backed == 0.0, scale, backed)
    tl.store(scale_ptr, tl.where(backs_off, backed, tl.where(grows, grown, scale)))
    tl.store(growth_tracker_ptr, tl.where(overflow | grows, 0, successes))


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor | None,
    found_inf: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    refill: str,
    min_scale: float | None,
    max_scale: float | None,
) -> None:
    """Launch `update_scale_kernel`; see the module's docstring."""
    with on_device(scale.device):
        update_scale_kernel[(1,)](
            scale,
            growth_tracker,
            growth_tracker if hysteresis_tracker is None else hysteresis_tracker,
            found_inf,
            growth_factor,
            backoff_factor,
            growth_interval,
            hysteresis,
            0.0 if min_scale is None else min_scale,
            0.0 if max_scale is None else max_scale,
            HAS_HYSTERESIS=hysteresis_tracker is not None,
            REFILL_AT_GROWTH=refill == "growth",
            HAS_MIN=min_scale is not None,
            HAS_MAX=max_scale is not None,
            num_warps=1,
            enable_fp_fusion=False,
        )
