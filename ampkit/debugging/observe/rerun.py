"""Runs an operator again in float64, on the arguments of its call.

Inputs are copied and random number generators are restored, so the user's state does not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampkit.debugging.observe.call import Call
from ampkit.debugging.observe.operator_properties import OperatorProperties, converted_arguments, outputs_of, tensors_in


def float64_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for a floating-point dtype, complex128 for a complex one, and any other unchanged."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def run_in_float64(op: OperatorProperties, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the results of an operator on float64 copies of its inputs."""

    def upcast(value: Tensor) -> Tensor:
        return value.detach().to(float64_dtype(value.dtype), copy=True)

    args, kwargs = converted_arguments(op, args, kwargs, upcast, float64_dtype)
    devices = {tensor.device for tensor in tensors_in((args, kwargs)) if tensor.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(list(devices), enabled=op.random):
        result = op.func(*args, **kwargs)
    outputs = outputs_of(result, op.written(args, kwargs))
    return [each for each in outputs if each.is_floating_point() or each.is_complex()]


def float64_results(call: Call) -> list[Tensor]:
    """Return the results of a call that has just run, in float64; none if it has no float64."""
    args, kwargs = call.arguments()
    try:
        return run_in_float64(call.op, args, kwargs)
    except Exception:  # operators without float64 raise many kinds of errors
        return []


def can_run_again(op: OperatorProperties, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator returns the same for the same arguments, and affects no other process."""
    if op.communicates or op.opaque_state or op.uninitialized:
        return False
    if not op.random:
        return True
    names = [argument.name for argument in op.func._schema.arguments]
    return "dropout_p" in names and not {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0)
