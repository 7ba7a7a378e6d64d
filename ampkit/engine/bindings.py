"""torch's Python bindings of operators: faster to call than the `OpOverload`, which parses arguments by schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampkit.torch_internals.operators import OpOverload

__all__ = ["NAMES", "binding"]

# Operators whose binding, given the schema's arguments in order, calls that very operator with them; a test compares.
NAMES = (
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "linear", "matmul", "mm", "mv", "prelu",
    "scaled_dot_product_attention",
    "batch_norm", "exp", "group_norm", "layer_norm", "log", "log1p", "logsumexp",
    "pow.Tensor_Scalar", "rms_norm", "rsqrt",
    "cumsum", "log_softmax.int", "softmax.int", "sum", "sum.dim_IntList",
    "addcmul", "cat", "dot", "lerp.Tensor", "stack",
)
_NAMES = {f"aten::{name}" for name in NAMES}


def binding(op: OpOverload) -> Callable[..., Any]:
    """The fastest callable for `op`, given the arguments of its schema in order."""
    if op.name() in _NAMES:
        base = op._schema.name.removeprefix("aten::")
        for module in ("_nn", "_VariableFunctions"):
            found = getattr(getattr(torch._C, module, None), base, None)
            if found is not None:
                return found
    return op._op
