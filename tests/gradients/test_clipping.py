"""Clipping fused with unscaling, against torch's two calls."""

import math
import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import ampkit.optim
from ampkit.scaler.grad_scaler import GradScaler
from ampkit_kernels import implementation
from tests.helpers.op_samples import same
from tests.helpers.scaler_tools import clip, iterate, one_parameter, started, with_grads

NORMS = [2.0, 1.0, math.inf, 3.0, 0.5]


def clips(cls, grads: list[torch.Tensor], scale: float, max_norm, norm_type: float):
    """The norm of these scaled gradients, and what is left of them."""
    params = with_grads(grads)
    norm = clip(started(cls, scale), torch.optim.SGD(params, lr=0.1), max_norm, norm_type)
    return norm, [p.grad for p in params]


@settings(max_examples=400)
@given(
    shapes=st.lists(st.sampled_from([(), (0,), (0,), (1,), (2,), (7,), (3, 5), (64, 9)]), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    exponent=st.integers(-3, 20),
    max_norm=st.sampled_from([1e-4, 0.5, 3.0, 1e5]),
    norm_type=st.sampled_from(NORMS),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.float64]),
)
def test_equal_to_torch_to_the_bit_at_powers_of_two(shapes, seed, exponent, max_norm, norm_type, dtype) -> None:
    """Empty gradients too: a zero in the stack of norms moves the others to other lanes of the sum."""
    if norm_type == math.inf:  # torch raises on empty gradients here
        shapes = [shape for shape in shapes if math.prod(shape)]
    if not any(math.prod(shape) for shape in shapes):
        return
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(shape, generator=generator, dtype=dtype) * 2.0**exponent for shape in shapes]
    norm, clipped = clips(GradScaler, grads, 2.0**exponent, max_norm, norm_type)
    expected_norm, expected = clips(torch.amp.GradScaler, grads, 2.0**exponent, max_norm, norm_type)
    assert torch.equal(norm, expected_norm)
    assert [index for index, pair in enumerate(zip(clipped, expected, strict=True)) if not same(*pair)] == []


@settings(max_examples=30)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([3.0, 1000.0, 0.7, 12345.0]))
def test_within_one_unit_of_torch_at_any_scale(seed, scale) -> None:
    """One rounding of inv_scale * coefficient instead of two, and a norm that may itself differ in its last bit."""
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(50, generator=generator) * scale for _ in range(3)]
    norm, clipped = clips(GradScaler, grads, scale, 1.0, 2.0)
    expected_norm, expected = clips(torch.amp.GradScaler, grads, scale, 1.0, 2.0)
    assert torch.allclose(norm, expected_norm, rtol=2.5e-7, atol=0.0)
    exact = [g.double() / scale for g in grads]
    coefficient = 1.0 / (torch.cat(exact).norm() + 1e-6)
    for got, torchs, truth in zip(clipped, expected, exact, strict=True):
        ulp = torch.finfo(torch.float32).eps * (truth * coefficient).abs()
        worst = ((torchs.double() - truth * coefficient).abs() / ulp).max()
        assert ((got.double() - truth * coefficient).abs() <= ulp * max(2.0, float(worst) + 1.0)).all()


@pytest.mark.parametrize("norm_type", NORMS)
def test_after_unscale_it_only_clips(norm_type) -> None:
    grads = [torch.tensor([8.0, -4.0]), torch.tensor([16.0])]
    params = with_grads(grads)
    optimizer = torch.optim.SGD(params, lr=0.1)
    scaler = started(GradScaler, 4.0)
    scaler.unscale_(optimizer)
    params[0].grad[0] = 5.0  # code may change gradients in between
    norm = scaler.clip_grad_norm_(optimizer, 1.0, norm_type)
    reference = with_grads([torch.tensor([5.0, -1.0]), torch.tensor([4.0])])
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(reference, 1.0, norm_type))
    assert [param.grad.tolist() for param in params] == [param.grad.tolist() for param in reference]
    scaler.clip_grad_norm_(optimizer, 0.5)  # and again, tighter


def test_values_of_complex_gradients_are_clipped_by_part() -> None:
    (param,) = with_grads([torch.tensor([8 - 20j])])
    started(GradScaler, 4.0).clip_grad_value_(torch.optim.SGD([param], lr=0.1), 1.5)
    assert param.grad.item() == 1.5 - 1.5j


