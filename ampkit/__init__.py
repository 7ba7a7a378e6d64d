"""ampkit: automatic mixed precision for PyTorch that you can read, steer and trust."""

import importlib
from typing import TYPE_CHECKING, Any

from ampkit import amp, matmul, optim
from ampkit.amp.fp16_optimizer import FP16Optimizer
from ampkit.half_precision.check_half import check_half
from ampkit.half_precision.half import half
from ampkit.half_precision.master_weights import MasterWeights
from ampkit.policy.policy import Policy, Rule, register_op
from ampkit.records.cast_record import CastRecord
from ampkit.records.recording import record_casts
from ampkit.region.autocast import autocast, clear_autocast_cache
from ampkit.region.custom_function import custom_bwd, custom_fwd
from ampkit.scaler.grad_guard import GradGuard
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.history import ScalerStats
from ampkit.scaler.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from ampkit.scaler.overflow_report import OverflowReport
from ampkit.scaler.scaler_base import LossScaleStuckError
from ampkit.scaler.skip_above import TimesMedian

if TYPE_CHECKING:
    from ampkit import debugging, integrations

__version__ = "0.1.0"

__all__ = [
    "CastRecord",
    "DynamicLossScale",
    "FP16Optimizer",
    "GradGuard",
    "GradScaler",
    "LossScaleStuckError",
    "MasterWeights",
    "NoOpLossScale",
    "OverflowReport",
    "Policy",
    "Rule",
    "ScalerStats",
    "StaticLossScale",
    "TimesMedian",
    "amp",
    "autocast",
    "check_half",
    "clear_autocast_cache",
    "custom_bwd",
    "custom_fwd",
    "debugging",
    "half",
    "integrations",
    "matmul",
    "optim",
    "record_casts",
    "register_op",
]

_ON_DEMAND = ("debugging", "integrations")  # imported when first used

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Import the packages that only some users need."""
        if name in _ON_DEMAND:
            return importlib.import_module(f"ampkit.{name}")
        raise AttributeError(f"module 'ampkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
