"""Dtypes by name, as configuration files have them."""

from __future__ import annotations

from typing import Any

import torch

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def as_dtype(value: Any) -> Any:
    """The dtype of this name; anything else unchanged, for the caller to check."""
    return PRECISIONS.get(value, value) if isinstance(value, str) else value
