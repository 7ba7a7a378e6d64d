"""AdamW, reading scaled gradients once and writing none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

import ampkit_kernels as kernels
from ampkit.gradients.amp_optimizers import StepScalars
from ampkit.optim import _step
from ampkit.optim._step import DeviceStep, Row
from ampkit.torch_internals.optimizers import foreach_mul

_NAMES = ("exp_avg", "exp_avg_sq", "step")
_NAMES_AMSGRAD = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")


class AdamW(DeviceStep, torch.optim.AdamW):
    """`torch.optim.AdamW` whose step unscales, clips and skips on the device while it updates.

    On CUDA one kernel per parameter group (and combination of dtypes) reads each gradient once, multiplied
    by what the scaler provides, and moves 28 bytes per float32 element; `found_inf` makes it return
    at once, moments and step counts untouched. The step never synchronises and can be captured in a CUDA
    graph. On the CPU, or where Triton cannot run, `torch.optim`'s own functions do the arithmetic, with
    results equal to `torch.optim.AdamW` with the same arguments.

    Args: params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, fused: as in
    `torch.optim.AdamW`. `lr` may be a one-element tensor, `betas` are floats. `foreach`, `capturable` and
    `fused` choose among torch's functions where those are used. impl: "auto", "triton" (raise where Triton
    cannot run) or "reference" (torch's functions).

    Raises:
        ValueError: for values that torch.optim.AdamW refuses, an unknown `impl`, `differentiable=True`.
        TypeError: `betas` are tensors.
        RuntimeError: at `step`, a gradient is sparse.

    State: `step`, `exp_avg`, `exp_avg_sq`, `max_exp_avg_sq` as in torch; a `state_dict` of either loads
    into the other. On CUDA `step` lives on the device. DTensor parameters are updated shard by shard.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = AdamW(model.parameters(), lr=0.01)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        impl: str = "auto",
    ) -> None:
        _step.refuse_differentiable(differentiable, "AdamW")
        for beta in betas:
            _step.plain_number(beta, "betas", "AdamW")
        self._prepare(impl)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            fused=fused,
        )

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return _NAMES_AMSGRAD if group["amsgrad"] else _NAMES

    def _options(self, group: dict[str, Any], scalars: StepScalars, device: torch.device) -> dict[str, Any]:
        return {
            "lr": _step.lr_for_kernel(group["lr"], device),
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "maximize": group["maximize"],
            "multiplier": scalars.grad_multiplier,
            "grad_scale": scalars.grad_scale,
            "found_inf": scalars.found_inf,
        }

    def _states(self, rows: Sequence[Row], group: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
        states = [self._state_of(row, group, device, torch.float32) for row in rows]
        for state in states:
            # A state_dict from torch.optim may count on the host, or as a plain number.
            _count_on(state, device, torch.float32)
        return states

    def _state_of(
        self, row: Row, group: dict[str, Any], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Any]:
        state = self.state[row.param]
        if not state:
            state["step"] = torch.zeros((), dtype=dtype, device=device)
            state["exp_avg"] = torch.zeros_like(row.param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(row.param, memory_format=torch.preserve_format)
        if group["amsgrad"] and "max_exp_avg_sq" not in state:
            state["max_exp_avg_sq"] = torch.zeros_like(row.param, memory_format=torch.preserve_format)
        return state

    def _step_kernel(
        self, group: dict[str, Any], lists: list[list[Tensor]], states: list[dict[str, Any]], **options: Any
    ) -> None:
        params, grads, exp_avgs, exp_avg_sqs, *largest, steps = lists
        max_exp_avg_sqs = largest[0] if largest else []
        amsgrad = group["amsgrad"]
        kernels.adamw_(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, amsgrad=amsgrad, **options)

    def _step_torch(
        self, group: dict[str, Any], device: torch.device, rows: list[Row], scalars: StepScalars
    ) -> bool:
        if scalars.skips_on_host():
            return True
        on_host = device.type == "cpu"
        # Elsewhere torch's fused kernel is the one that can skip without asking the host.
        fused = group["fused"] if on_host else True
        counts_on_device = bool(fused or group["capturable"])
        # As torch.optim counts: fused in float32, else in the default dtype where that is float64.
        counts_in_float64 = not fused and torch.get_default_dtype() is torch.float64
        dtype = torch.float64 if counts_in_float64 else torch.float32
        step_device = device if counts_on_device else torch.device("cpu")
        states = [self._state_of(row, group, step_device, dtype) for row in rows]
        for state in states:
            if counts_on_device or not isinstance(state["step"], Tensor):
                _count_on(state, step_device, dtype)
        exp_avgs, exp_avg_sqs, *largest, steps = [
            [_step.local_tensor(state[name]) for state in states] for name in self._names(group)
        ]
        torch_adamw(
            [row.local for row in rows],
            _step.scaled(rows, scalars.factor_on_host()) if on_host else _multiplied(rows, scalars),
            exp_avgs,
            exp_avg_sqs,
            largest[0] if largest else [],
            steps,
            foreach=group["foreach"] if on_host else False,
            capturable=group["capturable"],
            fused=fused,
            found_inf=None if on_host else scalars.found_inf,
            has_complex=any(torch.is_complex(row.local) for row in rows),
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        return True


def _multiplied(rows: Sequence[Row], scalars: StepScalars) -> list[Tensor]:
    """The rows' gradients times factors that lie on their device; the gradients themselves are left alone."""
    grads = [row.grad for row in rows]
    for factor in (scalars.grad_multiplier, scalars.inverse_scale()):
        if factor is not None:
            grads = list(foreach_mul(grads, factor))
    return grads


def _count_on(state: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    """Have the step count on `device` in `dtype`."""
    step = state["step"]
    if not isinstance(step, Tensor):
        state["step"] = torch.full((), float(step), dtype=dtype, device=device)
    elif step.device != device or step.dtype != dtype:
        state["step"] = step.to(device, dtype)
