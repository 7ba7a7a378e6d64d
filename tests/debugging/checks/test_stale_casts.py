"""Casts that are older than their weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampkit import autocast
from tests.debugging.planted import B16, findings, line_of, only


def steps_inside(region: Callable[[], Any], model: nn.Module | None = None, *, step: bool = True) -> Callable[[], None]:
    model = model or nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        with region():  # region
            for _ in range(4):
                loss = model(torch.ones(2, 4)).float().sum()
                with torch.autocast("cpu", enabled=False):
                    torch.autograd.backward(loss)
                if step:
                    optimizer.step()
                    optimizer.zero_grad()

    return run


def test_casts_that_are_older_than_their_weights() -> None:
    found = next(
        each for each in findings(steps_inside(lambda: torch.autocast("cpu", dtype=B16))) if each.check == "stale casts"
    )
    assert (found.grade, found.kind, found.place.line) == ("error", "stale cast", line_of(__file__, "region"))
    assert "linear" in found.cause.text or "addmm" in found.cause.text


def test_one_mistake_is_one_finding_for_all_layers() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=each > 0) for each in range(3)))  # two operators
    run = steps_inside(lambda: torch.autocast("cpu", dtype=B16), layers)
    assert sum(each.check == "stale casts" for each in findings(run, layers)) == 1


@pytest.mark.parametrize(
    "run",
    [
        steps_inside(lambda: autocast("cpu", dtype=B16)),
        steps_inside(lambda: torch.autocast("cpu", dtype=B16, cache_enabled=False)),
        steps_inside(lambda: torch.autocast("cpu", dtype=B16), step=False),
    ],
)
def test_casts_that_are_not(run: Callable[[], None]) -> None:
    """Those of ampkit's regions are never stale."""
    assert not any(found.check == "stale casts" for found in findings(run))


def test_a_cast_of_the_users_own_is_a_note() -> None:
    weight = nn.Parameter(torch.ones(4))

    def run() -> None:
        half = weight.bfloat16()
        with torch.no_grad():
            weight.mul_(2.0)
        (half * 2).sum()

    assert only(run).grade == "note"
