"""ampkit: automatic mixed precision for PyTorch that you can read, steer and trust."""

import importlib
from typing import Any

from ampkit import amp, optim
from ampkit.policy.policy import Explanation, Policy, Rule, register_op
from ampkit.region.autocast import (
    autocast,
    clear_autocast_cache,
    float32_region,
    get_autocast_dtype,
    is_autocast_enabled,
)
from ampkit.region.checkpointing import checkpoint, checkpoint_context_fn
from ampkit.region.custom_function import custom_bwd, custom_fwd
from ampkit.region.forward_wrapper import unwrap_forward, wrap_forward
from ampkit.region.recording import CastRecord, RecordedCall, record_casts
from ampkit.region.weight_cache import CacheInfo, WeightCache
from ampkit.scaler.agreement import check_ranks
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.history import ScalerStats
from ampkit.scaler.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from ampkit.scaler.overflow import LossScaleStuckError
from ampkit.scaler.overflow_report import OverflowReport
from ampkit.scaler.plotting import plot_history
from ampkit.scaler.schedulers import scheduler_step
from ampkit.whole_model.check_half import HalfReport, check_half
from ampkit.whole_model.fp16_optimizer import FP16Optimizer
from ampkit.whole_model.function_casts import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ampkit.whole_model.half import half
from ampkit.whole_model.levels import (
    amp_state_dict,
    initialize,
    load_amp_state_dict,
    loss_scalers,
    master_params,
    scale_loss,
)
from ampkit.whole_model.master_weights import MasterWeights

__version__ = "0.1.0"

__all__ = [
    "CacheInfo",
    "CastRecord",
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
    "RecordedCall",
    "Rule",
    "ScalerStats",
    "StaticLossScale",
    "WeightCache",
    "amp",
    "amp_state_dict",
    "autocast",
    "check_half",
    "check_ranks",
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
    "optim",
    "plot_history",
    "promote_function",
    "record_casts",
    "register_float_function",
    "register_half_function",
    "register_op",
    "register_promote_function",
    "scale_loss",
    "scheduler_step",
    "unwrap_forward",
    "wrap_forward",
]


def __getattr__(name: str) -> Any:
    """`ampkit.debugging`, `ampkit.integrations` and `ampkit.testing`, imported when they are first asked for."""
    if name in ("debugging", "integrations", "testing"):
        return importlib.import_module(f"ampkit.{name}")
    raise AttributeError(f"module 'ampkit' has no attribute {name!r}")
