"""unscale_: the reference against torch's operator, the Triton kernel against the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampkit_kernels import unscale_
from ampkit_kernels.configs import Config
from tests.kernels.helpers import (
    FLOATS,
    NONFINITE,
    SIGNALLING_NAN,
    SIZES,
    Guarded,
    assert_same,
    clones,
    gradients,
)

IMPLS = ("reference", "triton")


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


@pytest.mark.parametrize("inv_scale", [1.0, 2.0**-16, 0.001, 0.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_reference_is_torchs_operator(dtype: torch.dtype, inv_scale: float) -> None:
    grads = gradients(dtype, scale=100.0)
    want, want_inf = clones(grads), scalar(0.0)
    torch._amp_foreach_non_finite_check_and_unscale_(want, want_inf, scalar(inv_scale))
    found_inf = scalar(0.0)
    unscale_(grads, scalar(inv_scale), found_inf, impl="reference")
    assert_same([*grads, found_inf], [*want, want_inf])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_triton_equals_reference_at_any_address(dtype: torch.dtype, offset: int) -> None:
    values = gradients(dtype, scale=100.0)
    want = clones(values)
    # A power of two: bfloat16 stays exact, which the interpreter would otherwise truncate.
    unscale_(want, scalar(0.25), scalar(0.0), impl="reference")
    guarded, found_inf = Guarded(values, offset), scalar(0.0)
    unscale_(guarded.views, scalar(0.25), found_inf, impl="triton")
    assert_same(guarded.views, want)
    assert guarded.guards_intact()
    assert found_inf == 0.0


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", NONFINITE)
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_nonfinite_value_anywhere_is_found(dtype: torch.dtype, kind: str, impl: str) -> None:
    for tensor, index in ((0, 0), (1, 299), (2, 1023), (2, 1024), (2, 1499)):
        grads = gradients(dtype, (1, 300, 1500))
        grads[tensor][min(index, grads[tensor].numel() - 1)] = NONFINITE[kind]()
        found_inf = scalar(0.0)
        unscale_(grads, scalar(0.5), found_inf, impl=impl)
        assert found_inf == 1.0


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_signalling_nan_is_found(impl: str) -> None:
    grad = torch.full((40,), SIGNALLING_NAN, dtype=torch.int32).view(torch.float32)
    found_inf = scalar(0.0)
    unscale_([grad], scalar(0.5), found_inf, impl=impl)
    assert found_inf == 1.0


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_flag_is_set_but_never_cleared(impl: str) -> None:
    found_inf = scalar(1.0)
    unscale_(gradients(torch.float32, (3,)), scalar(0.5), found_inf, impl=impl)
    assert found_inf == 1.0


@pytest.mark.parametrize("inv_scale", [0.5, 1.0, 2.0, 2.0**-10])
def test_every_float16_pattern(interpreted, inv_scale: float) -> None:
    interpreted(Config(block=4096, chunk=65536))
    patterns = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.float16).copy())
    finite = bool(torch.isfinite(patterns).all())
    assert not finite  # all of them: 2 infinities and 2046 NaNs among them
    for chosen in (patterns, patterns[torch.isfinite(patterns)]):
        want = (chosen.float() * inv_scale).half()
        for impl in IMPLS:
            got, found_inf = chosen.clone(), scalar(0.0)
            unscale_([got], scalar(inv_scale), found_inf, impl=impl)
            assert_same([got], [want])
            assert found_inf == float(not torch.isfinite(want).all())


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_overflow_made_by_a_factor_above_one_is_found(dtype: torch.dtype, impl: str) -> None:
    largest = torch.finfo(dtype).max
    for factor, want in ((4.0, 1.0), (1.0, 0.0), (0.25, 0.0)):
        grad, found_inf = torch.full((20,), largest / 2, dtype=dtype), scalar(0.0)
        unscale_([grad], scalar(factor), found_inf, impl=impl)
        assert found_inf == want, factor


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_extremes_and_subnormals(impl: str) -> None:
    info = torch.finfo(torch.float32)
    values = torch.tensor([info.max, -info.max, info.tiny, info.tiny / 4, 1e-45, -0.0, 0.0])
    got, found_inf = values.clone(), scalar(0.0)
    unscale_([got], scalar(0.5), found_inf, impl=impl)
    assert_same([got], [values * 0.5])
    assert found_inf == 0.0
    assert torch.equal(torch.signbit(got), torch.signbit(values))


def test_empty_list_and_empty_tensors() -> None:
    found_inf = scalar(0.0)
    unscale_([], scalar(0.5), found_inf)
    unscale_([torch.empty(0), torch.empty(3, 0)], scalar(0.5), found_inf)
    assert found_inf == 0.0


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_every_layout_that_has_storage_of_its_own(impl: str) -> None:
    complex_grad = torch.randn(33, dtype=torch.complex64)
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    transposed = torch.randn(7, 9).t()
    grads = [complex_grad, channels_last, transposed]
    want = [g.clone() * 0.25 for g in grads]
    unscale_(grads, scalar(0.25), scalar(0.0), impl=impl)
    assert_same(grads, want)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_tensors_that_no_kernel_can_address_go_to_pytorch(impl: str) -> None:
    plain, empty = torch.randn(300), torch.zeros(0)
    strided, expanded = torch.randn(8, 8)[::2], torch.randn(6, 1).expand(6, 5)
    conjugate = torch.randn(5, dtype=torch.complex64).conj()
    sparse = torch.sparse_coo_tensor([[0, 0, 3]], [1.0, 2.0, 4.0], (5,), check_invariants=True)
    want = [strided * 0.5, expanded * 0.5, conjugate * 0.5, plain * 0.5]
    unscale_([strided, expanded, empty, conjugate, sparse, plain], scalar(0.5), scalar(0.0), impl=impl)
    assert_same([strided, expanded, conjugate, plain], want)
    assert_same([sparse._values()], [torch.tensor([0.5, 1.0, 2.0])])


@settings(max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 1500), max_size=6),
    dtypes=st.lists(st.sampled_from((torch.float32, torch.float16, torch.float64)), min_size=6, max_size=6),
    planted=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 1499), st.sampled_from(list(NONFINITE))), max_size=2
    ),
    exponent=st.integers(-20, 2),
)
def test_any_list(sizes: list[int], dtypes: list, planted: list, exponent: int) -> None:
    from ampkit_kernels.triton_ops import unscale

    grads = [torch.randn(n).to(dtype) for n, dtype in zip(sizes, dtypes, strict=False)]
    for tensor, index, kind in planted:
        if tensor < len(grads) and index < grads[tensor].numel():
            grads[tensor][index] = NONFINITE[kind]()
    want, want_inf, found_inf = clones(grads), scalar(0.0), scalar(0.0)
    unscale_(want, scalar(2.0**exponent), want_inf, impl="reference")
    filled = [g for g in grads if g.numel()]
    unscale.unscale_(filled, scalar(2.0**exponent), found_inf, config=Config(block=256, chunk=512))
    assert_same([*grads, found_inf], [*want, want_inf])


@pytest.mark.parametrize(
    ("grads", "inv_scale", "found_inf", "error", "text"),
    [
        (
            [torch.ones(2, dtype=torch.int32)],
            0.5,
            0.0,
            TypeError,
            "dtype torch.int32; expected a floating-point",
        ),
        ([torch.ones(2).to_mkldnn()], 0.5, 0.0, TypeError, "layout torch._mkldnn; expected strided"),
        ([torch.ones(4).as_strided((3, 2), (1, 1))], 0.5, 0.0, ValueError, "share memory.*pass tensor.clone"),
        (
            [torch.ones(2), torch.ones(2, device="meta")],
            0.5,
            0.0,
            ValueError,
            "lives on meta.*call once per device",
        ),
    ],
)
def test_refusals_leave_everything_untouched(grads, inv_scale, found_inf, error, text) -> None:
    first = torch.ones(3)
    with pytest.raises(error, match=text):
        unscale_([first, *grads], scalar(inv_scale), scalar(found_inf))
    assert torch.equal(first, torch.ones(3))


def test_scalars_are_checked() -> None:
    grads = [torch.ones(2)]
    with pytest.raises(ValueError, match=r"inv_scale is a torch.float64 tensor of shape \(\)"):
        unscale_(grads, torch.tensor(0.5, dtype=torch.float64), scalar(0.0))
    with pytest.raises(ValueError, match=r"found_inf is a torch.float32 tensor of shape \(2,\)"):
        unscale_(grads, scalar(0.5), torch.zeros(2))
    with pytest.raises(ValueError, match="found_inf lives on meta, the tensors on cpu"):
        unscale_(grads, scalar(0.5), torch.zeros((), device="meta"))
    assert SIZES[0] == 0  # the shared list keeps its empty tensor
