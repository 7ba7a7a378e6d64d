"""SGD with momentum, whose step unscales, clips and skips on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.sgd import sgd as torch_sgd

import ampkit_kernels as kernels
from ampkit.gradients.step_contract import StepScalars
from ampkit.optim.device_step import DeviceStep, lr_for_kernel, multiplied, needs_float32, refuse_sparse
from ampkit.optim.low_precision_weights import Precision
from ampkit.torch_private import fused_sgd_, gathered


class SGD(DeviceStep, torch.optim.SGD):
    """`torch.optim.SGD` whose step unscales, clips and skips on the device while it updates.

    On CUDA one kernel per parameter group (and combination of dtypes) reads each gradient once, multiplied by the
    scaler's factor, and moves 20 bytes per float32 element with momentum, 12 without. If `found_inf` is set it changes
    nothing: a skipped first step starts no momentum, the next one does. The step never synchronizes and can be captured
    in a CUDA graph. On a CPU `torch.optim`'s own functions step, with the results of `torch.optim.SGD` with the same
    arguments; on a CUDA device on which Triton cannot run, plain tensor operations do. DTensors are updated shard by
    shard.

    Args:
        params: parameters or parameter groups, as in `torch.optim.SGD`.
        lr: learning rate, a number or a one-element tensor.
        momentum: factor of the momentum.
        dampening: must be 0.
        weight_decay: factor of the L2 penalty, a float.
        nesterov: Nesterov momentum.
        maximize: maximize the loss.
        foreach: choose among torch's functions on the CPU, as in torch.
        differentiable: must be False.
        fused: accepted and ignored on the CPU, where results equal `fused=False`: torch's fused SGD (2.13) does
            not change 16-bit parameters of 16 elements or more, and raises if some parameters have no momentum yet.
        impl: "auto", "triton" (raise if Triton cannot run) or "reference".
        max_grad_norm, rounding, masters, state_dtype, seed: as in `AdamW`.

    Raises:
        ValueError: a value that torch.optim.SGD refuses, an unknown `impl`, `rounding`, `masters` or `state_dtype`,
            `differentiable=True`, or a `dampening` that is not 0, also one that was set in a group since.
        TypeError: `weight_decay` is a tensor; `rounding`, `masters` or `state_dtype` with a parameter that is neither
            bfloat16 nor float32.
        RuntimeError: at `step`, a gradient is sparse.

    `grad_norm`: as in `AdamW`.

    State: `momentum_buffer` as in torch, `stream` and `remainder` as in `AdamW`; a `state_dict` of either loads into
    the other.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        impl: str = "auto",
        max_grad_norm: float | None = None,
        rounding: str = "nearest",
        masters: str | None = None,
        state_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        precision = Precision(rounding, masters, state_dtype, seed)
        self._prepare(impl, "SGD", differentiable, precision, max_grad_norm, weight_decay=weight_decay)
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, foreach=foreach, fused=fused
        )

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (("momentum_buffer",) if group["momentum"] else ()) + self._precision.streams

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        if group["dampening"] or group["differentiable"]:  # set since the group was added
            self._check_group(group)
        return {"momentum": group["momentum"], "nesterov": bool(group["nesterov"] and group["momentum"])}

    def _states(self, params: Sequence[Tensor], group: dict[str, Any]) -> list[dict[str, Any]]:
        if not group["momentum"] and self._precision.is_torchs:
            return [{} for _ in params]
        return self._fill(params, ("momentum_buffer",) if group["momentum"] else ())

    def _step_kernel(self, group: dict[str, Any], lists: list[list[Tensor]], **options: Any) -> None:
        params, grads, buffers = lists if len(lists) == 3 else [*lists, []]
        kernels.sgd_(params, grads, buffers, **options)

    def _fused(
        self, group: dict[str, Any], lists: list[list[Tensor]]
    ) -> Callable[[list[int], list[list[Tensor]]], None]:
        options = {
            "lr": lr_for_kernel(group["lr"], lists[0][0].device),
            "weight_decay": group["weight_decay"],
            "maximize": group["maximize"],
            "dampening": 0.0,
            "is_first_step": False,
            **self._options(group),
        }
        return lambda rows, stepped: fused_sgd_(*stepped, *[[]][len(stepped) - 2 :], **options)

    def _step_torch(self, group: dict[str, Any], device: torch.device, scalars: StepScalars) -> bool:
        if not self._precision.is_torchs:
            return False
        if device.type != "cpu" or scalars.skips_on_host():
            return device.type == "cpu"
        if needs_float32(group, scalars):
            return False
        (params, grads, buffers), _ = gathered(self, {**group, "fused": False}, 3)
        refuse_sparse(self, grads)
        torch_sgd(
            params,
            multiplied(grads, scalars),
            buffers or [None] * len(params),
            foreach=group["foreach"],
            fused=False,  # torch's fused one leaves certain 16-bit parameters unchanged, among other faults
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            dampening=0,
            **{**self._options(group), "nesterov": group["nesterov"]},
        )
        for param, buffer in zip(params, buffers, strict=bool(buffers)):
            self.state[param]["momentum_buffer"] = buffer
        return True
