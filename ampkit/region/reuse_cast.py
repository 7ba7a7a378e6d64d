"""A copy that is recorded and not made: how a kept cast gets a new autograd history."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampkit.torch_internals.dispatcher import TorchDispatchMode

__all__ = ["ReuseCast"]


class ReuseCast(TorchDispatchMode):
    """Answers the one copy that autograd asks for below it with values that exist already.

    What it answers has their version counter: where they are written later, every graph that has saved them is stale.
    """

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.answer = values.detach()       # here, above autograd: what is detached below it counts for itself

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            return self.answer
        return func(*args, **(kwargs or {}))
