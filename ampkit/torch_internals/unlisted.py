"""A second dispatch key, for regions that compute everything in float32: it intercepts operators on no list.

It is directly below the key of the lists, so listed operators have been cast when they get here. Kernels are registered
when the first such region is entered; outside such regions the key is not included. There is a kernel per operator and
no fallback for all: torch cannot call a Python fallback for subclasses of Tensor and under dispatch modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.library import Library

from ampkit.torch_internals.dispatcher import (
    Exclude,
    higher_order_fallthrough,
    higher_order_ops,
    is_included,
    parsed_key,
    set_included,
)
from ampkit.torch_internals.forks import renewed_lock
from ampkit.torch_internals.operators import OpOverload

__all__ = ["include", "install", "is_on", "run_past"]

_NAME = "TESTING_ONLY_GenericWrapper"

_libraries: list[Library] = []
_lock = renewed_lock(__name__, "_lock")


_KEY = parsed_key(_NAME)
_KEYS = None if _KEY is None else torch._C.DispatchKeySet(_KEY)


def install(ops: Callable[[], Iterable[OpOverload]], kernel: Callable[[OpOverload], Callable[..., Any]]) -> None:
    """Register kernels for these operators and a fallthrough for all others, once per process."""
    with _lock:
        if _libraries:
            return
        others = Library("_", "IMPL")
        others.fallback(torch.library.fallthrough_kernel, _NAME)
        own = Library("aten", "IMPL")
        for op in ops():
            own.impl(op, kernel(op), _NAME)
        for op in higher_order_ops.values():
            op.fallthrough(_KEY)
        higher_order_fallthrough.append(_KEY)
        _libraries.extend((others, own))


def is_on() -> bool:
    """Whether the key is included in this thread."""
    return is_included(_KEY)


def include(on: bool) -> None:
    """Include the key in this thread, or remove it."""
    set_included(_KEY, on)


def run_past(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator with the key excluded."""
    with Exclude(_KEYS):
        return op._op(*args, **kwargs)
