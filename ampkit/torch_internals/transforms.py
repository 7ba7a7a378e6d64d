"""Transforms of `torch.func`: whether one is active, and whether an operator is yet to be transformed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad

from ampkit.torch_internals.dispatcher import is_excluded, parsed_key
from ampkit.torch_internals.private_names import private

__all__ = ["functorch_level", "in_forward_ad", "is_ahead", "is_wrapped", "keys_ahead", "transforms"]

functorch_level: Callable[[], int | None] = private("_C._functorch.maybe_current_level")
is_wrapped: Callable[[Tensor], bool] = private("_C._functorch.is_functorch_wrapped_tensor")

_FRONT = parsed_key("FuncTorchDynamicLayerFrontMode")
_AHEAD = (_FRONT, parsed_key("FuncTorchBatched"), parsed_key("BatchedNestedTensor"))


def in_forward_ad() -> bool:
    """Whether a level of forward-mode AD is open, in which tensors may have tangents."""
    return forward_ad._current_level >= 0


def keys_ahead(op: OpOverload) -> tuple[Any, ...]:
    """The dispatch keys at which a call of `op` is transformed before it reaches torch's autocast.

    At the key of `vmap`'s randomness only operators that draw random numbers are: dropout, and attention's dropout.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "FuncTorchVmapMode")
    return (*_AHEAD, parsed_key("FuncTorchVmapMode")) if has_kernel else _AHEAD


def is_ahead(keyset: Any, keys: tuple[Any, ...]) -> bool:
    """Whether a call with these dispatch keys is transformed at one of `keys`."""
    return functorch_level() is not None and any(map(keyset.has, keys))


def transforms() -> bool:
    """Whether operators that are called now are transformed. Not inside a transform, once the innermost has run."""
    return functorch_level() is not None and not is_excluded(_FRONT)
