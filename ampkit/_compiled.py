"""Regions inside `torch.compile`: what Dynamo traces in place of the eager region.

Dynamo cannot follow the dispatcher state that an eager region changes. It does know torch's own autocast, so a region
that is traced enters that one, and the compiled graph casts by torch.amp's list. A policy that differs from it is
honoured when the region is outside the compiled function: see docs/differences.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast


def tracing() -> bool:
    """Whether Dynamo is tracing the call."""
    return torch.compiler.is_dynamo_compiling()


def enter(region: Any) -> None:
    """Enter torch's autocast in the traced graph."""
    region._traced = _enter_autocast(region._kind, region.fast_dtype, region._enabled, region._cache_enabled)


def leave(region: Any) -> None:
    """Leave what `enter` entered."""
    _exit_autocast(region._traced)
