"""ampkit: automatic mixed precision for PyTorch that you can read, steer and trust."""

from ampkit import amp
from ampkit.autocast import (
    autocast,
    clear_autocast_cache,
    float32_region,
    get_autocast_dtype,
    is_autocast_enabled,
)
from ampkit.check_half import HalfReport, check_half
from ampkit.checkpointing import checkpoint, checkpoint_context_fn
from ampkit.custom_function import custom_bwd, custom_fwd
from ampkit.fp16_optimizer import FP16Optimizer
from ampkit.function_casts import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ampkit.grad_scaler import GradScaler
from ampkit.half import half
from ampkit.history import ScalerStats
from ampkit.levels import (
    amp_state_dict,
    initialize,
    load_amp_state_dict,
    loss_scalers,
    master_params,
    scale_loss,
)
from ampkit.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from ampkit.master_weights import MasterWeights
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
    "FP16Optimizer",
    "GradScaler",
    "HalfReport",
    "LossScaleStuckError",
    "MasterWeights",
    "NoOpLossScale",
    "OverflowReport",
    "Policy",
    "Rule",
    "ScalerStats",
    "StaticLossScale",
    "WeightCache",
    "amp",
    "amp_state_dict",
    "autocast",
    "check_half",
    "checkpoint",
    "checkpoint_context_fn",
    "clear_autocast_cache",
    "custom_bwd",
    "custom_fwd",
    "disable_casts",
    "float32_region",
    "float_function",
    "get_autocast_dtype",
    "half",
    "half_function",
    "initialize",
    "is_autocast_enabled",
    "load_amp_state_dict",
    "loss_scalers",
    "master_params",
    "plot_history",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_op",
    "register_promote_function",
    "scale_loss",
    "scheduler_step",
    "wrap_forward",
]
