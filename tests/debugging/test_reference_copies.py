"""Reference copies hold what a cast was made of, whoever writes there later; the peak of a step stays bounded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampkit import autocast
from ampkit.debugging.precision import PrecisionComparison
from benchmarks.counts import peak_and_copies
from benchmarks.workloads import DecoderBlock

X = torch.linspace(1, 2, 64) + 1e-4


def reference_of(step: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The reference copy of a step's result when it has run."""
    comparison = PrecisionComparison(None)
    with comparison:
        result = step(x)
    return comparison.memory.read(result).clone()


def write_a_view(x: Tensor) -> Tensor:
    y = x.half()
    x[:32].zero_()
    return y


def write_two_casts_deep(x: Tensor) -> Tensor:
    y = x.half().float().bfloat16()
    x.mul_(3)
    return y


def write_source_then_cast(x: Tensor) -> Tensor:
    y = x.half()
    torch.add(x, 1, out=x)
    y.mul_(2)
    return y / 2


@pytest.mark.parametrize("step", [write_a_view, write_two_casts_deep, write_source_then_cast])
def test_a_cast_keeps_the_values_that_it_was_made_of(step: Callable[[Tensor], Tensor]) -> None:
    assert torch.equal(reference_of(step, X.clone()), X)


@pytest.mark.parametrize("source", [
    X.double(), X.view(8, 8).t(), X[8:], X[::2], torch.complex(X, X), X[:1].expand(8), torch.arange(8), X.half(),
])
def test_a_cast_of_whatever_lies_in_memory(source: Tensor) -> None:
    """Another dtype than float32, a part of some memory, another order."""
    low = torch.complex32 if source.is_complex() else torch.float16
    expected = source.to(torch.complex64 if source.is_complex() else torch.float32)
    with pytest.warns(UserWarning, match="ComplexHalf") if source.is_complex() else contextlib.nullcontext():
        assert torch.equal(reference_of(lambda x: x.to(low, memory_format=torch.contiguous_format), source), expected)


def step_of(around: Callable[[nn.Module], Any]) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(*(DecoderBlock(64, 4) for _ in range(4)))
    batch = torch.randn(8, 64, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with around(model):
            with autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(batch).float(), batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    step()
    return step


def test_a_step_needs_little_more_than_three_times_the_memory() -> None:
    cpu = torch.device("cpu")
    plain = peak_and_copies(step_of(lambda model: contextlib.nullcontext()), cpu)["peak_bytes"]
    compared = peak_and_copies(step_of(PrecisionComparison), cpu)["peak_bytes"]
    assert plain > 1 << 20
    assert compared <= 3.2 * plain
