"""Groups of dtypes, the names that users may write for them, and values as error messages print them."""

from __future__ import annotations

import reprlib
from typing import Any

import torch

REAL_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""The dtypes that a cast changes; integers, bools, complex numbers and 8-bit floats are unchanged."""

SIXTEEN_BIT = (torch.float16, torch.bfloat16)

PRECISIONS = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "16-mixed": torch.float16,
}

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120


def short(value: Any) -> str:
    """Return the `repr` of a value on one line, shortened if it is long."""
    return " ".join(_repr.repr(value).split())


def as_dtype(value: Any) -> Any:
    """Return the dtype of a name in `PRECISIONS`, and any other value unchanged, for the caller to check."""
    return PRECISIONS.get(value, value) if isinstance(value, str) else value


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float16` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")
