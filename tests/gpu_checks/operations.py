"""Each operation on a device beside its reference. On the CPU, with TRITON_INTERPRET=1, they run in the interpreter."""

import itertools
from collections.abc import Callable
from typing import Any

import torch

import ampkit_kernels as kernels
from tests.gpu_checks.tools import FLOATS, SIZES, Registry, close, lists, same, scalar

CHECKS = Registry()
check = CHECKS.add


@check
def unscale_equals_the_reference(device: torch.device) -> None:
    for dtype, offset, inv in itertools.product(FLOATS, (0, 1, 3), (2.0**-16, 0.001)):
        if device.type == "cpu" and (dtype is torch.bfloat16 or offset == 3):
            continue  # the interpreter truncates to bfloat16
        grads = lists(device, dtype, offset)
        want, flag, want_flag = (
            [g.cpu().clone() for g in grads],
            scalar(0.0, device),
            scalar(0.0, torch.device("cpu")),
        )
        kernels.unscale_(want, torch.tensor(inv), want_flag, impl="reference")
        kernels.unscale_(grads, scalar(inv, device), flag, impl="triton")
        same([*grads, flag], [*want, want_flag], f"{dtype} offset {offset} factor {inv}")


@check
def unscale_every_half_pattern(device: torch.device) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    for dtype, inv in itertools.product((torch.float16, torch.bfloat16), (1.0, 0.5, 0.001, 3.0)):
        if device.type == "cpu" and dtype is torch.bfloat16:
            continue
        patterns = bits.view(dtype)
        want = (patterns.float() * inv).to(dtype)
        got, flag = patterns.to(device), scalar(0.0, device)
        kernels.unscale_([got], scalar(inv, device), flag, impl="triton")
        same([got], [want], f"{dtype} factor {inv}")
        assert flag.item() == 1.0


@check
def every_planted_value_is_found(device: torch.device) -> None:
    for dtype, value in itertools.product(FLOATS, (float("inf"), -float("inf"), float("nan"))):
        for tensor, position in ((0, 0), (4, 254), (6, 4096), (-1, -1)):
            grads = lists(device, dtype)
            grads[tensor][position] = value
            flags = [scalar(0.0, device) for _ in range(2)]
            kernels.norm_and_check(grads, scalar(0.5, device), flags[0], impl="triton")
            counts = kernels.nonfinite_counts(grads, impl="triton").sum(0).tolist()
            kernels.unscale_(grads, scalar(0.5, device), flags[1], impl="triton")
            assert [f.item() for f in flags] == [1.0, 1.0], f"{dtype} {value} at {tensor}, {position}"
            assert counts == ([0, 1] if value != value else [1, 0]), counts
            if device.type == "cpu":
                break


@check
def norms_against_float64(device: torch.device) -> None:
    for dtype, order in itertools.product(FLOATS, (1.0, 2.0, float("inf"))):
        grads, flag = lists(device, dtype, 1), scalar(0.0, device)
        want = torch.linalg.vector_norm(torch.cat([g.double() for g in grads]) * 0.25, order)
        results = [
            kernels.norm_and_check(grads, scalar(0.25, device), flag, order, impl="triton") for _ in range(3)
        ]
        close(results[0], want, 1e-5, f"{dtype} order {order}")
        assert torch.equal(results[0], results[1]), "the same list gave other bits"
        assert torch.equal(results[0], results[2]), "the same list gave other bits"
        assert flag.item() == 0.0


@check
def multiply_on_the_device(device: torch.device) -> None:
    for dtype in FLOATS[:2]:
        grads = lists(device, dtype, 1)
        before = [g.clone() for g in grads]
        kernels.multiply_(grads, scalar(1.0, device), impl="triton")
        kernels.multiply_(grads, scalar(0.5, device), scalar(1.0, device), impl="triton")
        same(grads, before, "factor 1, or found_inf set")
        kernels.multiply_(grads, scalar(0.3, device), scalar(0.0, device), impl="triton")
        same(grads, [(b.float() * torch.tensor(0.3, device=device)).to(dtype) for b in before], "factor 0.3")


