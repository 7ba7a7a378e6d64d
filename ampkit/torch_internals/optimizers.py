"""Private names for scaling and optimizers: torch's scale update, its foreach operators."""

from __future__ import annotations

import torch

update_scale_ = torch._amp_update_scale_
"""torch.amp's rule for the next scale, as one kernel: bit for bit what its `GradScaler.update` computes."""

foreach_mul = torch._foreach_mul
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_clamp_max_ = torch._foreach_clamp_max_

skip_compilation = torch._disable_dynamo
"""Decorator: Dynamo runs the function as it is. It loses attributes that are set on an optimizer, in 2.11 with an
error."""
