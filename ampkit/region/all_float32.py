"""Regions in float32: operators that no list names compute in float32 there too, whatever comes in.

Elsewhere operators that no list names run in the dtype of their inputs. A float32 region intercepts all of ATen's, and
casts float16 and bfloat16 inputs up for those that compute new values. These are left alone: views, in-place and `out=`
operators (the destination has the dtype), conversions (the caller chose the dtype), composites (their parts are
intercepted), and operators of other libraries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ampkit.policy.casting import Cast
from ampkit.torch_internals import unlisted
from ampkit.torch_internals.dispatcher import TLS_NAME, get_in_tls
from ampkit.torch_internals.dynamo import dynamo_skip
from ampkit.torch_internals.operators import OpOverload, aten_operators

__all__ = ["include", "prepare", "wanted"]

_LOW = frozenset({torch.float16, torch.bfloat16})
# Allocate or copy without computing: the result has the dtype that was asked for, or its input's.
_COPIES = frozenset({
    "aten::_to_copy", "aten::clone", "aten::lift_fresh_copy", "aten::empty_like", "aten::new_empty",
    "aten::new_empty_strided", "aten::_pin_memory", "aten::_conj_physical", "aten::view_copy",
})


def wanted(device_types: Any) -> bool:
    """Whether autocast is on and computes in float32, here, for one of these device types."""
    return any(
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float32
        for device in device_types
    )


def prepare() -> bool:
    """Register the kernels, once per process; returns whether this thread has their key included."""
    unlisted.install(lambda: aten_operators(_computes), _kernel)
    return unlisted.is_on()


include = unlisted.include


@functools.cache
def _to_float32(device_type: str) -> Cast:
    return Cast(device_type, torch.float32, _LOW)


def _computes(schema: Any) -> bool:
    """Whether an operator computes new tensors from tensors: no view, mutation or conversion."""
    return (
        not schema.is_mutable
        and schema.name not in _COPIES
        and any("Tensor" in str(argument.type) for argument in schema.arguments)
        and any("Tensor" in str(result.type) for result in schema.returns)
        and all(result.alias_info is None for result in schema.returns)
    )


def _kernel(op: OpOverload) -> Callable[..., Any]:
    """What an operator runs in a float32 region, or in one of another precision inside it."""

    @dynamo_skip
    def kernel(*args: Any, **kwargs: Any) -> Any:
        for device_type, _ in get_in_tls(TLS_NAME).tables:
            if wanted((device_type,)):
                cast = _to_float32(device_type)
                args, kwargs = cast.args(args), dict(cast.kwargs(kwargs))
        return unlisted.run_past(op, args, kwargs)

    return kernel
