"""A copy that is recorded and not made: how a kept cast gets a new autograd history."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampkit.torch_internals.dispatcher import TorchDispatchMode

__all__ = ["ReuseCast"]


class ReuseCast(TorchDispatchMode):
    """Answers the one copy that autograd asks for below it with values that exist already."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            return self.values.detach()
        return func(*args, **(kwargs or {}))
