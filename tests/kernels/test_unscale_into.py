"""unscale_into_: the reference against unscale_ and float64, the Triton kernel against the reference."""

import pytest
import torch

from ampkit_kernels import unscale_into_
from ampkit_kernels.configs import Config
from tests.kernels.helpers import FLOATS, HALF, NONFINITE, SIZES, Guarded, assert_same, clones, gradients

IMPLS = ("reference", "triton")


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


@pytest.mark.parametrize("inv_scale", [1.0, 2.0**-16, 0.001])
@pytest.mark.parametrize("source", FLOATS)
def test_reference_is_a_cast_and_torchs_operator(source: torch.dtype, inv_scale: float) -> None:
    sources = gradients(source, scale=100.0)
    want, want_inf = [s.float().clone() for s in sources], scalar(0.0)
    got, found_inf = [torch.full_like(w, torch.nan) for w in want], scalar(0.0)
    if source is torch.float64:  # the product is taken in float64 and rounded once
        want = [(s * scalar(inv_scale).double()).float() for s in sources]
    else:
        torch._amp_foreach_non_finite_check_and_unscale_(want, want_inf, scalar(inv_scale))
    unscale_into_(sources, got, scalar(inv_scale), found_inf, impl="reference")
    assert_same([*got, found_inf], [*want, want_inf])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", HALF)
def test_all_sixteen_bit_patterns(interpreted, dtype: torch.dtype, impl: str) -> None:
    interpreted(Config(block=4096, chunk=65536))
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    if dtype is torch.bfloat16 and impl == "triton":  # the interpreter reads bfloat16 subnormals as zero
        patterns = patterns[~((patterns.abs() < torch.finfo(dtype).tiny) & (patterns != 0))]
    got, found_inf = torch.empty(len(patterns)), scalar(0.0)
    unscale_into_([patterns], [got], scalar(0.5), found_inf, impl=impl)
    assert_same([got], [patterns.float() * 0.5])
    assert found_inf == 1.0
    finite = patterns[torch.isfinite(patterns)]
    got, found_inf = torch.empty(len(finite)), scalar(0.0)
    unscale_into_([finite], [got], scalar(0.5), found_inf, impl=impl)
    assert found_inf == 0.0


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("source", FLOATS)
def test_triton_equals_reference_at_any_address(source: torch.dtype, offset: int, accumulate: bool) -> None:
    sources = gradients(source, scale=100.0)
    before = gradients(torch.float32)
    want = clones(before)
    unscale_into_(sources, want, scalar(0.25), scalar(0.0), accumulate=accumulate, impl="reference")
    guarded, found_inf = Guarded(before, offset), scalar(0.0)
    unscale_into_(sources, guarded.views, scalar(0.25), found_inf, accumulate=accumulate, impl="triton")
    assert_same(guarded.views, want)
    assert guarded.guards_intact()
    assert found_inf == 0.0


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.usefixtures("interpreted")
def test_accumulating_adds_the_product_to_what_was_there(impl: str) -> None:
    first, second = gradients(torch.float16), gradients(torch.float16)
    got = [torch.empty(n) for n in SIZES]
    unscale_into_(first, got, scalar(0.1), scalar(0.0), impl=impl)
    unscale_into_(second, got, scalar(0.3), scalar(0.0), accumulate=True, impl=impl)
    want = [a.float() * scalar(0.1) + b.float() * scalar(0.3) for a, b in zip(first, second, strict=True)]
    assert_same(got, want)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", NONFINITE)
@pytest.mark.parametrize("accumulate", [False, True])
def test_one_nonfinite_value_is_found(kind: str, impl: str, accumulate: bool) -> None:
    for index in (0, 1023, 1499):
        sources = [torch.ones(300).half(), torch.ones(1500).half()]
        sources[1][index] = NONFINITE[kind]()
        found_inf = scalar(0.0)
        into = [torch.zeros(300), torch.zeros(1500)]
        unscale_into_(sources, into, scalar(0.5), found_inf, accumulate=accumulate, impl=impl)
        assert found_inf == 1.0
        assert not torch.isfinite(into[1][index])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_a_product_that_the_destination_cannot_hold_is_found(impl: str) -> None:
    found_inf, into = scalar(0.0), torch.zeros(2, dtype=torch.float16)
    unscale_into_([torch.tensor([1.0, 40000.0])], [into], scalar(2.0), found_inf, impl=impl)
    assert found_inf == 1.0
    assert into[0] == 2.0


def test_expanded_sources_and_empty_lists() -> None:
    into, found_inf = torch.zeros(4, 3), scalar(0.0)
    unscale_into_([torch.ones(3).half().expand(4, 3)], [into], scalar(0.5), found_inf)
    assert_same([into], [torch.full((4, 3), 0.5)])
    for accumulate in (False, True):
        unscale_into_([], [], scalar(0.5), found_inf, accumulate=accumulate)
    assert found_inf == 0.0


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_lazy_conjugation_and_negation_of_sources_are_carried_out(impl: str) -> None:
    into = [torch.zeros(2, dtype=torch.complex64), torch.zeros(3)]
    sources = [torch.full((2,), 2 + 4j).conj(), torch._neg_view(torch.full((3,), 2.0))]
    unscale_into_(sources, into, scalar(0.5), scalar(0.0), impl=impl)
    assert_same(into, [torch.full((2,), 1 - 2j), torch.full((3,), -1.0)])


def test_bad_lists_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unscale_into_: got 1 destinations for 2 sources"):
        unscale_into_([torch.ones(1), torch.ones(1)], [torch.ones(1)], scalar(1.0), scalar(0.0))
    with pytest.raises(ValueError, match=r"unscale_into_: inv_scale is a torch.float64"):
        unscale_into_([torch.ones(1)], [torch.ones(1)], scalar(1.0).double(), scalar(0.0))
