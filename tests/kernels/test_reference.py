"""The reference beside torch to the bit: clipping's norm, AdamW, SGD; and norms that only it computes."""

from typing import Any

import pytest
import torch

from ampkit_kernels import adamw_, norm_and_check, sgd_
from tests.gpu_checks.tools import close, gradients, same, scalar

ORDERS = (1.0, 2.0, float("inf"))


def torchs_norm(grads: list[torch.Tensor], inv_scale: float, order: float) -> torch.Tensor:
    """What torch's scaler and clipping compute in two steps."""
    want = [g.clone() for g in grads]
    torch._amp_foreach_non_finite_check_and_unscale_(want, scalar(0.0), scalar(inv_scale))
    return torch.nn.utils.get_total_norm(want, order)


@pytest.mark.parametrize("order", [*ORDERS, 3.5, 0.5])
@pytest.mark.parametrize("exponent", [0, -4, -16])
def test_norms_have_torchs_bits_at_powers_of_two(exponent: int, order: float) -> None:
    grads = gradients(torch.float32, (1, 17, 40_000, 300), scale=100.0)
    got = norm_and_check(grads, scalar(2.0**exponent), scalar(0.0), order)
    want = torchs_norm(grads, 2.0**exponent, order)
    # Orders other than 1, 2 and inf take powers, whose rounding a power of two does not commute with.
    if order in ORDERS or exponent == 0:
        assert torch.equal(got, want)
    else:
        close(got, want, 1e-5, "norm")


@pytest.mark.parametrize("order", [1.0, 2.0])
def test_torchs_bits_where_only_scaled_powers_overflow(order: float) -> None:
    """As under a loss scale of 2**120: the sum over scaled gradients is inf, over unscaled ones it is not."""
    grads, flag = [g * 2.0**120 for g in gradients(torch.float32, (1, 17, 4000, 300))], scalar(0.0)
    assert torch.equal(norm_and_check(grads, scalar(2.0**-120), flag, order), torchs_norm(grads, 2.0**-120, order))
    assert flag == 0.0


def test_sums_that_overflow_are_added_up_again_in_float64() -> None:
    for value in (torch.tensor(1e30), torch.tensor(65504.0).half()):
        got = norm_and_check([value.repeat(300)], scalar(2.0**-10), scalar(0.0))
        close(got, value.double() * 300**0.5 * 2.0**-10, 1e-6, "norm")


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_orders_that_no_kernel_computes(interpreted, impl: str) -> None:
    grads = gradients(torch.float32, (50,))
    norm = norm_and_check(grads, scalar(1.0), scalar(0.0), 3.0, impl=impl)
    close(norm, torch.linalg.vector_norm(grads[0].double(), 3.0), 1e-6, "order 3")
    assert norm_and_check(grads, scalar(0.5), scalar(0.0), 0.0, impl=impl) == 50
    found_inf = scalar(0.0)
    norm_and_check([torch.tensor([1.0, float("inf")])], scalar(1.0), found_inf, -1.0, impl=impl)
    assert found_inf == 1.0


def torchs_steps(optimizer: type, dtype: torch.dtype, options: dict[str, Any]) -> tuple[list, list, list]:
    """Parameters before and after a hundred steps, and the gradients."""
    params = gradients(dtype, (0, 1, 17, 255, 257, 1030))
    tracked = [torch.nn.Parameter(p.clone()) for p in params]
    stepper = optimizer(tracked, foreach=False, **options)
    everything = [[torch.randn_like(p) for p in params] for _ in range(100)]
    for grads in everything:
        for p, grad in zip(tracked, grads, strict=True):
            p.grad = grad
        stepper.step()
    return params, [p.detach() for p in tracked], everything


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.0}, {"amsgrad": True}, {"maximize": True}, {"betas": (0.3, 0.999)}], ids=str
)
def test_adamw_has_torchs_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    params, want, everything = torchs_steps(torch.optim.AdamW, dtype, {"lr": 0.01, **options})
    moments = [[torch.zeros_like(p) for p in params] for _ in range(3)]
    steps = [torch.zeros(()) for _ in params]
    beta1, beta2 = options.pop("betas", (0.9, 0.999))
    for grads in everything:
        adamw_(params, grads, *moments, steps, impl="reference",
               **{"lr": 0.01, "beta1": beta1, "beta2": beta2, "eps": 1e-8, "weight_decay": 0.01, **options})
    same(params, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"weight_decay": 0.1}, {"momentum": 0.9, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "maximize": True},
    ],
    ids=str,
)
def test_sgd_has_torchs_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    params, want, everything = torchs_steps(torch.optim.SGD, dtype, {"lr": 0.1, **options})
    buffers = [torch.zeros_like(p) for p in params]
    for grads in everything:
        sgd_(params, grads, buffers, lr=0.1, impl="reference", **options)
    same(params, want)
