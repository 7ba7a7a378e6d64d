"""The arguments of an operator call, for the same operator in another precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampkit.containers import map_tensors
from ampkit.torch_internals.operator_tracing import OpOverload

__all__ = ["other_arguments"]


def other_arguments(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any],
    tensor: Callable[[Tensor], Tensor], dtype: Callable[[torch.dtype], torch.dtype],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`args` and `kwargs` with other tensors and dtypes."""
    def changed(value: Any) -> Any:
        return dtype(value) if isinstance(value, torch.dtype) else map_tensors(value, tensor)

    other_args = [changed(value) for value in args]
    other_kwargs = {key: changed(value) for key, value in kwargs.items()}
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "half_to_float":    # of softmax, on accelerators: float16 in, float32 out
            if place < len(other_args):
                other_args[place] = False
            else:
                other_kwargs["half_to_float"] = False
    return tuple(other_args), other_kwargs
