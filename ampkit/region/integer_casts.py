"""Casts that make distinct integers equal, as bfloat16 does to positions above 256."""

from __future__ import annotations

import torch
from torch import Tensor

from ampkit.torch_internals.float8_matmul import is_eager
from ampkit.torch_internals.operator_tracing import is_opaque
from ampkit.torch_internals.tensors import is_capturing
from ampkit.torch_internals.transforms import functorch_level

__all__ = ["merges_integers"]

_MOST = 1 << 14         # elements that are looked at: sorting all of an activation would take long
_LARGEST = 1 << 24      # up to which float32 has every integer; beyond are the constants of masks


def merges_integers(exact: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Whether a tensor holds integers alone, of which a cast makes distinct ones equal: a 0-d bool. Never syncs.

    None where that is not looked at: tensors with a gradient or not of float32, traced, sparse or captured ones.
    """
    if (
        exact.dtype is not torch.float32 or dtype.itemsize != 2 or exact.requires_grad or not is_eager(exact)
        or is_opaque(exact) or functorch_level() is not None or is_capturing()
    ):
        return None
    values = exact.detach().flatten()[:_MOST].sort().values      # rounding keeps the order
    cast = values.to(dtype)
    integers = ((values == values.round()) & (values.abs() <= _LARGEST)).all()
    return integers & ((values[1:] != values[:-1]) & (cast[1:] == cast[:-1])).any()
