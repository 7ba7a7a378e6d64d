"""norm_and_check: against torch's two-step clipping, float64, and itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampkit_kernels import norm_and_check, unscale_
from ampkit_kernels.configs import Config
from tests.kernels.helpers import FLOATS, NONFINITE, Guarded, assert_same, clones, gradients

IMPLS = ("reference", "triton")
ORDERS = (1.0, 2.0, float("inf"))


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def yardstick(grads, inv_scale: float, order: float) -> float:
    whole = torch.cat([g.double().flatten() for g in grads]) * inv_scale
    return torch.linalg.vector_norm(whole, order).item()


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, float("inf"), 0.5])
@pytest.mark.parametrize("exponent", [0, -4, -16])
def test_reference_has_torchs_bits_at_powers_of_two(exponent: int, order: float) -> None:
    grads = gradients(torch.float32, (1, 17, 40_000, 300), scale=100.0)
    want = clones(grads)
    torch._amp_foreach_non_finite_check_and_unscale_(want, scalar(0.0), scalar(2.0**exponent))
    total = torch.nn.utils.get_total_norm(want, order)
    got = norm_and_check(grads, scalar(2.0**exponent), scalar(0.0), order, impl="reference")
    # Orders other than 1, 2 and inf take powers, whose rounding a power of two does not commute with.
    if order in ORDERS or exponent == 0:
        assert torch.equal(got, total)
    else:
        torch.testing.assert_close(got, total, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_triton_against_float64_at_any_address(dtype: torch.dtype, offset: int) -> None:
    guarded = Guarded(gradients(dtype, scale=10.0), offset)
    before = clones(guarded.buffers)
    for order in ORDERS:
        found_inf = scalar(0.0)
        got = norm_and_check(guarded.views, scalar(0.25), found_inf, order, impl="triton")
        assert got.item() == pytest.approx(yardstick(guarded.views, 0.25, order), rel=2e-6)
        assert got.shape == ()
        assert got.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
        assert found_inf == 0.0
    assert_same(guarded.buffers, before)  # read-only


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", NONFINITE)
@pytest.mark.parametrize("impl", IMPLS)
def test_nonfinite_values_reach_flag_and_norm(impl: str, kind: str, order: float) -> None:
    grads = gradients(torch.float32, (5, 1500))
    grads[1][1300] = NONFINITE[kind]()
    found_inf = scalar(0.0)
    got = norm_and_check(grads, scalar(0.5), found_inf, order, impl=impl)
    assert found_inf == 1.0
    assert got.isnan() if kind == "nan" else got == float("inf")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_sum_that_overflows_is_no_overflow(dtype: torch.dtype, impl: str) -> None:
    grads = [torch.full((300,), torch.finfo(dtype).max, dtype=dtype)]
    found_inf = scalar(0.0)
    got = norm_and_check(grads, scalar(1.0), found_inf, impl=impl)
    assert found_inf == 0.0
    if impl == "reference" and dtype is torch.float16:
        assert got.item() == pytest.approx(yardstick(grads, 1.0, 2.0))


@pytest.mark.parametrize("order", [1.0, 2.0])
def test_torchs_bits_where_only_scaled_powers_overflow(order: float) -> None:
    """As under a loss scale of 2**120: the sum over scaled gradients is inf, over unscaled ones it is not."""
    grads = [g * 2.0**120 for g in gradients(torch.float32, (1, 17, 4000, 300))]
    want = clones(grads)
    torch._amp_foreach_non_finite_check_and_unscale_(want, scalar(0.0), scalar(2.0**-120))
    found_inf = scalar(0.0)
    got = norm_and_check(grads, scalar(2.0**-120), found_inf, order, impl="reference")
    assert torch.equal(got, torch.nn.utils.get_total_norm(want, order))
    assert found_inf == 0.0


def test_reference_adds_up_again_in_float64() -> None:
    grads = [torch.full((300,), 1e30)]
    got = norm_and_check(grads, scalar(2.0**-10), scalar(0.0))
    assert got.item() == pytest.approx(yardstick(grads, 2.0**-10, 2.0), rel=1e-6)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5, 4.0])
def test_flag_is_the_one_unscale_would_set(dtype: torch.dtype, factor: float, impl: str) -> None:
    grads = [torch.full((9,), torch.finfo(dtype).max / 2, dtype=dtype), torch.ones(3, dtype=dtype)]
    want, got = scalar(0.0), scalar(0.0)
    norm_and_check(grads, scalar(factor), got, impl=impl)
    unscale_(grads, scalar(factor), want, impl="reference")
    assert got == want


@pytest.mark.usefixtures("interpreted")
def test_mixed_dtypes_and_layouts_make_one_norm() -> None:
    grads = [
        torch.randn(700), torch.randn(30).half(), torch.randn(4, 6)[::2], torch.randn(5, 1).expand(5, 4),
        torch.randn(11, dtype=torch.complex64), torch.randn(300).bfloat16(),
    ]
    parts = [torch.view_as_real(g) if g.is_complex() else g for g in grads]
    want = yardstick(parts, 0.5, 2.0)
    for impl in ("auto", "reference"):
        assert norm_and_check(grads, scalar(0.5), scalar(0.0), impl=impl).item() == pytest.approx(
            want, rel=1e-6
        )
    triton = norm_and_check([g for g in grads if g.is_contiguous()], scalar(0.5), scalar(0.0), impl="triton")
    rest = yardstick([g for g in parts if g.is_contiguous()], 0.5, 2.0)
    assert triton.item() == pytest.approx(rest, rel=1e-6)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_same_list_same_bits(impl: str) -> None:
    grads = gradients(torch.float32, (3000, 17, 513))
    results = {norm_and_check(grads, scalar(0.5), scalar(0.0), impl=impl).item() for _ in range(3)}
    assert len(results) == 1


def test_nothing_has_norm_zero() -> None:
    for grads in ([], [torch.empty(0)]):
        assert norm_and_check(grads, scalar(0.5), scalar(0.0)) == 0.0


def test_orders_that_triton_does_not_serve() -> None:
    grads = gradients(torch.float32, (50,))
    for impl in ("auto", "triton"):
        norm = norm_and_check(grads, scalar(1.0), scalar(0.0), 3.0, impl=impl)
        assert norm.item() == pytest.approx(yardstick(grads, 1.0, 3.0))
    assert norm_and_check(grads, scalar(0.5), scalar(0.0), 0.0) == 50


def test_orders_below_zero_still_find_infinities() -> None:
    found_inf = scalar(0.0)
    norm_and_check([torch.tensor([1.0, float("inf")])], scalar(1.0), found_inf, -1.0)
    assert found_inf == 1.0


@settings(max_examples=12)
@given(
    sizes=st.lists(st.integers(1, 1500), min_size=1, max_size=5),
    order=st.sampled_from(ORDERS),
    data=st.data(),
)
def test_any_list(sizes: list[int], order: float, data) -> None:
    from ampkit_kernels.triton_ops import norm

    dtypes = [data.draw(st.sampled_from((torch.float32, torch.float16, torch.float64))) for _ in sizes]
    grads = [torch.randn(n).to(dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    found_inf = scalar(0.0)
    got = norm.norm_and_check(grads, scalar(0.125), found_inf, order, config=Config(block=256, chunk=512))
    assert got.item() == pytest.approx(yardstick(grads, 0.125, order), rel=2e-6)
    assert found_inf == 0.0
