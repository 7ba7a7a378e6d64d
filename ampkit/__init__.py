"""ampkit: automatic mixed precision for PyTorch that you can read, steer and trust."""

from ampkit.autocast import (
    autocast,
    clear_autocast_cache,
    float32_region,
    get_autocast_dtype,
    is_autocast_enabled,
)
from ampkit.checkpointing import checkpoint, checkpoint_context_fn
from ampkit.custom_function import custom_bwd, custom_fwd
from ampkit.grad_scaler import GradScaler
from ampkit.history import ScalerStats
from ampkit.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from ampkit.overflow import LossScaleStuckError, OverflowReport
from ampkit.plotting import plot_history
from ampkit.policy import Explanation, Policy, Rule, register_op
from ampkit.schedulers import scheduler_step
from ampkit.weight_cache import CacheInfo, WeightCache
from ampkit.wrapping import wrap_forward

__all__ = [
    "CacheInfo",
    "DynamicLossScale",
    "Explanation",
    "GradScaler",
    "LossScaleStuckError",
    "NoOpLossScale",
    "OverflowReport",
    "Policy",
    "Rule",
    "ScalerStats",
    "StaticLossScale",
    "WeightCache",
    "autocast",
    "checkpoint",
    "checkpoint_context_fn",
    "clear_autocast_cache",
    "custom_bwd",
    "custom_fwd",
    "float32_region",
    "get_autocast_dtype",
    "is_autocast_enabled",
    "plot_history",
    "register_op",
    "scheduler_step",
    "wrap_forward",
]
