"""Rounding to bfloat16 at random and with remainders: every pattern, extremes, no bias; the kernels' bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ampkit_kernels as kernels
from ampkit_kernels import rounding
from tests.gpu_checks.tools import gradients, same, scalar

CPU = torch.device("cpu")
MILLION = 1_000_000
EXTREMES = [0, 1, 0x7FFF, 0x8000, 0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF]


def patterns() -> Tensor:
    """float32 numbers of every sign and exponent, and extremes of both signs."""
    drawn = torch.randint(-2**31, 2**31, (MILLION,), generator=torch.Generator().manual_seed(0))
    extremes = torch.tensor(EXTREMES)
    return torch.cat([drawn, extremes, extremes - 2**31]).to(torch.int32).view(torch.float32)


def numbers(remainders: list[Tensor]) -> list[Tensor]:
    """As integers: as float16 some are NaN."""
    return [remainder.view(torch.int16) for remainder in remainders]


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
        remainders = torch.full(weights.shape, remainder, dtype=torch.int16).view(rounding.REMAINDER)
        found = rounding.split(rounding.joined(weights, remainders))
        kept = ~weights.isnan() & (weights != 0 if remainder < 0 else weights.isfinite())
        same([found[0][kept]], [weights[kept]], str(remainder))
        same(numbers([found[1][kept]]), numbers([remainders[kept]]), str(remainder))
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


def lists(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Values that bfloat16 holds; the last tensor has another order of dimensions."""
    torch.manual_seed(seed)
    values = gradients(torch.bfloat16, (0, 1, 17, 257, 1030, 24))
    values[-1] = values[-1].reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    return [value.to(dtype) for value in values]


def stepped(kind: str, param: torch.dtype, state: torch.dtype, **given: Any) -> list[list[Tensor]]:
    """Parameters and state after a step of the kernels from values that bfloat16 holds."""
    params, grads = lists(param), lists(torch.bfloat16, 1)
    moments = [[t.abs() for t in lists(state, seed)] for seed in (2, 3, 4)]
    options = {"lr": 0.01, "weight_decay": 0.1, "impl": "triton", **given}
    if kind == "adamw":
        steps = [scalar(1.0) for _ in params]
        kernels.adamw_(params, grads, *moments, steps, beta1=0.9, beta2=0.999, eps=1e-8, amsgrad=True, **options)
        return [params, *moments]
    kernels.sgd_(params, grads, moments[0], momentum=0.9, **options)
    return [params, moments[0]]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_kernels_round_as_the_reference(interpreted: Any, kind: str) -> None:
    """What they compute in float32, rounded by PyTorch's operations, is what they store in bfloat16, to the bit."""
    exact = stepped(kind, torch.float32, torch.float32)
    streams = [rounding.stream(3, i, CPU) for i in range(6)]
    advanced = [stream + rounding.STEP for stream in streams]
    skipped = stepped(kind, torch.bfloat16, torch.bfloat16, streams=streams, found_inf=scalar(1.0))
    same(skipped[0], lists(torch.bfloat16), "a skipped step")
    found = stepped(kind, torch.bfloat16, torch.bfloat16, streams=streams)
    same(streams, advanced, "streams")
    for number, (ours, wide) in enumerate(zip(found, exact, strict=True)):
        bits = [rounding.random_bits(stream, w)[number] for stream, w in zip(advanced, wide, strict=True)]
        want = [rounding.rounded(w, b).bfloat16() for w, b in zip(wide, bits, strict=True)]
        same(ours, want, f"list {number}")
    mixed = stepped(kind, torch.float32, torch.bfloat16, streams=[rounding.stream(3, i, CPU) for i in range(6)])
    same(mixed[0] + mixed[1], exact[0] + found[1], "float32 weights with moments of bfloat16")


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_kernels_step_remainders_as_float32(interpreted: Any, kind: str) -> None:
    exact = stepped(kind, torch.float32, torch.float32)
    remainders = [torch.zeros_like(t, dtype=rounding.REMAINDER) for t in lists(torch.bfloat16)]
    found = stepped(kind, torch.bfloat16, torch.float32, remainders=remainders)
    wanted = [rounding.split(weight) for weight in exact[0]]
    same(found[0], [weight for weight, _ in wanted], "weights")
    same(numbers(remainders), numbers([remainder for _, remainder in wanted]), "remainders")
    same(found[1], exact[1], "momenta")
    narrow = []
    for weight, given in ((torch.float32, None), (torch.bfloat16, [torch.zeros_like(t) for t in remainders])):
        streams = [rounding.stream(3, i, CPU) for i in range(6)]
        narrow.append(stepped(kind, weight, torch.bfloat16, remainders=given, streams=streams)[1])
    same(*narrow, "stochastic momenta beside remainders")
    skipped = [t.clone() for t in remainders]
    stepped(kind, torch.bfloat16, torch.float32, remainders=remainders, found_inf=scalar(1.0))
    same(numbers(remainders), numbers(skipped), "a skipped step")
