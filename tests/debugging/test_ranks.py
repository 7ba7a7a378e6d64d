"""A rank that only received an inf says so, and the rank that made it says why; replicas that differ are found."""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ampkit.debugging import Examination
from ampkit.debugging.checks.replicas import Replicas
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


def replicas(rank: int, world: int, program: str) -> list[tuple[str, str, int]]:
    """Ranks with batches of their own train one model; the second takes fewer steps."""
    torch.manual_seed(rank if "initial" in program or "alone" in program else 0)
    model = nn.Sequential(nn.Linear(4, 4))
    wrapped = nn.parallel.DistributedDataParallel(model) if "ddp" in program else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    with Examination(wrapped, checks=[Replicas]) as report:
        for step in range(9 if "ddp" in program or rank == 0 else 6):
            optimizer.zero_grad()
            forward = model if "bypassed" in program else wrapped
            forward(torch.randn(2, 4)).square().mean().backward()
            for p in model.parameters() if "averaged" in program and step < 6 else ():
                dist.all_reduce(p.grad)
            if "written" in program and step == 3 and rank == 0:
                next(model.parameters()).data[0, 0] += 1e-6
            optimizer.step()
    dist.barrier()  # the store belongs to rank 0
    with Examination(wrapped, checks=[Replicas]):
        pass
    return [(each.what, each.cause.text.partition(":")[0], each.step) for each in report.findings]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("ddp", None),
        ("averaged", None),
        ("alone", None),
        ("ddp bypassed", ("module.0.weight differs on ranks 0 and 1", "their gradients differ", 4)),
        ("ddp written", ("module.0.weight differs on ranks 0 and 1", "their gradients are the same", 4)),
        ("averaged initial", ("0.weight differs on ranks 0 and 1", "their gradients are the same", 0)),
    ],
)
def test_replicas_that_differ(program: str, expected: tuple[str, str, int] | None) -> None:
    """No rank waits for another: one of them may take fewer steps."""
    found = on_ranks(replicas, program)
    assert {each for report in found for each in report} == ({expected} if expected else set())
