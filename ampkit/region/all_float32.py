"""Regions in float32: operators that no list names compute in float32 there too, whatever comes in.

The rules of a policy cast what they list; the rest runs in the dtype of its inputs, float16 for an input that is. In a
float32 region all of ATen's are met. What computes something new gets its float16 and bfloat16 inputs cast up. What
does not, keeps them: views, in-place operators and those with `out=` (the dtype is that of what they write to),
conversions, which say what they want, composites, whose parts are met in turn, and operators of other libraries.
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

__all__ = ["meet", "prepare", "wanted"]

_LOW = frozenset({torch.float16, torch.bfloat16})
# New memory and nothing computed: a tensor of the dtype that was asked for, or of its input's.
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
    """Make ready to `meet` operators; returns whether those of this thread are met now."""
    unlisted.install(lambda: aten_operators(_computes), _kernel)
    return unlisted.is_on()


meet = unlisted.include


@functools.cache
def _to_float32(device_type: str) -> Cast:
    return Cast(device_type, torch.float32, _LOW)


def _computes(schema: Any) -> bool:
    """Whether an operator makes new tensors of others: no view, nothing written to, nothing converted."""
    return (
        not schema.is_mutable
        and schema.name not in _COPIES
        and any("Tensor" in str(argument.type) for argument in schema.arguments)
        and any("Tensor" in str(result.type) for result in schema.returns)
        and all(result.alias_info is None for result in schema.returns)
    )


def _kernel(op: OpOverload) -> Callable[..., Any]:
    """What an operator runs in such a region, or in one of another precision inside it."""

    @dynamo_skip
    def kernel(*args: Any, **kwargs: Any) -> Any:
        for device_type, _ in get_in_tls(TLS_NAME).tables:
            if wanted((device_type,)):
                cast = _to_float32(device_type)
                args, kwargs = cast.args(args), dict(cast.kwargs(kwargs))
        return unlisted.run_past(op, args, kwargs)

    return kernel
