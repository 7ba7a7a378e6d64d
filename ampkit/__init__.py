"""ampkit: automatic mixed precision for PyTorch that you can read, steer and trust."""

import importlib
from typing import TYPE_CHECKING, Any

from ampkit import amp, optim
from ampkit.amp.fp16_optimizer import FP16Optimizer
from ampkit.engine.weight_cache import WeightCache
from ampkit.half_precision.check_half import check_half
from ampkit.half_precision.half import half
from ampkit.half_precision.master_weights import MasterWeights
from ampkit.policy.policy import Policy, Rule, register_op
from ampkit.region.autocast import autocast, clear_autocast_cache
from ampkit.region.cast_record import CastRecord
from ampkit.region.custom_function import custom_bwd, custom_fwd
from ampkit.region.forward_wrapper import unwrap_forward, wrap_forward
from ampkit.region.recording import record_casts
from ampkit.scaler.grad_scaler import GradScaler, LossScaleStuckError
from ampkit.scaler.history import ScalerStats
from ampkit.scaler.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from ampkit.scaler.overflow_report import OverflowReport
from ampkit.scaler.skip_above import TimesMedian

if TYPE_CHECKING:
    from ampkit import debugging, integrations

__version__ = "0.1.0"

__all__ = [
    "CastRecord",
    "DynamicLossScale",
    "FP16Optimizer",
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
    "WeightCache",
    "amp",
    "autocast",
    "check_half",
    "clear_autocast_cache",
    "custom_bwd",
    "custom_fwd",
    "debugging",
    "half",
    "integrations",
    "optim",
    "record_casts",
    "register_op",
    "unwrap_forward",
    "wrap_forward",
]

_ON_DEMAND = ("debugging", "integrations")  # imported when first used
# Names that users of torch.amp and Apex know, and what to use instead.
_ELSEWHERE = {
    **dict.fromkeys(
        (
            "is_autocast_enabled",
            "is_autocast_cache_enabled",
            "get_autocast_dtype",
            "get_autocast_gpu_dtype",
            "get_autocast_cpu_dtype",
            "set_autocast_enabled",
            "set_autocast_dtype",
        ),
        "torch's function of this name, because regions set torch's own autocast state",
    ),
    "is_autocast_available": "torch.amp.is_autocast_available",
    "autocast_mode": "ampkit.autocast, ampkit.custom_fwd and ampkit.custom_bwd",
    "grad_scaler": "ampkit.GradScaler; for private names, torch.amp.grad_scaler",
    "OptState": "torch.amp.grad_scaler.OptState, which ampkit.GradScaler uses",
    "checkpoint": "torch.utils.checkpoint.checkpoint, which recomputes under the region and policy of its forward",
    **dict.fromkeys(
        (
            "disable_casts",
            "float_function",
            "half_function",
            "initialize",
            "load_state_dict",
            "master_params",
            "promote_function",
            "register_float_function",
            "register_half_function",
            "register_promote_function",
            "scale_loss",
            "state_dict",
        ),
        "ampkit.amp, which has Apex's names",
    ),
    **dict.fromkeys(("FP16_Optimizer", "fp16_utils"), "ampkit.FP16Optimizer and ampkit.half"),
    **dict.fromkeys(("network_to_half", "convert_network"), "ampkit.half, which keeps batch norms in float32"),
    **dict.fromkeys(
        ("DynamicLossScaler", "LossScaler"),
        "ampkit.GradScaler with ampkit.DynamicLossScale or ampkit.StaticLossScale",
    ),
    **dict.fromkeys(("FusedAdam", "FusedSGD", "optimizers"), "ampkit.optim.AdamW and ampkit.optim.SGD"),
    **dict.fromkeys(
        ("clip_grad_norm_", "clip_grad_value_"), "the methods of ampkit.GradScaler, which unscale gradients first"
    ),
}

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Import the packages that only some users need."""
        if name in _ON_DEMAND:
            return importlib.import_module(f"ampkit.{name}")
        hint = f"; expected {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module 'ampkit' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
