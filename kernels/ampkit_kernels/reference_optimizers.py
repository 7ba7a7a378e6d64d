"""The optimizer steps of this package in plain PyTorch: the oracle that the Triton kernels answer to.

Tensors, widened to the arithmetic's type, updated and rounded once per stored value. The decision to skip
is taken on the host where `found_inf` lies in host memory, and by selection between old and new values
elsewhere.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .reference import host_value


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    multiplier: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    copies: Sequence[Tensor] | None,
) -> None:
    """One AdamW step in fp32 (fp64 for fp64 parameters), rounded once per stored value; see
    `ampkit_kernels.adamw_`.

    The operations and their order are those of `torch.optim.AdamW(foreach=False)`, so that fp32 and fp64
    results are equal to it bit for bit on the CPU.
    """
    if _skips_on_host(found_inf):
        return
    skip = _device_flag(found_inf)
    for i, (p, grad, m, v, step) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)):
        acc = torch.float64 if p.dtype is torch.float64 else torch.float32
        count, rate = _count_and_rate(step, lr)
        step_size = _scalar(rate / (1 - beta1**count), p, acc)
        correction = _scalar((1 - beta2**count) ** 0.5, p, acc)
        g = _incoming(grad, acc, maximize, multiplier, grad_scale)
        new_p = p.to(acc) if weight_decay == 0 else p.to(acc) * _scalar(1 - rate * weight_decay, p, acc)
        new_m = torch.lerp(m.to(acc), g, 1 - beta1)
        new_v = torch.addcmul(v.to(acc) * beta2, g, g, value=1 - beta2)
        stored = [(m, new_m), (v, new_v), (step, step + 1)]
        if amsgrad:
            second = torch.maximum(max_exp_avg_sqs[i].to(acc), new_v)
            stored.append((max_exp_avg_sqs[i], second))
        else:
            second = new_v
        new_p = new_p - step_size * new_m / (second.sqrt() / correction + eps)
        _store(p, new_p, stored, copies[i] if copies else None, skip)


def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    started: Tensor | None,
    multiplier: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    copies: Sequence[Tensor] | None,
) -> None:
    """One SGD step in fp32 (fp64 for fp64 parameters), rounded once per stored value; see
    `ampkit_kernels.sgd_`.

    The operations and their order are those of `torch.optim.SGD(foreach=False)`.
    """
    if _skips_on_host(found_inf):
        return
    skip = _device_flag(found_inf)
    for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
        acc = torch.float64 if p.dtype is torch.float64 else torch.float32
        g = _incoming(grad, acc, maximize, multiplier, grad_scale)
        if weight_decay != 0:
            g = torch.add(g, p.to(acc), alpha=weight_decay)
        stored = []
        if momentum != 0:
            buffer = momentum_buffers[i]
            new_buffer = torch.add(buffer.to(acc) * momentum, g, alpha=1 - dampening)
            if started is not None:
                new_buffer = torch.where(started[i] != 0, new_buffer, g)
            stored.append((buffer, new_buffer))
            g = torch.add(g, new_buffer, alpha=momentum) if nesterov else new_buffer
        if isinstance(lr, Tensor):
            new_p = p.to(acc) - lr.to(p.device, acc) * g
        else:
            new_p = torch.add(p.to(acc), g, alpha=-lr)
        _store(p, new_p, stored, copies[i] if copies else None, skip)
    if started is not None:
        started.copy_(torch.ones_like(started) if skip is None else torch.where(skip, started, 1))


def _skips_on_host(found_inf: Tensor | None) -> bool:
    return found_inf is not None and found_inf.device.type == "cpu" and host_value(found_inf) != 0.0


def _device_flag(found_inf: Tensor | None) -> Tensor | None:
    """The skip as a device bool where only the device knows it; None where nothing is skipped."""
    if found_inf is None or found_inf.device.type == "cpu":
        return None
    return found_inf.reshape(()) != 0


def _count_and_rate(step: Tensor, lr: float | Tensor) -> tuple[float | Tensor, float | Tensor]:
    """This step's number and the learning rate: numbers where the host can see both, else float64 tensors."""
    lr_is_free = not isinstance(lr, Tensor) or lr.device.type == "cpu"
    if step.device.type == "cpu" and lr_is_free:
        return host_value(step) + 1, host_value(lr.detach()) if isinstance(lr, Tensor) else lr
    return step.double() + 1, lr.to(step.device, torch.float64) if isinstance(lr, Tensor) else lr


def _scalar(value: float | Tensor, like: Tensor, dtype: torch.dtype) -> Tensor | float:
    return value.to(like.device, dtype) if isinstance(value, Tensor) else value


def _incoming(
    grad: Tensor, acc: torch.dtype, maximize: bool, multiplier: Tensor | None, grad_scale: Tensor | None
) -> Tensor:
    """The gradient as the update sees it: widened, multiplied, divided, negated."""
    g = grad.to(acc)
    if multiplier is not None:
        g = g * multiplier.to(g.device, acc)
    if grad_scale is not None:
        g = g * grad_scale.double().reciprocal().float().to(g.device, acc)
    return -g if maximize else g


def _store(
    p: Tensor, new_p: Tensor, stored: list[tuple[Tensor, Tensor]], copy: Tensor | None, skip: Tensor | None
) -> None:
    """Write new values, or the old ones again where a device flag says skip."""
    pairs = [(p, new_p), *stored]
    if copy is not None:
        pairs.append((copy, new_p.to(p.dtype)))
    for old, new in pairs:
        old.copy_(new if skip is None else torch.where(skip, old, new.to(old.dtype)))
