"""ampkit: automatic mixed precision for PyTorch that you can read, steer and trust."""

from ampkit.autocast import (
    autocast,
    clear_autocast_cache,
    float32_region,
    get_autocast_dtype,
    is_autocast_enabled,
)
from ampkit.policy import Explanation, Policy, Rule, register_op
from ampkit.weight_cache import CacheInfo, WeightCache

__all__ = [
    "CacheInfo",
    "Explanation",
    "Policy",
    "Rule",
    "WeightCache",
    "autocast",
    "clear_autocast_cache",
    "float32_region",
    "get_autocast_dtype",
    "is_autocast_enabled",
    "register_op",
]
