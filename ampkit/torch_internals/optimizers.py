"""Optimizers and scaling: torch's update of a scale, its foreach operators, the state of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

update_scale_ = torch._amp_update_scale_
"""torch.amp's rule for the next scale, as one kernel: bit for bit what its `GradScaler.update` computes."""

ready_record = _refresh_per_optimizer_state
"""Makes what torch.amp's scaler records about an optimizer: stage READY, no flags of inf or NaN."""

foreach_add_ = torch._foreach_add_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_clamp_min = torch._foreach_clamp_min
foreach_clamp_max = torch._foreach_clamp_max
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_clamp_max_ = torch._foreach_clamp_max_

skip_compilation = torch._disable_dynamo
"""Decorator: Dynamo runs the function as it is. It loses attributes that are set on an optimizer, in 2.11 with an
error."""


def gathered(optimizer: torch.optim.Optimizer, group: dict[str, Any], n: int) -> tuple[list[list[Any]], bool]:
    """A group's parameters that have gradients, the gradients, and the lists of state that torch's own step takes.

    Returns `n` lists in the order of `_init_group` of the optimizer's class, and its result: whether a parameter is
    complex (AdamW), or a gradient sparse (SGD). Makes the state of parameters that have none.
    """
    lists: list[list[Any]] = [[] for _ in range(n)]
    is_special: bool = optimizer._init_group(group, *lists)  # type: ignore[attr-defined]
    return lists, is_special
