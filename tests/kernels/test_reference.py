"""The reference has torch's bits in AdamW and SGD; norms that only it computes, on the host and on a device.

`gradients/test_clipping.py` has the norm of clipping beside torch's.
"""

import math
from typing import Any

import pytest
import torch

from ampkit import GradScaler
from ampkit_kernels import adamw_, norm_and_check, reference, sgd_
from tests.gpu_checks.tools import close, gradients, same, scalar


@pytest.mark.parametrize("order", [1.0, 2.0])
def test_torchs_bits_where_only_scaled_powers_overflow(order: float) -> None:
    """Under a loss scale of 2**120 the sum over scaled gradients is inf; over unscaled gradients it is not."""
    grads, flag = gradients(torch.float32, (1, 17, 4000, 300)), scalar(0.0)
    norm = norm_and_check([g * 2.0**120 for g in grads], scalar(2.0**-120), flag, order)
    same([norm, flag], [torch.nn.utils.get_total_norm(grads, order), scalar(0.0)])


def test_sums_that_overflow_are_added_up_again_in_float64() -> None:
    for value in (torch.tensor(1e30), torch.tensor(65504.0).half()):
        got = norm_and_check([value.repeat(300)], scalar(2.0**-10), scalar(0.0))
        close(got, value.double() * 300**0.5 * 2.0**-10, 1e-6, "norm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exponent", [-110, -20, 0, 60, 100])
@pytest.mark.parametrize("on_host", [True, False])
def test_norms_under_a_loss_scale_of_any_size(
    monkeypatch: pytest.MonkeyPatch, on_host: bool, exponent: int, dtype: torch.dtype
) -> None:
    """Powers of scaled gradients overflow or vanish. On a device, where no branch can look at values, and strided."""
    if not on_host:
        monkeypatch.setattr(reference, "is_on_host", lambda scalar: False)
    monkeypatch.setattr(reference, "COPIED", 4000, raising=False)
    if dtype is torch.float16:
        exponent //= 10
    scaled = [g * 2.0**exponent for g in gradients(dtype, (0, 1, 17, 4000, 300))]
    scaled[-1] = scaled[-1][::2]
    truth, flag = [g.double() * 2.0**-exponent for g in scaled], scalar(0.0)
    for order in (0.0, 1.0, 2.0, 3.0, float("inf")):
        norm = norm_and_check(scaled, scalar(2.0**-exponent)[None], flag, order, impl="reference")
        assert norm.shape == ()
        close(norm, torch.linalg.vector_norm(torch.cat(truth), order), 1e-6, f"order {order}")
        if dtype is torch.float32 and order in (1.0, 2.0):
            same([norm], [torch.nn.utils.get_total_norm([g.float() for g in truth], order)])
        assert flag.item() == 0.0
    for value in (float("inf"), float("nan")):
        scaled[1].fill_(value)
        flag = scalar(0.0)
        norm = norm_and_check(scaled, scalar(2.0**-exponent), flag, impl="reference").item()
        assert (math.isfinite(norm), flag.item()) == (False, 1.0), norm


def test_norms_copy_a_few_gradients_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "COPIED", 10)
    parts = reference._parts([torch.zeros(n) for n in (4, 6, 0, 1, 9, 20, 3, 8, 10)])
    assert [list(map(len, part)) for part in parts] == [[4, 6, 0], [1, 9], [20], [3], [8], [10]]


def test_a_step_under_a_large_scale_is_as_long_on_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has the length that clipping allows, not 0."""
    monkeypatch.setattr(reference, "is_on_host", lambda scalar: False)
    param = torch.nn.Parameter(torch.zeros(100))
    optimizer, scaler = torch.optim.SGD([param], 1.0), GradScaler("cpu", init_scale=2.0**64, skip_above=1e6)
    scaler.scale((param * torch.arange(100.0)).sum()).backward()
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    close(norm, torch.arange(100.0).double().norm(), 1e-6, "norm")
    close(param.detach().norm(), torch.ones((), dtype=torch.float64), 1e-5, "length of the step")


@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_orders_that_no_kernel_computes(interpreted, impl: str) -> None:
    grads = gradients(torch.float32, (50,))
    norm = norm_and_check(grads, scalar(1.0), scalar(0.0), 3.0, impl=impl)
    close(norm, torch.linalg.vector_norm(grads[0].double(), 3.0), 1e-6, "order 3")
    assert norm_and_check(grads, scalar(0.5), scalar(0.0), 0.0, impl=impl).item() == 50
    found_inf = scalar(0.0)
    norm_and_check([torch.tensor([1.0, float("inf")])], scalar(1.0), found_inf, -1.0, impl=impl)
    assert found_inf.item() == 1.0


ADAMW = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
STEPS: list[dict[str, Any]] = [
    ADAMW,
    {**ADAMW, "weight_decay": 0.0},
    {**ADAMW, "amsgrad": True},
    {**ADAMW, "maximize": True},
    {**ADAMW, "beta1": 0.3},
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True},
    {"lr": torch.tensor(0.125), "momentum": 0.9},  # a product that is exact
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", STEPS, ids=str)
def test_steps_have_torchs_bits(options: dict[str, Any], dtype: torch.dtype) -> None:
    params = gradients(dtype, (0, 1, 17, 255, 257, 1030))
    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    state, steps = [[torch.zeros_like(p) for p in params] for _ in range(3)], [torch.zeros(()) for _ in params]
    if "beta1" in options:
        others = {name: value for name, value in options.items() if not name.startswith("beta")}
        optimizer = torch.optim.AdamW(theirs, betas=(options["beta1"], options["beta2"]), foreach=False, **others)
    else:
        optimizer = torch.optim.SGD(theirs, foreach=False, **options)
    for _ in range(100):
        grads = [torch.randn_like(p) for p in params]
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad
        optimizer.step()
        if "beta1" in options:
            adamw_(params, grads, *state, steps, impl="reference", **options)
        else:
            sgd_(params, grads, state[0], impl="reference", **options)
    same(params, [p.detach() for p in theirs])
