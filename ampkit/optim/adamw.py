"""AdamW, whose step unscales, clips and skips on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.optim.adamw import adamw as torch_adamw

import ampkit_kernels as kernels
from ampkit.dtypes import REAL_FLOATS
from ampkit.gradients.collect import ORDINARY
from ampkit.gradients.step_contract import StepScalars
from ampkit.optim.device_step import DeviceStep, local_gradient, lr_for_kernel, multiplied, needs_float32, refuse_sparse
from ampkit.optim.low_precision_weights import Precision
from ampkit.torch_private import foreach_add_, fused_adamw_, gathered, local_tensors, placements_of

_dtype_of, _nbytes_of = attrgetter("dtype"), attrgetter("nbytes")
_NAMES = ("exp_avg", "exp_avg_sq", "step")
_NAMES_AMSGRAD = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")


class AdamW(DeviceStep, torch.optim.AdamW):
    """`torch.optim.AdamW` whose step unscales, clips and skips on the device while it updates.

    On CUDA one kernel per parameter group (and combination of dtypes) reads each gradient once, multiplied by the
    scaler's factor, and moves 28 bytes per float32 element. If `found_inf` is set it changes neither moments
    nor step counts. The step never synchronizes and can be captured in a CUDA graph. On a CPU, or if Triton
    cannot run, `torch.optim`'s own functions step: the fused one, with the results of `torch.optim.AdamW(fused=True)`,
    unless `fused` or `foreach` chooses another.
    With `rounding`, `masters` or `state_dtype` the step is computed in float32, on a CPU by the fused function, and
    rounded once; parameters must be bfloat16, or float32, which need neither random bits nor remainders. DTensors are
    updated shard by shard.

    Args:
        params: parameters or parameter groups, as in `torch.optim.AdamW` (Loshchilov and Hutter 2019).
        lr: learning rate, a number or a one-element tensor.
        betas: decay rates of the two moments, floats.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        amsgrad: divide by the largest second moment so far.
        maximize: maximize the loss.
        foreach, capturable, fused: choose among torch's functions, if these compute the step. None, for both `foreach`
            and `fused`: the fused one; `fused=False` is bitwise identical to torch's default on a CPU. On a CPU, the
            default replaces the fused one for complex parameters, for subclasses of tensors unless `fused=True`, and
            for tensors that the fused one (2.13) handles incorrectly: it confuses elements of tensors that are not
            contiguous, and writes to other memory if state differs from its parameter in size.
        differentiable: must be False.
        impl: "auto", "triton" (raise if Triton cannot run) or "reference" (torch's functions).
        max_grad_norm: clip in the step by the 2-norm of all gradients, including all shards of DTensors,
            without writing `.grad`; 32 bytes per float32 element. None: no clipping.
        rounding: "nearest", or "stochastic": bfloat16 weights and moments are rounded up or down at random, so that the
            mean is right.
        masters: None, or "remainder": 16 more bits per bfloat16 weight. The step is bitwise identical to the step of a
            float32 weight, on a CPU by `torch.optim.AdamW(fused=True)`.
        state_dtype: dtype of moments, torch.float32 or torch.bfloat16; None: the dtype of the weights or their masters.
        seed: seed of stochastic rounding.

    Raises:
        ValueError: a value that torch.optim.AdamW refuses, a `max_grad_norm` out of range, an unknown `impl`,
            `rounding`, `masters` or `state_dtype`, or `differentiable=True`.
        TypeError: `betas` are tensors, or `rounding`, `masters` or `state_dtype` with a parameter of another dtype. At
            `step` of a kernel, moments of a parameter that differ in dtype.
        RuntimeError: at `step`, a gradient is sparse.

    `grad_norm`: the norm of the last step with `max_grad_norm`, unscaled and before clipping, 0-d on the device; None
    before it.

    State: `step` (on the device on CUDA), `exp_avg`, `exp_avg_sq`, `max_exp_avg_sq` as in torch: a `state_dict` of
    either loads into the other. `stream`, int64, is the source of random numbers. `remainder` is the lower half of a
    float32 master, 16 bits held as float16.

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
        max_grad_norm: float | None = None,
        rounding: str = "nearest",
        masters: str | None = None,
        state_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        precision = Precision(rounding, masters, state_dtype, seed)
        self._prepare(impl, "AdamW", differentiable, precision, max_grad_norm, betas=betas)
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
        return (_NAMES_AMSGRAD if group["amsgrad"] else _NAMES) + self._precision.streams

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {"beta1": beta1, "beta2": beta2, "eps": group["eps"]}

    def _states(self, params: Sequence[Tensor], group: dict[str, Any]) -> list[dict[str, Any]]:
        moments = (_NAMES_AMSGRAD if group["amsgrad"] else _NAMES)[:-1]
        states = self._fill(params, moments)
        for param, state in zip(params, states, strict=True):
            if len({state[name].dtype for name in moments}) != 1:
                self._refuse_mixed(param, {name: state[name].dtype for name in moments})
        for param, state in zip(params, states, strict=True):
            _count_on(state, param.device)
        return states

    def _refuse_mixed(self, param: Tensor, dtypes: dict[str, torch.dtype]) -> None:
        """Raise `TypeError` for moments of different dtypes."""
        number = next(i for i, known in enumerate(self._parameters()) if known is param)
        described = ", ".join(f"{name} of {dtype}" for name, dtype in dtypes.items())
        raise TypeError(
            f"ampkit.optim.AdamW got, in the state of parameter {number} of shape {tuple(param.shape)}, {described}; "
            "expected one dtype: convert all of them, or pass state_dtype=, which does"
        )

    def _step_kernel(self, group: dict[str, Any], lists: list[list[Tensor]], **options: Any) -> None:
        params, grads, exp_avgs, exp_avg_sqs, *largest, steps = lists
        max_exp_avg_sqs = largest[0] if largest else []
        amsgrad = group["amsgrad"]
        kernels.adamw_(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, amsgrad=amsgrad, **options)

    def _fused(
        self, group: dict[str, Any], lists: list[list[Tensor]]
    ) -> Callable[[list[int], list[list[Tensor]]], None]:
        steps = lists.pop()
        foreach_add_(steps, torch.ones((), dtype=torch.float32, device="cpu"))
        options = {
            "lr": lr_for_kernel(group["lr"], steps[0].device),
            "weight_decay": group["weight_decay"],
            "amsgrad": group["amsgrad"],
            "maximize": group["maximize"],
            **self._options(group),
        }

        def step(rows: list[int], stepped: list[list[Tensor]]) -> None:
            largest = stepped[4] if group["amsgrad"] else []
            fused_adamw_(*stepped[:4], largest, [steps[i] for i in rows], **options)

        return step

    def _step_torch(self, group: dict[str, Any], device: torch.device, scalars: StepScalars) -> bool:
        if not self._precision.is_torchs:
            return False
        on_host = device.type == "cpu"
        skips = on_host and scalars.skips_on_host()
        if on_host and not skips and needs_float32(group, scalars):
            return False
        if not on_host:  # of torch's functions only the fused one can skip on the device
            group = {**group, "fused": True, "foreach": False}
            for state in filter(None, map(self.state.get, group["params"])):
                _count_on(state, device)
        try:
            columns, has_complex = gathered(self, group, 6)
        except RuntimeError:
            refuse_sparse(self, [param.grad for param in group["params"] if param.grad is not None])
            raise
        if skips:  # with a state of zeros: a checkpoint without it, of a run that has only skipped, would not load
            return True
        if any(map(is_not, map(_dtype_of, columns[0]), map(_dtype_of, columns[1]))):
            return False  # torch's functions refuse gradients of `Tensor.grad_dtype`
        written, fused, foreach = columns[0], group["fused"], group["foreach"]
        parts = [(columns, fused)]
        if on_host:
            are_ordinary = set(map(type, written)) <= ORDINARY
            if not are_ordinary and not is_compiling():
                grads = list(map(local_gradient, written, columns[1]))
                where, moments = placements_of(written), list(filter(None, columns[2:-1]))
                if all(placements_of(column) == where for column in moments):  # else torch redistributes
                    # Each of torch's operations would be dispatched on a DTensor.
                    columns = [grads if i == 1 else local_tensors(column) for i, column in enumerate(columns)]
            is_default = fused is None and foreach is None and not group["capturable"]
            if fused or (is_default and (are_ordinary or _are_torchs(columns[0]))):
                parts = _fused_parts(columns)
        for (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps), fused in parts:
            scale = scalars.grad_scale if fused and on_host and scalars.grad_multiplier is None else None
            torch_adamw(
                params,
                grads if scale is not None else multiplied(grads, scalars),
                exp_avgs,
                exp_avg_sqs,
                max_exp_avg_sqs,
                steps,
                foreach=foreach,
                capturable=group["capturable"],
                fused=fused,
                grad_scale=scale,
                found_inf=None if on_host else scalars.found_inf,
                has_complex=has_complex,
                amsgrad=group["amsgrad"],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                maximize=group["maximize"],
                **self._options(group),
            )
        if on_host:  # torch's fused step increments no version; a write to a shard none of its DTensor
            torch.autograd.graph.increment_version(written)
        return True


def _are_torchs(params: Sequence[Tensor]) -> bool:
    """Whether all types are torch's own: other subclasses, as of quantized weights, need not have a fused step."""
    where = placements_of(params)
    return all(type(param) in ORDINARY or place is not None for param, place in zip(params, where, strict=True))


def _fused_parts(columns: list[list[Tensor]]) -> list[tuple[list[list[Tensor]], bool]]:
    """Return the rows of parallel lists that torch's fused CPU step accepts, after the others, which may raise."""
    if _can_be_fused(columns):
        return [(columns, True)]
    can = [_can_be_fused([column[i : i + 1] for column in columns]) for i in range(len(columns[0]))]
    parts = []
    for fused in (False, True):
        rows = [i for i, each in enumerate(can) if each is fused]
        if rows:
            parts.append(([[column[i] for i in rows] if column else [] for column in columns], fused))
    return parts


def _can_be_fused(columns: Sequence[Sequence[Tensor]]) -> bool:
    """Whether torch's fused step (2.13) is right for these parameters, gradients and state on a CPU.

    It takes elements in the order of memory, which is wrong for tensors whose strides differ, such as `channels_last`
    weights. It writes past the end of state that is smaller than its parameter. It refuses state of another dtype,
    which its other steps accept.
    """
    sizes = list(map(_nbytes_of, columns[0]))
    if not set(map(_dtype_of, columns[0])) <= REAL_FLOATS:
        return False
    for tensors in columns[:-1]:  # without the steps
        if tensors and not (all(map(Tensor.is_contiguous, tensors)) and list(map(_nbytes_of, tensors)) == sizes):
            return False
    return True


def _count_on(state: dict[str, Any], device: torch.device) -> None:
    """Put the step count on `device` in float32; a state of torch.optim may have it on the host, or as a number."""
    step = state.get("step", 0.0)
    if not isinstance(step, Tensor):
        state["step"] = torch.full((), float(step), dtype=torch.float32, device=device)
    elif step.device != device or step.dtype != torch.float32:
        state["step"] = step.to(device, torch.float32)
