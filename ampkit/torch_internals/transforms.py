"""Transforms of `torch.func`: whether one runs here, and whether an operator has still to pass through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ampkit.torch_internals.dispatcher import is_excluded, parsed_key
from ampkit.torch_internals.lookup import private

__all__ = ["functorch_level", "is_ahead", "is_wrapped", "transforms"]

functorch_level: Callable[[], int | None] = private("_C._functorch.maybe_current_level")
is_wrapped: Callable[[Tensor], bool] = private("_C._functorch.is_functorch_wrapped_tensor")

_FRONT = parsed_key("FuncTorchDynamicLayerFrontMode")
_AHEAD = (_FRONT, parsed_key("FuncTorchBatched"), parsed_key("BatchedNestedTensor"))


def is_ahead(keyset: Any) -> bool:
    """Whether an operator with these dispatch keys is transformed before torch's autocast meets it."""
    return functorch_level() is not None and any(map(keyset.has, _AHEAD))


def transforms() -> bool:
    """Whether operators that are called here are transformed; not inside one, where the innermost has done its part."""
    return functorch_level() is not None and not is_excluded(_FRONT)
