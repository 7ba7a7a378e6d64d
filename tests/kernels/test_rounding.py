"""Rounding to bfloat16 at random and with remainders: every pattern, extremes, no bias.

That steps round so: `tests.gpu_checks.operations`.
"""

import pytest
import torch
from torch import Tensor

from ampkit_kernels import rounding
from tests.gpu_checks.tools import same

CPU = torch.device("cpu")
MILLION = 1_000_000
EXTREMES = [0, 1, 0x7FFF, 0x8000, 0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF]


def patterns() -> Tensor:
    """float32 numbers of every sign and exponent, and extremes of both signs."""
    drawn = torch.randint(-2**31, 2**31, (MILLION,), generator=torch.Generator().manual_seed(0))
    extremes = torch.tensor(EXTREMES)
    return torch.cat([drawn, extremes, extremes - 2**31]).to(torch.int32).view(torch.float32)


def test_weights_and_remainders_are_float32() -> None:
    """Exactly, and the weight is a nearest one: torch's own, but for ties."""
    values = patterns()
    weights, remainders = rounding.split(values)
    same([rounding.joined(weights, remainders)], [values], "masters")
    other = ~values.isnan() & (weights != values.bfloat16())
    assert 0 < other.sum() < 100
    assert (values.view(torch.int32)[other] & 0xFFFF == 0x8000).all()


def test_every_pair_joins_to_a_number_that_splits_into_it() -> None:
    """But NaNs, and those that no split gives: 0 with less than nothing, inf with more."""
    weights = torch.arange(-2**15, 2**15, 5).to(torch.int16).view(torch.bfloat16)
    for remainder in (-0x8000, -1, 0, 1, 0x7FFF):
        remainders = torch.full(weights.shape, remainder, dtype=torch.int16)
        found = rounding.split(rounding.joined(weights, remainders.view(rounding.REMAINDER)))
        kept = ~weights.isnan() & (weights != 0 if remainder < 0 else weights.isfinite())
        same([found[0][kept]], [weights[kept]], str(remainder))
        same([found[1].view(torch.int16)[kept]], [remainders[kept]], str(remainder))    # as float16 some are NaN
    # What a write of 0 that no counter shows leaves behind is no NaN.
    remainder = torch.tensor([-5], dtype=torch.int16).view(rounding.REMAINDER)
    assert rounding.joined(torch.zeros(1).bfloat16(), remainder) == 0


def test_stochastic_rounding_takes_a_neighbor_and_makes_no_infinity() -> None:
    values = patterns()
    values = values[~values.isnan()]
    for bits in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        found = rounding.rounded(values, bits)
        assert torch.equal(found, found.bfloat16().float())
        assert torch.equal(rounding.rounded(found, bits), found)       # what bfloat16 holds stays
        finite = values.bfloat16().isfinite()
        assert torch.equal(found[~finite], values.bfloat16()[~finite].float())
        apart = found[finite].view(torch.int32) - values[finite].view(torch.int32)
        assert found[finite].isfinite().all()
        assert (apart.abs() < 0x10000).all()
    assert rounding.rounded(torch.tensor([torch.nan]), 0xFFFF).isnan()


@pytest.mark.parametrize("value", [1.0 + 2**-9, -3.0 - 2**-14, 1e-30, 0.7, -(2.0**-133) * 1.3])
def test_the_mean_of_many_roundings_is_the_value(value: float) -> None:
    values = torch.full((MILLION,), value)
    for bits in rounding.random_bits(rounding.stream(0, 0, CPU), values):
        found = rounding.rounded(values, bits).double()
        assert len(found.unique()) == 2
        low, high = found.min(), found.max()
        exact = values[0].double()
        deviation = ((exact - low) * (high - exact)).sqrt() / MILLION**0.5
        assert abs(found.mean() - exact) < 4 * deviation


def test_random_bits_are_uniform_and_uncorrelated() -> None:
    """Between elements, steps, parameters, seeds, and the four of an element."""
    like, first = torch.empty(MILLION), rounding.stream(0, 0, CPU)
    streams = [first, first + rounding.STEP, rounding.stream(0, 1, CPU), rounding.stream(1, 0, CPU)]
    columns = torch.stack([bits.double() for stream in streams for bits in rounding.random_bits(stream, like)])
    for column in columns:
        expected = MILLION / 256
        chi_squared = ((torch.bincount(column.long() >> 8, minlength=256) - expected) ** 2 / expected).sum()
        assert 160 < chi_squared < 370      # 255 degrees of freedom, 4.5 deviations
    shifted = [columns, columns[:4].roll(1, 1), columns[:4].roll(256, 1), columns[:4].roll(1024, 1)]
    correlations = torch.corrcoef(torch.cat(shifted)) - torch.eye(28)
    assert correlations.abs().max() < 5 / MILLION**0.5


def test_elements_are_numbered_as_they_lie_in_memory() -> None:
    like = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = rounding.random_bits(rounding.stream(0, 0, CPU), like)[0]
    flat = rounding.random_bits(rounding.stream(0, 0, CPU), torch.empty(120))[0]
    assert torch.equal(found.permute(0, 2, 3, 1).flatten(), flat)
