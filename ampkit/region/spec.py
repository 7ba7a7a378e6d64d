"""What a region is, once its arguments have been checked."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ampkit.engine.weight_cache import WeightCache
from ampkit.policy.policy import Policy


class RegionSpec(NamedTuple):
    """A region that can be entered, any number of times. Known by identity: each `autocast` has one of its own."""

    device_type: str                    # as torch's autocast calls it
    dtype: torch.dtype
    enabled: bool
    cache_enabled: bool
    policy: Policy | None = None        # None: the enclosing region's, else the default
    cache: WeightCache | None = None    # one that outlives the region
    device: str | None = None           # as the user wrote it, if different: "cuda:0"
    of_module: bool = False             # entered by a rule of `Policy.for_modules`, around one module

    def __str__(self) -> str:
        more = "" if self.policy is None else f", policy={self.policy!r}"
        return f"autocast({self.device or self.device_type!r}, {self.dtype}, enabled={self.enabled}{more})"
