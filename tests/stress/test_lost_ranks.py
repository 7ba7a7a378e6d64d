"""A rank is killed inside a step: the other one ends with an error, as without ampkit, and does not hang."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampkit import GradScaler, Policy, autocast
from tests.helpers.ranks import RankError, on_ranks

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo"),
    pytest.mark.skipif(os.name != "posix", reason="sends SIGKILL to a process"),
]


def train(rank: int, world: int, folder: Path) -> None:
    """Rank 1 is killed as its third step begins; rank 0 writes to a file whether its error left it in a region."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", process_group=dist.group.WORLD)
    policy, steps = Policy.default("cpu").for_modules(model, {"**": "float32"}), []

    def lose(*_: Any) -> None:
        steps.append(1)
        if rank == 1 and len(steps) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer.register_step_pre_hook(lose)
    try:
        for _ in range(5):
            with autocast("cpu", policy=policy):
                loss = model(torch.ones(3, 4)).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    except RuntimeError:
        (folder / "ended").write_text(f"in a region: {torch.is_autocast_enabled('cpu')}")


def test_the_other_rank_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        on_ranks(train, tmp_path)
    assert (tmp_path / "ended").read_text() == "in a region: False"
