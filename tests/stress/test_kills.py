"""Ranks of examples/pretrain.py are killed at every point, in every precision, and at any moment; the end is the same.

The grid of precisions and points is gone through in random order. One start in three is killed from outside at a random
moment, and each run takes up to four kills.
"""

import itertools
import os
import signal
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available() or sys.platform != "linux":
    pytest.skip("forks ranks that meet by gloo, and sends them signals", allow_module_level=True)

from examples.pretrain import PRECISIONS
from tests.helpers.killed_runs import POINTS, Job, Kill, start
from tests.stress.budget import rounds

pytestmark = pytest.mark.timeout(300 + float(os.environ.get("AMPKIT_SOAK_SECONDS") or 0))

STEPS = 6


def test_every_point_in_every_precision(tmp_path: Path) -> None:
    grid: list[tuple[str, str]] = []
    expected: dict[tuple[str, str], dict[str, str]] = {}
    killed: dict[str, int] = {}
    for number, draw in enumerate(rounds("kills", 1)):
        if not grid:
            grid = list(itertools.product(PRECISIONS, (*POINTS, "metadata")))
            draw.shuffle(grid)
        precision, point = grid.pop()
        parallel = draw.choice(["fsdp", "fsdp", "ddp", "fsdp_tp"])
        job = Job(tmp_path / f"run{number}", precision, parallel, STEPS)
        if (precision, parallel) not in expected:
            expected[precision, parallel] = start(Job(tmp_path / f"whole{number}", precision, parallel, STEPS)).state
        if point == "agreement" and parallel == "ddp":
            point = "before the step"  # nothing is exchanged there
        first = draw.randint(1, 4)
        kill = Kill(first, 0 if point == "metadata" else draw.randrange(2), point)
        codes = start(job, kills=(kill,)).codes
        assert codes[kill.rank] == -signal.SIGKILL, f"{kill} did not take place in {job}: {codes}"
        for _ in range(draw.randint(0, 3)):
            start(job, after=draw.uniform(0.2, 4.0))
        ended = start(job)
        assert ended.codes == [0, 0], ended.errors
        assert ended.state == expected[precision, parallel], f"round {number}: {job}, {kill}"
        killed[point] = killed.get(point, 0) + 1
    print(f"kills: {killed}")
