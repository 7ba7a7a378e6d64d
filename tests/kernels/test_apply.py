"""multiply_, nonfinite_counts and cast_."""

import numpy as np
import pytest
import torch

from ampkit_kernels import cast_, multiply_, nonfinite_counts
from ampkit_kernels.configs import Config
from tests.kernels.helpers import FLOATS, HALF, SIZES, Guarded, assert_same, clones, gradients

IMPLS = ("reference", "triton")


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("dtype", FLOATS)
def test_multiply_at_any_address(dtype: torch.dtype, offset: int) -> None:
    values = gradients(dtype)
    want = [v * 0.5 for v in values]
    for impl in IMPLS:
        guarded = Guarded(values, offset)
        multiply_(guarded.views, scalar(0.5), impl=impl)
        assert_same(guarded.views, want)
        assert guarded.guards_intact()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("factor", "found_inf"), [(1.0, None), (1.0, 0.0), (0.5, 1.0), (float("nan"), 1.0)])
def test_multiply_leaves_alone(factor: float, found_inf: float | None, impl: str) -> None:
    grads = gradients(torch.float32, (40, 700))
    grads[0][3] = float("nan")
    before = clones(grads)
    multiply_(grads, scalar(factor), None if found_inf is None else scalar(found_inf), impl=impl)
    assert_same(grads, before)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_multiply_has_torchs_bits(impl: str) -> None:
    grads = gradients(torch.float32, (40, 1300))
    factor = scalar(0.123456)
    want = clones(grads)
    torch._foreach_mul_(want, factor)
    multiply_(grads, factor, scalar(0.0), impl=impl)
    assert_same(grads, want)


def test_multiply_once_per_stored_element() -> None:
    grad = torch.ones(1, 3).expand(4, 3)
    multiply_([grad], scalar(0.5))
    assert torch.equal(grad, torch.full((4, 3), 0.5))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("offset", [0, 1])
def test_counts_are_exact(offset: int, impl: str) -> None:
    values = [g for dtype in FLOATS for g in gradients(dtype, (0, 1, 300, 4097))]
    generator = torch.Generator().manual_seed(1)
    for value in values:
        pick = torch.rand(value.shape, generator=generator)
        value[pick < 0.1] = float("inf")
        value[(pick >= 0.1) & (pick < 0.2)] = -float("inf")
        value[pick > 0.7] = float("nan")
    guarded = Guarded(values, offset)
    want = torch.tensor([[int(v.isinf().sum()), int(v.isnan().sum())] for v in values])
    assert want.sum() > 1000
    assert torch.equal(nonfinite_counts(guarded.views, impl=impl), want)


def test_counts_of_nothing_and_of_complex_parts() -> None:
    assert nonfinite_counts([]).shape == (0, 2)
    grad = torch.tensor([complex(float("inf"), float("nan")), 1 + 1j])
    assert nonfinite_counts([grad]).tolist() == [[1, 1]]


@pytest.mark.usefixtures("interpreted")
def test_counts_of_tensors_that_only_pytorch_reads() -> None:
    grads = [torch.ones(3), torch.full((6, 4), float("inf"))[::2], torch.tensor([float("nan")])]
    assert nonfinite_counts(grads, impl="auto").tolist() == [[0, 0], [12, 0], [0, 1]]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("source", FLOATS)
def test_cast_between_all_dtypes(source: torch.dtype, offset: int, impl: str) -> None:
    values = gradients(source, (1, 17, 1025))
    for destination in FLOATS:
        if destination is torch.bfloat16 and impl == "triton":
            continue  # the interpreter truncates: tested below with values that need no rounding
        guarded = Guarded([torch.full(v.shape, float("nan")).to(destination) for v in values], offset)
        cast_(Guarded(values, offset).views, guarded.views, impl=impl)
        assert_same(guarded.views, [v.to(destination) for v in values])
        assert guarded.guards_intact()


@pytest.mark.usefixtures("interpreted")
def test_cast_to_bfloat16_where_no_rounding_is_needed() -> None:
    sources = [g.bfloat16().float() for g in gradients(torch.float32)]
    copies = [torch.full((n,), float("nan"), dtype=torch.bfloat16) for n in SIZES]
    cast_(sources, copies, impl="triton")
    assert_same(copies, [s.bfloat16() for s in sources])


def test_cast_every_half_pattern_to_float(interpreted) -> None:
    interpreted(Config(block=4096, chunk=65536))
    bits = torch.from_numpy(np.arange(65536, dtype=np.uint16).view(np.int16).copy())
    for dtype in HALF:
        source = bits.view(dtype)
        if dtype is torch.bfloat16:  # the interpreter misreads its subnormals
            exponent = (bits.int() >> 7) & 0xFF
            source = source[(exponent != 0) | ((bits.int() & 0x7F) == 0)]
        wide = torch.full(source.shape, -1.0)
        cast_([source], [wide], impl="triton")
        assert_same([wide], [source.float()])


def test_cast_float_to_half_rounds_to_nearest_even(interpreted) -> None:
    interpreted(Config(block=4096, chunk=65536))
    halves = torch.from_numpy(np.arange(0x7C00, dtype=np.uint16).view(np.float16).copy()).float()
    middles = (halves[:-1] + halves[1:]) / 2  # every tie there is
    rounded = torch.full(middles.shape, float("nan"), dtype=torch.float16)
    cast_([middles], [rounded], impl="triton")
    assert_same([rounded], [middles.half()])


def test_cast_refusals() -> None:
    with pytest.raises(ValueError, match="got 0 destinations for 1 sources"):
        cast_([torch.ones(2)], [])
    with pytest.raises(ValueError, match=r"destinations\[0\] has shape \(3,\), sources\[0\] has \(2,\)"):
        cast_([torch.ones(2)], [torch.ones(3)])
    with pytest.raises(ValueError, match="call once per device"):
        cast_([torch.ones(2)], [torch.ones(2, device="meta")])
    cast_([], [])
