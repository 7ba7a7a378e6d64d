"""Values as users write them, or leave out: dtypes by name, the device; how messages show a value of any length."""

from __future__ import annotations

import reprlib
from typing import Any

import torch

PRECISIONS = {
    "float32": torch.float32, "fp32": torch.float32,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "bf16-mixed": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16, "16-mixed": torch.float16,
}

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120


def short(value: Any) -> str:
    """The value on one line, cut where it is long."""
    return " ".join(_repr.repr(value).split())


def as_dtype(value: Any) -> Any:
    """The dtype of this name; anything else unchanged, for the caller to check."""
    return PRECISIONS.get(value, value) if isinstance(value, str) else value
