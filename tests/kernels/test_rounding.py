"""Stochastic rounding to bfloat16, and remainders: patterns of every exponent, extremes, no bias.

`tests.gpu_checks.operations` checks that steps round like these functions.
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
    """float32 numbers of both signs and every exponent, and extremes of both signs."""
    drawn = torch.randint(-(2**31), 2**31, (MILLION,), generator=torch.Generator().manual_seed(0))
    extremes = torch.tensor(EXTREMES)
    return torch.cat([drawn, extremes, extremes - 2**31]).to(torch.int32).view(torch.float32)


def test_weights_and_remainders_are_float32() -> None:
    """Exactly; and the weight is torch's own except at ties."""
    values = patterns()
    weights, remainders = rounding.split(values)
    same([rounding.joined(weights, remainders)], [values], "masters")
    other = ~values.isnan() & (weights != values.bfloat16())
    assert 0 < other.sum().item() < 100
    assert (values.view(torch.int32)[other] & 0xFFFF).unique().tolist() == [0x8000]


def test_every_pair_joins_to_a_number_that_splits_into_it() -> None:
    """Except NaNs, and pairs that no split gives: 0 with a negative remainder, inf with a positive one."""
    weights = torch.arange(-(2**15), 2**15, 5).to(torch.int16).view(torch.bfloat16)
    for remainder in (-0x8000, -1, 0, 1, 0x7FFF):
        remainders = torch.full(weights.shape, remainder, dtype=torch.int16)
        split = rounding.split(rounding.joined(weights, remainders.view(rounding.REMAINDER)))
        possible = ~weights.isnan() & (weights != 0 if remainder < 0 else weights.isfinite())
        same([split[0][possible]], [weights[possible]], str(remainder))
        same([split[1].view(torch.int16)[possible]], [remainders[possible]], str(remainder))  # some float16 are NaN
    # A write of 0 to a weight can leave a negative remainder, which must not join to NaN.
    remainder = torch.tensor([-5], dtype=torch.int16).view(rounding.REMAINDER)
    assert rounding.joined(torch.zeros(1).bfloat16(), remainder).item() == 0


def test_stochastic_rounding_takes_a_neighbor_and_makes_no_infinity() -> None:
    values = patterns()
    values = values[~values.isnan()]
    for bits in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        rounded, what = rounding.rounded(values, bits), f"plus {bits}"
        same([rounded], [rounded.bfloat16().float()], what)
        same([rounding.rounded(rounded, bits)], [rounded], f"{what}, values that bfloat16 holds")
        finite = values.bfloat16().isfinite()
        same([rounded[~finite]], [values.bfloat16()[~finite].float()], f"{what}, inf")
        apart = rounded[finite].view(torch.int32) - values[finite].view(torch.int32)
        wrong = ~rounded[finite].isfinite() | (apart.abs() >= 0x10000)
        assert values[finite][wrong].tolist() == [], what
    assert rounding.rounded(torch.tensor([torch.nan]), 0xFFFF).isnan().tolist() == [True]


@pytest.mark.parametrize("value", [1.0 + 2**-9, -3.0 - 2**-14, 1e-30, 0.7, -(2.0**-133) * 1.3])
def test_the_mean_of_many_roundings_is_the_value(value: float) -> None:
    values = torch.full((MILLION,), value)
    for bits in rounding.random_bits(rounding.stream(0, 0, CPU), values):
        rounded = rounding.rounded(values, bits).double()
        assert len(rounded.unique()) == 2
        low, high = rounded.min(), rounded.max()
        exact = values[0].double()
        deviation = ((exact - low) * (high - exact)).sqrt() / MILLION**0.5
        assert abs(rounded.mean() - exact).item() < 4 * deviation.item()


def test_random_bits_are_uniform_and_uncorrelated() -> None:
    """Between elements, steps, parameters, seeds, and the four numbers of an element."""
    like, first = torch.empty(MILLION), rounding.stream(0, 0, CPU)
    streams = [first, first + rounding.STEP, rounding.stream(0, 1, CPU), rounding.stream(1, 0, CPU)]
    columns = torch.stack([bits.double() for stream in streams for bits in rounding.random_bits(stream, like)])
    for column in columns:
        expected = MILLION / 256
        chi_squared = ((torch.bincount(column.long() >> 8, minlength=256) - expected) ** 2 / expected).sum()
        assert 160 < chi_squared.item() < 370  # 255 degrees of freedom, 4.5 deviations
    shifted = [columns, columns[:4].roll(1, 1), columns[:4].roll(256, 1), columns[:4].roll(1024, 1)]
    correlations = torch.corrcoef(torch.cat(shifted)) - torch.eye(28)
    assert correlations.abs().max().item() < 5 / MILLION**0.5


def test_elements_are_numbered_in_the_order_of_memory() -> None:
    like = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    bits = rounding.random_bits(rounding.stream(0, 0, CPU), like)[0]
    flat = rounding.random_bits(rounding.stream(0, 0, CPU), torch.empty(120))[0]
    assert bits.permute(0, 2, 3, 1).flatten().tolist() == flat.tolist()


def test_functions_in_place_equal_the_others() -> None:
    """For every weight, also where a list has no inf and no NaN, for which they do without most of the arithmetic."""
    weights = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    for chosen in (weights, weights[weights.isfinite()], weights[weights.abs() < 1e15], weights[:7]):
        for remainder in (-0x8000, -0x7FFF, -5, 0, 1, 0x7FFF):
            remainders = torch.full(chosen.shape, remainder, dtype=torch.int16).view(rounding.REMAINDER)
            joined = chosen.float()
            rounding.join_(joined, remainders)
            same([joined], [rounding.joined(chosen, remainders)], f"joined, {remainder}")
            halves, found = joined.clone(), torch.empty_like(remainders)
            rounding.split_(halves, found)
            weight, wanted = rounding.split(joined)
            same([halves.bfloat16()], [weight], f"weights, {remainder}")
            same([found.view(torch.int16)], [wanted.view(torch.int16)], f"remainders, {remainder}")
            for bits in (0, 1, 0x8000, 0xFFFF):
                rounded = joined.clone()
                rounding.round_(rounded, torch.full(chosen.shape, bits, dtype=torch.int32))
                same([rounded], [rounding.rounded(joined, bits)], f"rounded, {remainder}, {bits}")


def test_random_bits_of_several_tensors_are_those_of_each() -> None:
    """Also of pieces, of elements beyond 2**32, and of tensors that are not contiguous."""
    tensors = [
        torch.empty(3, 5),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(7, 8)[:, ::2],
    ]
    streams = [rounding.stream(0, i, CPU) for i in range(3)]
    bits = rounding.RandomBits(streams, 1024)
    for rows in ([0, 1, 2], [2, 0], [1], [2]):
        chosen = [tensors[i] for i in rows]
        wanted = [
            torch.cat([b.flatten() for b in each])
            for each in zip(*(rounding.random_bits(streams[i], tensors[i]) for i in rows), strict=True)
        ]
        same([b.long() for b in map(Tensor.clone, bits.draw(rows, chosen))], wanted, str(rows))
    for first in (1024, rounding.BLOCK - 500, 2**31 - 1024, 2**32 - 1024, 2**33 + 1024):
        numbers = torch.arange(first, first + 1000)
        wanted = rounding.random_bits(streams[1], numbers, numbers)
        same([b.long() for b in map(Tensor.clone, bits.draw([1], [torch.empty(1000)], first))], wanted, str(first))
