"""The public optimizer steps: validate the parallel lists, choose an implementation, hand over."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import reference
from .configs import is_capturing
from .dispatch import select, uses_triton
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
    impl: str = "auto",
) -> None:
    """One AdamW step over lists of tensors, from gradients that may still be scaled; gradients are only read.

    Each gradient is multiplied by `multiplier` (say, `inv_scale * clip_coefficient`) and divided by
    `grad_scale` as it is read; either may be None. Where `found_inf` is set nothing changes: parameters,
    moments, `steps`, `copies`. `steps` are one float32 element per parameter, counted up in place.
    `max_exp_avg_sqs` is read and written with `amsgrad` only, and may be empty otherwise. `copies` receive
    the new parameters in their own dtype (float16 or bfloat16 weights for the next forward). `lr` may be a
    one-element tensor on the device. Arithmetic is float32 (float64 for float64 parameters), rounded once
    per stored value. Never synchronises. Moves 28 bytes per float32 element, 2 more with a half copy.

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
    if ops is not reference:
        check_one_device([lists["params"][0], *steps], op)
    parts = {"max_exp_avg_sqs": (), "copies": None, **lists}
    ops.adamw_(
        **parts, steps=steps, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
        amsgrad=amsgrad, maximize=maximize, multiplier=multiplier, grad_scale=grad_scale, found_inf=found_inf,
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
    impl: str = "auto",
) -> None:
    """One SGD step over lists of tensors, from gradients that may still be scaled; gradients are only read.

    `momentum_buffers` may be empty when `momentum` is 0. `started` is one float32 vector with an element
    per parameter: where it is 0 the buffer's contents are ignored, whatever they are, and the gradient
    itself becomes the first momentum, as in torch; a step that is not skipped sets it to 1. None means that
    all buffers count. `multiplier`, `grad_scale`, `found_inf`, `copies` and `lr` as in `adamw_`. Never
    synchronises. Moves 20 bytes per float32 element with momentum, 12 without.

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
    (select(impl, params[0].device) if params else reference).sgd_(
        **parts, started=started, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
        nesterov=nesterov, maximize=maximize, multiplier=multiplier, grad_scale=grad_scale, found_inf=found_inf,
    )


@torch.no_grad()
def adamw_plan(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    amsgrad: bool = False,
    copies: Sequence[Tensor] | None = None,
    impl: str = "auto",
) -> Any:
    """What `adamw_` has to find out about its lists, for one that steps the same parameters again and again.

    None where Triton does not serve every row; else an object with `run(lists, options)`. `lists` are those given
    here, in the order params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs with `amsgrad`, copies if there are any,
    steps; `options` are `adamw_`'s from `lr` to `found_inf`, none left out. It returns False, having done nothing,
    where the lists are not what they were (gradients may be other tensors, anything may have moved; all else may not
    have changed), on another stream or thread, and under graph capture: call `adamw_` then. Checks and raises as
    `adamw_`.
    """
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if amsgrad:
        lists["max_exp_avg_sqs"] = max_exp_avg_sqs
    ops = _planner("adamw_", lists, copies, steps, impl)
    if ops is None:
        return None
    return ops.adamw_plan(
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, amsgrad=amsgrad, copies=copies
    )


@torch.no_grad()
def sgd_plan(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    momentum: float = 0.0,
    copies: Sequence[Tensor] | None = None,
    impl: str = "auto",
) -> Any:
    """As `adamw_plan`, for `sgd_` without `started`: lists are params, grads, momentum_buffers with `momentum`, copies.

    `run` takes `momentum` among its options too; it may change, but not from or to 0.
    """
    lists = {"params": params, "grads": grads}
    if momentum != 0:
        lists["momentum_buffers"] = momentum_buffers
    ops = _planner("sgd_", lists, copies, (), impl)
    return None if ops is None else ops.sgd_plan(params, grads, momentum_buffers, momentum=momentum, copies=copies)


def _planner(
    op: str, lists: dict[str, Sequence[Tensor]], copies: Sequence[Tensor] | None, steps: Sequence[Tensor], impl: str
) -> ModuleType | None:
    """Whoever serves every row of these lists as they are; None where that takes PyTorch, views or copies.

    None also under graph capture, when nothing may be sent to the device that a replay would not send again.
    """
    if lists["params"] and is_capturing(lists["params"][0].device):
        return None
    given = lists if copies is None else {**lists, "copies": copies}
    prepared = _prepared(op, given, None, None, None)
    as_given = all(a is b for name in given for a, b in zip(given[name], prepared[name], strict=True))
    if not lists["params"] or not as_given or not uses_triton(impl, lists["params"][0].device):
        return None
    from .triton_ops.launch import flat_rows

    if len(flat_rows(*prepared.values())[0]) != len(lists["params"]):
        return None
    _check_steps(op, steps, len(lists["params"]) if op == "adamw_" else 0)
    check_one_device([lists["params"][0], *steps], op)
    return select(impl, lists["params"][0].device)


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
