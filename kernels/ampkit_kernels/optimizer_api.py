"""The public optimizer steps: validate the parallel lists, choose an implementation, hand over."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .dispatch import select
from .step_cache import StepCache
from .tensors import check_one_device, check_parallel, check_scalar, resolved, strided_floats


@torch.no_grad()
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
    amsgrad: bool = False,
    maximize: bool = False,
    multiplier: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    copies: Sequence[Tensor] | None = None,
    cache: StepCache | None = None,
    impl: str = "auto",
) -> None:
    """One AdamW step over lists of tensors, from gradients that may still be scaled; gradients are only read.

    Each gradient is multiplied by `multiplier` (say, `inv_scale * clip_coefficient`) and divided by
    `grad_scale` as it is read; either may be None. Where `found_inf` is set nothing changes: parameters,
    moments, `steps`, `copies`. `steps` are one float32 element per parameter, counted up in place.
    `max_exp_avg_sqs` is read and written with `amsgrad` only, and may be empty otherwise. `copies` receive
    the new parameters in their own dtype (float16 or bfloat16 weights for the next forward). `lr` may be a
    one-element tensor on the device. `cache` keeps what the step has found out, for the next one; PyTorch's operations
    need none. Arithmetic is float32 (float64 for float64 parameters), rounded once per stored value. Never
    synchronises. Moves 28 bytes per float32 element, 2 more with a half copy.

    Formula and order of operations: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", as in
    `torch.optim.AdamW`.

    >>> import torch
    >>> p, g, m, v, step = (torch.ones(1), torch.ones(1), torch.zeros(1), torch.zeros(1), torch.zeros(()))
    >>> adamw_([p], [g], [m], [v], [], [step], lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    >>> p, step
    (tensor([0.9000]), tensor(1.))
    """
    op = "adamw_"
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if amsgrad:
        lists["max_exp_avg_sqs"] = max_exp_avg_sqs
    if copies is not None:
        lists["copies"] = copies
    lists = _prepared(op, lists, multiplier, grad_scale, found_inf)
    _check_steps(op, steps, len(params))
    ops = select(impl, params[0].device) if params else reference
    kept = {}
    if ops is not reference:
        check_one_device([lists["params"][0], *steps], op)
        kept = {"cache": cache}
    parts = {"max_exp_avg_sqs": (), "copies": None, **lists}
    ops.adamw_(
        **parts, steps=steps, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
        maximize=maximize, multiplier=multiplier, grad_scale=grad_scale, found_inf=found_inf, **kept,
    )


@torch.no_grad()
def sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    started: Tensor | None = None,
    multiplier: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    copies: Sequence[Tensor] | None = None,
    cache: StepCache | None = None,
    impl: str = "auto",
) -> None:
    """One SGD step over lists of tensors, from gradients that may still be scaled; gradients are only read.

    `momentum_buffers` may be empty when `momentum` is 0. `started` is one float32 vector with an element
    per parameter: where it is 0 the buffer's contents are ignored, whatever they are, and the gradient
    itself becomes the first momentum, as in torch; a step that is not skipped sets it to 1. None means that
    all buffers count. `multiplier`, `grad_scale`, `found_inf`, `copies`, `lr` and `cache` (unused with `started`) as
    in `adamw_`. Never synchronises. Moves 20 bytes per float32 element with momentum, 12 without.

    >>> import torch
    >>> p, g = torch.ones(1), torch.full((1,), 4.0)
    >>> sgd_([p], [g], [], lr=0.1, multiplier=torch.tensor(0.5))
    >>> p
    tensor([0.8000])
    """
    op = "sgd_"
    lists = {"params": params, "grads": grads}
    if momentum != 0:
        lists["momentum_buffers"] = momentum_buffers
    if copies is not None:
        lists["copies"] = copies
    lists = _prepared(op, lists, multiplier, grad_scale, found_inf)
    if started is not None and (started.dtype != torch.float32 or started.shape != (len(params),)):
        raise ValueError(
            f"{op}: started is a {started.dtype} tensor of shape {tuple(started.shape)}; "
            f"expected float32 of shape ({len(params)},)"
        )
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(f"{op}: nesterov needs momentum > 0 and dampening 0, got {momentum} and {dampening}")
    parts = {"momentum_buffers": (), "copies": None, **lists}
    ops = select(impl, params[0].device) if params else reference
    kept = {} if ops is reference else {"cache": cache}
    ops.sgd_(
        **parts, started=started, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
        nesterov=nesterov, maximize=maximize, multiplier=multiplier, grad_scale=grad_scale, found_inf=found_inf, **kept,
    )


def _check_steps(op: str, steps: Sequence[Tensor], n: int) -> None:
    if len(steps) != n:
        raise ValueError(f"{op}: got {len(steps)} steps for {n} params; expected one for each")
    for step in steps:
        check_scalar("a step", step, [], op)


def _prepared(
    op: str,
    lists: dict[str, Sequence[Tensor]],
    multiplier: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> dict[str, list[Tensor]]:
    """The lists as strided real floats, checked against each other and against the scalars."""
    plain = {name: strided_floats(tensors, op) for name, tensors in lists.items() if name != "grads"}
    # Gradients are only read, so a copy may stand for them.
    plain["grads"] = strided_floats(resolved(lists["grads"]), op)
    plain = {name: plain[name] for name in lists}
    check_parallel(op, **plain)
    check_one_device([t for tensors in plain.values() for t in tensors], op)
    for name, value in (("multiplier", multiplier), ("grad_scale", grad_scale), ("found_inf", found_inf)):
        if value is not None:
            check_scalar(name, value, plain["params"], op)
    return plain
