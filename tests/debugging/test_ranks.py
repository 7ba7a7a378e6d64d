"""A rank that only received an inf says so, and the rank that made it says why; replicas that differ are found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ampkit.debugging import Examination
from ampkit.debugging.checks.replicas import Replicas
from tests.helpers.paths import ROOT
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


SCRIPT = """
import os
import torch
from torch import distributed, nn

rank = int(os.environ["RANK"])
distributed.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=rank, world_size=2)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_that_outlive_their_group_end(tmp_path: Path) -> None:
    """The model, and DDP's reducer with it, is freed after the group, while the interpreter ends."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    environment = os.environ | {"MEETING": str(tmp_path / "meeting"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    command = [sys.executable, "-X", "faulthandler", "-m", "ampkit", "debug", str(tmp_path / "train.py")]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        printed = [each.communicate(timeout=120)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0, 0]
    assert all("no findings" in text for text in printed)


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
            forward = model if "bypassed" in program or "local" in program else wrapped
            forward(torch.randn(2, 4)).square().mean().backward()
            for p in model.parameters() if "averaged" in program and step < 6 else ():
                dist.all_reduce(p.grad)
            if "written" in program and step == 3 and rank == 0:
                next(model.parameters()).data[0, 0] += 1e-6
            optimizer.step()
            for p in model.parameters() if "local" in program and step % 3 == 2 else ():
                dist.all_reduce(p.data)
                p.data /= world
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
        ("ddp local", None),  # local SGD: each rank takes steps of its own, and then parameters are averaged
        ("ddp bypassed", ("module.0.weight differs on ranks 0 and 1", "their gradients differ", 1)),
        ("ddp written", ("module.0.weight differs on ranks 0 and 1", "their gradients are the same", 3)),
        ("averaged initial", ("0.weight differs on ranks 0 and 1", "their gradients are the same", 0)),
    ],
)
def test_replicas_that_differ(program: str, expected: tuple[str, str, int] | None) -> None:
    """No rank waits for another: one of them may take fewer steps."""
    found = on_ranks(replicas, program)
    assert {each for report in found for each in report} == ({expected} if expected else set())