@pytest.mark.parametrize(
    ("grads", "norm_type", "expected"),
    [
        # torch returns the dtype of the first norm, so a bfloat16 gradient rounds the whole norm to 8 bits
        ([torch.ones(1000, dtype=torch.bfloat16), torch.ones(1000)], 2.0, torch.tensor(math.sqrt(2000))),
        ([torch.ones(9, dtype=torch.float64)], 2.0, torch.tensor(3.0, dtype=torch.float64)),
        ([torch.zeros(0), torch.tensor([-3.0])], math.inf, torch.tensor(3.0)),  # torch raises
        ([torch.tensor([1e25, 1e25])], 2.0, torch.tensor(math.sqrt(2) * 1e25)),  # whose squares are inf
    ],
    ids=["mixed", "float64", "empty", "large"],
)
def test_norms_are_float32_or_wider_and_no_finite_one_is_an_overflow(grads, norm_type, expected) -> None:
    optimizer, scaler = torch.optim.SGD(with_grads(grads), lr=0.0), started(GradScaler, 1.0)
    torch.testing.assert_close(scaler.clip_grad_norm_(optimizer, 1e9, norm_type), expected, rtol=1e-6, atol=0.0)
    scaler.step(optimizer)
    assert scaler.stepped(optimizer)


def test_float64_gradients_beside_float32_ones_are_clipped_by_a_float64_factor() -> None:
    """Where torch clips by a norm of fewer digits."""
    generator = torch.Generator().manual_seed(0)
    grads = [1e4 * torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2)]
    _, clipped = clips(GradScaler, [grads[0], grads[1].float()], 2.0**10, 0.7, 2.0)
    _, exact = clips(torch.amp.GradScaler, [grads[0], grads[1].float().double()], 2.0**10, 0.7, 2.0)
    torch.testing.assert_close(clipped[0], exact[0], rtol=1e-15, atol=0.0)
    torch.testing.assert_close(clipped[1], exact[1].float(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_an_overflow_sets_the_flag_and_nothing_is_multiplied(bad, norm_type) -> None:
    params = with_grads([torch.tensor([8.0]), torch.tensor([bad, 4.0])])
    optimizer, scaler = torch.optim.SGD(params, lr=0.1), started(GradScaler, 4.0)
    assert not scaler.clip_grad_norm_(optimizer, 1.0, norm_type).isfinite()
    assert params[0].grad.item() == 8.0
    iterate(scaler, optimizer)
    assert scaler.found_inf(optimizer)
    assert scaler.get_scale() == 2.0


def test_no_gradients_have_norm_zero_and_the_limit_may_live_on_the_device() -> None:
    scaler, (_, optimizer) = started(GradScaler), one_parameter()
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 0.0
    iterate(scaler, optimizer)
    assert scaler.stats().no_gradients == 1
    _, clipped = clips(GradScaler, [torch.tensor([8.0])], 4.0, torch.tensor(0.5), 2.0)
    assert clipped[0].item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("make", [torch.optim.AdamW, ampkit.optim.AdamW, ampkit.optim.SGD])
@pytest.mark.parametrize("call", ["clip_grad_norm_", "unscale_", "clip_grad_value_"])
def test_gradients_are_right_after_every_call(make, call) -> None:
    """Code may log, change or add noise to them; the step takes them as they are then."""
    params = with_grads([torch.tensor([6.0, 8.0]), torch.tensor([24.0])])
    optimizer, scaler = make(params, lr=0.1), started(GradScaler, 2.0)
    limits = {"clip_grad_norm_": (6.5,), "clip_grad_value_": (100.0,)}.get(call, ())
    getattr(scaler, call)(optimizer, *limits)
    halved = 0.5 if call == "clip_grad_norm_" else 1.0
    torch.testing.assert_close(
        [p.grad for p in params], [torch.tensor([3.0, 4.0]) * halved, torch.tensor([12.0]) * halved]
    )
    params[0].grad.zero_()
    before = params[0].detach().clone()
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    iterate(scaler, optimizer)
    assert torch.equal(params[0], before)
    assert not params[1].eq(1.0).any()


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="Triton does not interpret here")
@pytest.mark.parametrize("triton", [False, True])
def test_lazily_negated_gradients_are_clamped(triton, monkeypatch) -> None:
    """torch's operators for lists write no such tensor, which may stand beside others."""
    if triton:
        monkeypatch.setattr(implementation, "AUTO", ("cuda", "cpu"))
    for size in (1, 2):  # the gradient of one element is contiguous, as the kernels' lists have them
        params = [torch.nn.Parameter(torch.ones(size)) for _ in range(2)]
        params[0].grad = torch.complex(torch.zeros(2), torch.tensor([3.0, -0.5])).conj().imag[:size]
        params[1].grad = torch.full((size,), 7.0)
        assert params[0].grad.is_neg()
        started(GradScaler, 1.0).clip_grad_value_(torch.optim.SGD(params, lr=0.1), 1.0)
        assert [param.grad.tolist() for param in params] == [[-1.0, 0.5][:size], [1.0] * size]
