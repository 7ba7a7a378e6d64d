"""A second key, for regions that compute everything in float32: there operators are met that no list names.

It lies right below the key of the lists, so listed operators have had their rule when they get here. Kernels are
registered when the first such region is entered; elsewhere the key is not included and they mean nothing. A kernel for
each operator, and no fallback for all: torch cannot call a fallback in Python for subclasses of Tensor and under
dispatch modes.
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
    """Have these operators call their kernel where the key is included, and all others go past; once per process."""
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
    """Whether operators of this thread meet these kernels."""
    return is_included(_KEY)


def include(on: bool) -> None:
    """Let operators of this thread meet these kernels, or no longer."""
    set_included(_KEY, on)


def run_past(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator; neither it nor what it calls meets these kernels."""
    with Exclude(_KEYS):
        return op._op(*args, **kwargs)
