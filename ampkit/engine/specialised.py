"""The kernels of a policy, one per operator, made from `policy.operator_kernels` when the operator is first called.

They hold no state of a region: whether it is enabled, its dtype and its cache are read at each call. So all modes with
the same rules share them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit.engine.bindings import binding
from ampkit.engine.casting import cast_to
from ampkit.engine.generated_handlers import kernel
from ampkit.engine.registration import GENERAL, OPERATORS, Kernel
from ampkit.policy.policy import RuleTable
from ampkit.torch_internals.dispatcher import TLS_NAME, autocast_key, get_in_tls, is_excluded, set_excluded
from ampkit.torch_internals.dynamo import dynamo_skip
from ampkit.torch_internals.transforms import functorch_level

__all__ = ["kernels_for"]

# False: every operator takes the general kernel. The tests compare the two.
SPECIALISE = os.environ.get("AMPKIT_GENERAL_KERNELS", "0") != "1"


def kernels_for(tables: tuple[tuple[str, RuleTable], ...], key: Any) -> dict[str, Kernel]:
    """The kernels of a mode with these rules and this dispatch key, by operator name.

    A mode for several devices has the general ones.
    """
    if len(tables) != 1 or not SPECIALISE:
        return GENERAL
    device_type, table = tables[0]
    if table.kernels is None:
        table.kernels = _Kernels(device_type, table, key)
    return table.kernels


class _Kernels(dict[str, Kernel]):
    """An operator's own kernel where there is one for its rule, else the general one."""

    def __init__(self, device_type: str, table: RuleTable, key: Any) -> None:
        super().__init__()
        to_float32 = cast_to(device_type, torch.float32)
        weights = _weights_on(device_type)
        self.rules = {op.name(): rule for op, rule in table.items()}
        self.variables: dict[str, Any] = {
            "_is_excluded": is_excluded, "_set_excluded": set_excluded, "_level": functorch_level,
            "_dtype_of": torch.get_autocast_dtype, "_weights": weights, "_cast_to": _casts_on(device_type, weights),
            "_cast_up": to_float32.tensor, "_eligible": to_float32.eligible, "_PLAIN": frozenset({Tensor, Parameter}),
            "_Parameter": Parameter, "_float32": torch.float32,
            "_KEY": key, "_AUTOCAST": autocast_key(device_type), "_DEVICE": device_type,
        }

    def __missing__(self, name: str) -> Kernel:
        op, general, rule = OPERATORS[name], GENERAL[name], self.rules.get(name)
        variables = {**self.variables, "_general": general, "_operator": binding(op)}
        own = None if rule is None else kernel(op, rule, variables)
        self[name] = general if own is None else dynamo_skip(own)
        return self[name]


def _weights_on(device_type: str) -> Callable[[torch.dtype], Callable[[Tensor], Tensor]]:
    def weights(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The function that casts weights to `dtype` in the open region."""
        cache = get_in_tls(TLS_NAME).cache
        return cast_to(device_type, dtype).tensor if cache is None else cache.weights(device_type, dtype)

    return weights


def _casts_on(
    device_type: str, weights: Callable[[torch.dtype], Callable[[Tensor], Tensor]]
) -> Callable[[torch.dtype], Callable[[Tensor], Tensor]]:
    @functools.cache
    def casts(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The function that casts tensors other than parameters to `dtype`."""
        to_dtype = cast_to(device_type, dtype)
        castable, on_device, convert = to_dtype.castable, to_dtype.on_device, to_dtype.convert

        def cast(tensor: Tensor) -> Tensor:
            if tensor.dtype not in castable or not on_device(tensor):
                return tensor
            if tensor.is_leaf and tensor.requires_grad:
                return weights(dtype)(tensor)
            return convert(tensor)

        return cast

    return casts
