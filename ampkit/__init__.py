"""ampkit: automatic mixed precision for PyTorch that you can read, steer and trust."""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

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
from ampkit.whole_model.half import half
from ampkit.whole_model.master_weights import MasterWeights

if TYPE_CHECKING:
    from ampkit import debugging, integrations, testing

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
    "autocast",
    "check_half",
    "check_ranks",
    "checkpoint",
    "checkpoint_context_fn",
    "clear_autocast_cache",
    "custom_bwd",
    "custom_fwd",
    "debugging",
    "float32_region",
    "get_autocast_dtype",
    "half",
    "integrations",
    "is_autocast_enabled",
    "optim",
    "plot_history",
    "record_casts",
    "register_op",
    "scheduler_step",
    "testing",
    "unwrap_forward",
    "wrap_forward",
]

_WINGS = ("debugging", "integrations", "testing")     # imported when they are first asked for
# Where version 0.1 had Apex's names too. To be gone in 0.2.
_MOVED = {
    "amp_state_dict": "state_dict",
    "disable_casts": "disable_casts",
    "float_function": "float_function",
    "half_function": "half_function",
    "initialize": "initialize",
    "load_amp_state_dict": "load_state_dict",
    "loss_scalers": "loss_scalers",
    "master_params": "master_params",
    "promote_function": "promote_function",
    "register_float_function": "register_float_function",
    "register_half_function": "register_half_function",
    "register_promote_function": "register_promote_function",
    "scale_loss": "scale_loss",
}

if not TYPE_CHECKING:       # which would take every name for one of these

    def __getattr__(name: str) -> Any:
        """The wings, and by their old places the names that have moved to `ampkit.amp`."""
        if name in _WINGS:
            return importlib.import_module(f"ampkit.{name}")
        if name in _MOVED:
            warnings.warn(
                f"ampkit.{name} is ampkit.amp.{_MOVED[name]} now; the old name goes with version 0.2",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(amp, _MOVED[name])
        raise AttributeError(f"module 'ampkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What users are meant to find."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
