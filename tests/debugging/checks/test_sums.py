"""Sums, counts and averages that stop growing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.debugging.planted import B16, F16, F32, findings, line_of, only


def count(dtype: torch.dtype, times: int = 40) -> Tensor:
    total = torch.zeros((), dtype=dtype)  # made
    for _ in range(times):
        total += 64.0  # added
    return total


def average(dtype: torch.dtype) -> Tensor:
    mean = torch.ones(300, dtype=dtype)  # average made
    for step in range(60):
        mean.mul_(0.999).add_(torch.full((300,), 1.0 + step), alpha=0.001)  # averaged
    return mean


def not_in_place(dtype: torch.dtype) -> Tensor:
    total = torch.zeros((), dtype=dtype)
    for _ in range(800):
        total = total + 1  # out of place
    return total


@pytest.mark.parametrize(
    ("run", "line", "made"),
    [
        (lambda dtype: count(dtype, 400), "added", "made"),
        (average, "averaged", "average made"),
        (not_in_place, "out of place", None),
    ],
)
def test_a_sum_that_stops(run: Callable[[torch.dtype], Tensor], line: str, made: str | None) -> None:
    """With the line that adds, and the line that makes it in 16 bits; in float32 nothing is lost."""
    found = only(lambda: run(B16))
    assert (found.grade, found.kind, found.place.line) == ("precision loss", "stagnating sum", line_of(__file__, line))
    assert found.producer is not None
    assert made is None or found.producer.line == line_of(__file__, made)
    assert "float32" in found.fix.code
    assert findings(lambda: run(F32)) == []


def test_a_counter_in_float32_stops_too() -> None:
    def run() -> None:
        tokens = torch.full((), 2.0**24)
        for _ in range(20):
            tokens += 1

    assert only(run).kind == "stagnating sum"


def test_rounding_of_a_sum_that_moves_is_no_finding() -> None:
    assert findings(lambda: count(B16)) == []
    assert (
        findings(lambda: [torch.ones((), dtype=F16).add_(1e-8) for _ in range(20)]) == []
    )  # an eps, each time on another


def test_copies_of_weights_that_an_optimizer_changes_are_no_sums() -> None:
    """As in SAM, where the weights are replaced by their copies before the step."""

    def run() -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(12):
            copies = [p.data.clone() for p in model.parameters()]
            model(torch.ones(2)).sum().backward()
            for p, copy in zip(model.parameters(), copies, strict=True):
                p.data = copy
            optimizer.step()

    assert [each for each in findings(run) if each.check == "sums"] == []


def test_moments_in_bfloat16_that_stop_changing_are_a_note() -> None:
    moment = torch.zeros(300, dtype=B16)

    class Decaying(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            moment.mul_(0.999).add_(1.0, alpha=0.001)  # a moment

    def run() -> None:
        model = nn.Linear(2, 2)
        optimizer = Decaying(model.parameters(), 0.1)
        for _ in range(400):
            model(torch.ones(2)).sum().backward()
            optimizer.step()

    found = [each for each in findings(run) if each.check == "sums"]
    assert [(each.grade, each.place.line) for each in found] == [("note", line_of(__file__, "a moment"))]


def test_additions_to_different_views_of_a_tensor_are_different_sums() -> None:
    def run() -> None:
        torch.manual_seed(0)
        for _ in range(12):
            x = torch.randn(8, 3, 32)
            for i in range(8):
                x[i, :, int(torch.randint(0, 32, ()))] += torch.tensor([8.0, 0.0, 0.0])

    assert findings(run) == []


def test_a_buffer_that_is_written_with_out() -> None:
    def run() -> None:
        torch.manual_seed(0)
        buffer = torch.zeros(4)
        for _ in range(40):
            torch.div(torch.randn(4), 3, out=buffer)
            nn.Parameter(torch.ones(4)).mul(buffer.clone()).sum().backward()

    assert findings(run) == []