@check
def casts_equal_pytorchs(device: torch.device) -> None:
    for source, destination in itertools.product(FLOATS, FLOATS):
        if device.type == "cpu" and torch.bfloat16 in (source, destination):
            continue
        for offset in (0, 1):  # the copies are aligned, their sources not always
            sources = lists(device, source, offset)
            copies = [torch.full_like(s, float("nan"), dtype=destination) for s in sources]
            kernels.cast_(sources, copies, impl="triton")
            same(copies, [s.to(destination) for s in sources], f"{source} offset {offset} to {destination}")


@check
def unscale_into_equals_the_reference(device: torch.device) -> None:
    cpu = torch.device("cpu")
    for source, accumulate, offset in itertools.product(FLOATS[:3], (False, True), (0, 1)):
        if device.type == "cpu" and source is torch.bfloat16:
            continue
        for value in (1.0, float("inf")):
            sources = lists(device, source, offset)
            sources[-1][-1] = value
            into = [torch.randn(s.shape, device=device) for s in sources]
            want, flag, want_flag = [t.cpu().clone() for t in into], scalar(0.0, device), scalar(0.0, cpu)
            kernels.unscale_into_(
                [s.cpu() for s in sources], want, scalar(0.001, cpu), want_flag, accumulate=accumulate, impl="reference"
            )
            kernels.unscale_into_(
                sources, into, scalar(0.001, device), flag, accumulate=accumulate, impl="triton"
            )
            same([*into, flag], [*want, want_flag], f"{source} offset {offset} accumulate {accumulate} {value}")


@check
def adamw_steps_follow_float64(device: torch.device) -> None:
    from ampkit.optim import AdamW

    for options in ({}, {"amsgrad": True, "maximize": True}):
        _steps(device, lambda p, o=options: AdamW(p, lr=1e-2, impl="triton", **o),
               lambda p, o=options: torch.optim.AdamW(p, lr=1e-2, **o))


@check
def sgd_steps_follow_float64(device: torch.device) -> None:
    from ampkit.optim import SGD

    variants: list[dict[str, Any]] = [
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    ]
    for options in variants:
        _steps(device, lambda p, o=options: SGD(p, lr=1e-2, impl="triton", **o),
               lambda p, o=options: torch.optim.SGD(p, lr=1e-2, **o))


def _steps(device: torch.device, ours: Callable, theirs: Callable) -> None:
    """Scaled gradients, some steps skipped, beside torch in float64 on the CPU."""
    values = [torch.randn(n) for n in SIZES[:-1]]
    # Every other parameter starts off a 16-byte boundary, as the views of a flat parameter do.
    params = [
        torch.nn.Parameter(torch.cat([v[:1], v]).to(device)[1:] if i % 2 else v.to(device))
        for i, v in enumerate(values)
    ]
    yardstick = [torch.nn.Parameter(v.double()) for v in values]
    mine, reference = ours(params), theirs(yardstick)
    copies = {param: torch.empty_like(param, dtype=torch.float16, requires_grad=False) for param in params[:4]}
    mine.write_copies(copies)
    for i in range(100 if device.type == "cuda" else 4):
        skipped = i in (0, 2)
        grads = [torch.randn_like(v) for v in values]
        for param, one, grad in zip(params, yardstick, grads, strict=True):
            param.grad, one.grad = (grad * 1024).to(device), grad.double()
        before = [p.grad.clone() for p in params if p.grad is not None]
        mine.grad_multiplier, mine.found_inf = scalar(2.0**-10, device), scalar(float(skipped), device)
        mine.step()
        same([p.grad for p in params if p.grad is not None], before, "gradients were written")
        if not skipped:
            reference.step()
    for param, one in zip(params, yardstick, strict=True):
        close(param.detach(), one.detach(), 2e-5, f"parameter of {param.numel()} elements")
    same(list(copies.values()), [param.detach().half() for param in copies], "copies of the parameters")
