"""A rank that only received an inf says so, and the rank that made it says why."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from ampkit.debugging import Examination
from tests.helpers.ranks import on_ranks


def step(rank: int, world: int, offender: int) -> str:
    """Both ranks reduce their gradients; one of them makes an inf."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Examination(model) as report:
        loss = model(torch.ones(2, 4)).sum()
        if rank == offender:
            loss = loss * (loss.detach() * 0).reciprocal()
        loss.backward()
        optimizer.step()
    return report.to_json()


@pytest.mark.parametrize("offender", [0, 1])
def test_the_rank_to_blame(offender: int) -> None:
    reports: list[dict[str, Any]] = [json.loads(text) for text in on_ranks(step, offender)]
    made, received = reports[offender], reports[1 - offender]
    assert (made["rank"], received["rank"]) == (offender, 1 - offender)
    assert made["findings"][0]["op"] == "aten::reciprocal"
    assert made["findings"][0]["kind"] == "undefined"
    assert received["findings"][0]["kind"] == "received"
    assert "received" not in [finding["kind"] for finding in made["findings"]]  # it sent a broken value
    assert f"rank {1 - offender}: error: " in received["text"]
    assert "received from another rank" in received["text"]
