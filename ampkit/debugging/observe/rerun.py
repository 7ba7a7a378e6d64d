"""Runs an operator again in float64, on the arguments that it had.

Inputs are copied and random number generators are restored, so the user's state does not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampkit.debugging.observe.call import Call
from ampkit.debugging.observe.operator_properties import OperatorProperties, converted_arguments, tensors_in

_BELOW_FLOAT64 = (torch.float16, torch.bfloat16, torch.float32, torch.complex64)
_PRIVATE_FORMAT = ("mkldnn_rnn", "_cudnn_rnn", "miopen_rnn")  # return memory that only their own backward can read


def run_in_float64(op: OperatorProperties, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the results of an operator on float64 copies of its inputs."""

    def widened(value: Tensor) -> Tensor:
        if value.dtype not in _BELOW_FLOAT64 and not value.is_floating_point():
            return value.clone()
        return value.detach().to(torch.complex128 if value.is_complex() else torch.float64, copy=True)

    wide_args, wide_kwargs = converted_arguments(
        op, args, kwargs, widened, lambda dtype: torch.float64 if dtype in _BELOW_FLOAT64 else dtype
    )
    devices = {tensor.device for tensor in tensors_in((args, kwargs)) if tensor.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(list(devices), enabled=op.random):
        result = op.func(*wide_args, **wide_kwargs)
    outputs = [*op.outputs(result, wide_args, wide_kwargs), *op.buffers(wide_args, wide_kwargs)]
    return [output for output in outputs if output.is_floating_point() or output.is_complex()]


def float64_results(call: Call) -> list[Tensor]:
    """Return the results of a call that has just run, in float64; none if it has no float64."""
    args, kwargs = call.arguments()
    try:
        return run_in_float64(call.op, args, kwargs)
    except Exception:  # operators without float64 raise many kinds of errors
        return []


def why_not_again(op: OperatorProperties, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why an operator cannot run again; "" if it can."""
    if op.communicates:
        return "it communicates with other processes"
    if op.opaque_state or any(part in op.name for part in _PRIVATE_FORMAT):
        return "its kernels use memory in a private format"
    if op.uninitialized:
        return "it reads nothing"
    if op.random:
        for position, argument in enumerate(op.func._schema.arguments):
            if argument.name == "dropout_p":
                p = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
                return "it draws random numbers" if p else ""
        return "it draws random numbers"
    return ""
