"""A rank that only received an inf says so; merged, the rank that made it comes first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampkit.debugging.report_file import merge, read

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_the_rank_to_blame(culprit: int, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    command = [sys.executable, "-m", "tests.debugging.ranks", str(tmp_path)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(culprit)], cwd=ROOT, env=environment, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for rank in ranks:
        _, error = rank.communicate(timeout=280)
        assert rank.returncode == 0, error.decode()[-2000:]
    made, received = merge(read(tmp_path / f"r{rank}.json") for rank in range(2))
    assert (made.rank, received.rank) == (culprit, 1 - culprit)
    assert made.findings[0].origin.op == "aten::reciprocal"
    assert made.findings[0].cause.kind == "undefined"
    assert received.findings[0].cause.kind == "received"
    assert not any(one.cause.kind == "received" for one in made.findings)       # what it sent was broken
    assert "rank " in str(received)
