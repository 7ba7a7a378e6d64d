"""A copy that is recorded and not made: how a kept cast gets a new autograd history."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampkit.policy.casting import converter
from ampkit.torch_internals.tensors import n_dispatch_modes, pop_dispatch_mode, push_dispatch_mode

__all__ = ["connected"]

_COPY = torch.ops.aten._to_copy.default


class _Answer:
    """Stands among the dispatch modes, below autograd, and answers the one copy with values that exist already."""

    __slots__ = ("values",)

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.values if func is _COPY else func(*args, **(kwargs or {}))


def connected(weight: Tensor, values: Tensor) -> Tensor:
    """`values` as the cast of `weight`, differentiable: autograd records the cast, nothing is copied.

    For use where autograd records. It has the version counter of `values`: where they are written later, every graph
    that has saved it is stale.
    """
    answer = _Answer(values.detach())       # here, above autograd: what is detached below it counts for itself
    depth = n_dispatch_modes()
    try:        # a mode's own `with` would take half of the time
        push_dispatch_mode(answer)
        return converter(values.dtype)(weight)
    finally:
        while n_dispatch_modes() > depth:
            pop_dispatch_mode(None)
