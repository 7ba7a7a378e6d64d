"""Twins share memory with what they are casts of, until somebody writes there; that keeps the peak low."""

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
    """What the twin of a step's result holds when it has run."""
    comparison = PrecisionComparison(None)
    with comparison:
        result = step(x)
    return comparison.run.memory.read(result).clone()


def write_in_place(x: Tensor) -> Tensor:
    y = x.half()
    x.mul_(3)
    return y


def write_with_the_optimizer(x: Tensor) -> Tensor:
    y = x.half()
    parameter = nn.Parameter(x)
    parameter.grad = torch.ones_like(x)
    torch.optim.SGD([parameter], lr=1.0).step()
    return y


def write_a_view(x: Tensor) -> Tensor:
    y = x.half()
    x[:32].zero_()
    return y


def write_out(x: Tensor) -> Tensor:
    y = x.half()
    torch.add(x, 1, out=x)
    return y


def write_two_casts_deep(x: Tensor) -> Tensor:
    y = x.half().float().bfloat16()
    x.mul_(3)
    return y


def write_source_then_cast(x: Tensor) -> Tensor:
    y = x.half()
    x.mul_(3)
    y.mul_(2)
    return y / 2


def write_with_low_values(x: Tensor) -> Tensor:
    y = x.half()
    x.copy_(x.bfloat16())
    return y


def write_the_cast_and_the_source(x: Tensor) -> Tensor:
    y = x.half()
    z = y.float()
    z.mul_(3)
    x.mul_(5)
    return y


@pytest.mark.parametrize("step", [
    write_in_place, write_with_the_optimizer, write_a_view, write_out, write_two_casts_deep, write_with_low_values,
    write_the_cast_and_the_source, write_source_then_cast,
])
def test_a_cast_keeps_the_values_that_it_was_made_of(step: Callable[[Tensor], Tensor]) -> None:
    """Whoever writes to the source later, and however."""
    assert torch.equal(reference_of(step, X.clone()), X)


@torch.library.custom_op("ampkit_tests::quietly_triple", mutates_args=())
def quietly_triple(x: Tensor) -> Tensor:
    x.detach().mul_(3)
    return x.clone()


def test_an_operator_of_a_library_may_write_without_saying_so() -> None:
    def step(x: Tensor) -> Tensor:
        y = x.half()
        quietly_triple(x)
        return y

    assert torch.equal(reference_of(step, X.clone()), X)


def test_writing_to_a_cast_writes_to_nothing_else() -> None:
    """Neither the user's own memory nor the twins of other casts."""
    x = X.clone()
    comparison = PrecisionComparison(None)
    with comparison:
        y = x.half()
        z = y.float()
        y.mul_(2)
        first = comparison.run.memory.read(y).clone()
        z.add_(1)
        y.mul_(2)
    memory = comparison.run.memory
    assert torch.equal(x, X)
    assert torch.equal(first, X * 2)
    assert torch.equal(memory.read(y), X * 4)
    assert torch.equal(memory.read(z), X + 1)


def test_what_was_written_stays_when_the_source_is_written_too() -> None:
    x = X.clone()
    comparison = PrecisionComparison(None)
    with comparison:
        casts = [x.half() for _ in range(8)]
        for i in range(0, 8, 2):
            casts[i].mul_(i)
        x.mul_(7)
    for i, one in enumerate(casts):
        assert torch.equal(comparison.run.memory.read(one), X if i % 2 else X * i)


@pytest.mark.parametrize("source", [
    X.double(), X.view(8, 8).t(), X[8:], X[::2], torch.complex(X, X), X[:1].expand(8), torch.arange(8), X.half(),
])
def test_a_cast_that_cannot_share(source: Tensor) -> None:
    """Another dtype than float32, a part of some memory, another order."""
    low = torch.complex32 if source.is_complex() else torch.float16
    expected = source.to(torch.complex64 if source.is_complex() else torch.float32)
    with pytest.warns(UserWarning, match="ComplexHalf") if source.is_complex() else contextlib.nullcontext():
        assert torch.equal(reference_of(lambda x: x.to(low, memory_format=torch.contiguous_format), source), expected)


def test_memory_that_is_freed_out_of_sight_is_not_read() -> None:
    """What shared it is then taken as it is."""
    x = X.clone()
    comparison = PrecisionComparison(None)
    with comparison:
        y = x.half()
        x.untyped_storage().resize_(0)
        assert torch.equal(comparison.run.memory.read(y), y.float())
        torch.zeros(0, out=x.resize_(0))
        x.untyped_storage().resize_(4 * X.numel())
        y.add_(1)
    assert torch.equal(comparison.run.memory.read(y), X.half().float() + 1)


def test_several_ranks_lend_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP frees and fills their memory again out of sight."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    def step(x: Tensor) -> Tensor:
        y = x.half()
        x.numpy()[:] = 0
        return y

    assert torch.equal(reference_of(step, X.clone()), X)


def test_memory_of_casts_that_are_gone_is_given_back() -> None:
    comparison = PrecisionComparison(None)
    with comparison:
        for _ in range(40):
            torch.ones(1 << 18).half()
        memory = comparison.run.memory
        assert len(memory._copies) < 10
        assert len(memory._sharing) < 10


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


def test_a_step_needs_at_most_three_times_the_memory() -> None:
    cpu = torch.device("cpu")
    plain = peak_and_copies(step_of(lambda model: contextlib.nullcontext()), cpu)["peak_bytes"]
    compared = peak_and_copies(step_of(PrecisionComparison), cpu)["peak_bytes"]
    assert plain > 1 << 20
    assert compared <= 3.0 * plain
