"""The operators whose rounding makes an inf are named, wherever they are, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampkit.debugging import Examination
from ampkit.debugging.finding import Finding
from ampkit.debugging.observe.observer import Observer
from tests.debugging.models import Middle
from tests.debugging.planted import B16, F16, F32, line_in

ROUNDED: list[tuple[Callable[[Tensor], Tensor], torch.dtype]] = []
EXACT: list[tuple[Callable[[Tensor], Tensor], torch.dtype]] = []


def case(cases: list[Any], dtype: torch.dtype) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        cases.append(pytest.param(function, dtype, id=function.__name__))
        return function

    return add


# --- rounding makes a value for which an operator is undefined; the line that is to be named has the comment


@case(ROUNDED, F16)
def a_probability_of_one(x: Tensor) -> Tensor:
    p = torch.sigmoid(x * 0 + 9)  # here
    return (1 - p).log()


@case(ROUNDED, F16)
def behind_casts_views_and_a_choice(x: Tensor) -> Tensor:
    small = (x.float().abs() * 1e-9).half()  # here
    return torch.cat([small.float().T[:4], small.float().T[4:]]).clone()[torch.arange(8)].log()


@case(ROUNDED, F16)
def in_place(x: Tensor) -> Tensor:
    y = x.abs() * 1e-2
    y.mul_(1e-7)  # here
    return y.log()


@case(ROUNDED, F16)
def an_epsilon_behind_what_is_gone(x: Tensor) -> Tensor:
    """Complex numbers that are written over are not kept, and random ones cannot be computed again."""
    y = torch.randn(8, 8, dtype=torch.complex64).mul_(2).real.abs().half() * 0
    return (x * 0 + y) / (y + 1e-15)  # here


@case(ROUNDED, F16)
def behind_random_numbers_in_channels_last(x: Tensor) -> Tensor:
    y = torch.rand(1, 8, 2, 4).contiguous(memory_format=torch.channels_last).mul_(1e-9)
    y = torch.empty_like(y).uniform_().add_(1).mul_(1e-9).half()  # here
    return (x + y.reshape(8, 8)[:1] * 0).relu() * 0 + y.reshape(8, 8).log()


@case(ROUNDED, F16)
def in_backward(x: Tensor) -> Tensor:
    y = (x.float().abs() * 1e-9).half()  # here
    return y.float().sqrt()


@case(ROUNDED, B16)
def a_little_more_than_one(x: Tensor) -> Tensor:
    y = x[:, :3] * 0 + torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)
    y = y / y.norm(dim=-1, keepdim=True)  # here
    return torch.acos((y * y).sum(-1))


@case(ROUNDED, B16)
def a_variance_below_zero(x: Tensor) -> Tensor:
    y = x.float() * 0.01 + 10.3
    square = y.square().mean(-1).bfloat16()  # here
    return (square.float() - y.mean(-1).square()).sqrt()


@case(ROUNDED, F16)
def an_index_from_a_value_that_is_gone(x: Tensor) -> Tensor:
    small = (x.float().abs() * 0 + 3e-8).half() * 0.5  # here
    table = torch.tensor([0.0, 1.0])
    return table[(small.float() * 1e8).long().clamp(0, 1)].log() + x


@case(ROUNDED, F32)
def in_float32(x: Tensor) -> Tensor:
    p = torch.sigmoid(x * 0 + 20)  # here
    return torch.log(1 - p)


@case(ROUNDED, F16)
def a_number(x: Tensor) -> Tensor:
    y = (x * 0).norm(dim=-1, keepdim=True) + 1e-9  # here
    return x / y


# --- the exact result is undefined as well, whatever float64 computes


@case(EXACT, F16)
def nothing_by_nothing(x: Tensor) -> Tensor:
    return (x * 0) / (x * 0).sum(-1, keepdim=True)


@case(EXACT, F16)
def a_difference_that_is_zero(x: Tensor) -> Tensor:
    y = x.float() * 0 + 0.3
    return ((y * 3 / 3).half() - y.half()).abs().log()


@case(EXACT, F16)
def a_difference_that_float64_rounds(x: Tensor) -> Tensor:
    """Float64 computes 1e-16, of which the logarithm is finite by chance."""
    y = x.float() * 0 + 0.9
    return (y / 7 * 7 - y).abs().log()


@case(EXACT, F16)
def a_deviation_that_is_zero(x: Tensor) -> Tensor:
    y = x * 0 + 0.7
    centered = y - y.mean(-1, keepdim=True)
    return centered / centered.square().mean(-1, keepdim=True).sqrt()


@case(EXACT, B16)
def a_row_that_is_masked(x: Tensor) -> Tensor:
    return x.masked_fill(x == x, float("-inf")).softmax(-1)


def finding_of(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Finding:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 8), Middle(function)), torch.randn(8, 16)
    with Examination(model) as report:
        with torch.autocast("cpu", dtype, enabled=dtype != F32):
            y = model(x)
        y.float().sum().backward()
    return report.nonfinite[0]


@pytest.mark.parametrize(("function", "dtype"), ROUNDED)
def test_the_operator_that_rounds_is_named(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    finding = finding_of(function, dtype)
    assert finding.kind == "rounded", finding
    named = {(Path(maker.file).name, maker.line) for maker in finding.rounding_sources}
    assert named == {(Path(__file__).name, line_in(function))}, finding
    assert finding.producer is finding.rounding_sources[0]


@pytest.mark.parametrize(("function", "dtype"), EXACT)
def test_what_is_undefined_in_exact_arithmetic_has_no_maker(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    finding = finding_of(function, dtype)
    assert finding.kind in ("undefined", "from inf"), finding
    assert finding.cause.is_exact
    assert finding.rounding_sources == ()


def test_two_makers_are_named_with_the_larger_one_first() -> None:
    def two(x: Tensor) -> Tensor:
        few = (x[:2].float().abs() * 1e-9).half()
        many = (x[2:].float().abs() * 1e-10).half()
        return torch.cat([few, many]).float().log()

    finding = finding_of(two, F16)
    assert [maker.line - two.__code__.co_firstlineno for maker in finding.rounding_sources] == [2, 1]


def test_inf_of_the_data_is_not_made_by_the_rounding_of_a_weight() -> None:
    """A kernel in 16 bits may spread an inf over more elements than one in float64."""

    def convolved(x: Tensor) -> Tensor:
        images = torch.randn(30, 1, 16, 16)
        images[7, 0, 3, 3] = torch.inf
        weight = torch.randn(16, 1, 3, 3, requires_grad=True) / 3
        return F.conv2d(images.bfloat16(), weight.bfloat16(), padding=1).float().mean() + x

    finding = finding_of(convolved, B16)
    assert finding.rounding_sources == ()
    assert finding.kind in ("from inf", "arrived"), finding


def test_memory_that_a_kernel_wrote_is_not_computed_again() -> None:
    """The zeros were written over where no tool sees it: that they would be 0 exactly says nothing."""

    def written(x: Tensor) -> Tensor:
        y = torch.zeros(8, 8, dtype=F16)
        y.numpy()[:] = 1.0
        return (1 - y).log() + x

    finding = finding_of(written, F16)
    assert finding.rounding_sources == ()
    assert not finding.cause.is_exact


def test_a_tape_keeps_no_large_activations() -> None:
    """After a forward without gradients, only the small tensors of the step and a few megabytes are left."""
    model, batch = nn.Sequential(nn.Linear(64, 4096), nn.Tanh(), nn.Linear(4096, 1)), torch.randn(2048, 64)
    with Observer(model) as run, torch.no_grad():
        run.operator_ran = [lambda call: None]
        model(batch)
    run.tape.last()
    saved = [view.values.storage for call in run.tape.calls for view in call.outputs]
    assert saved
    assert sum(storage.nbytes() for storage in saved if storage is not None) < 1 << 24


def test_the_tape_is_kept_in_every_step() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Examination(model) as report:
        for step in range(3):
            y = model(torch.ones(2, 4)).abs() * (1e-9 if step == 2 else 1.0)
            (y.half().float().log() * 1.0).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert report.nonfinite[0].kind == "rounded"
