"""The example on several ranks goes on with another number of them."""

import re
from pathlib import Path

import pytest
import torch

from tests.helpers.paths import EXAMPLES
from tests.helpers.ranks import on_ranks, run_script

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")]


def run(how: str, folder: Path, *, ranks: int, steps: int) -> float:
    """The last loss; what else the script prints is checked."""
    printed = on_ranks(run_script, EXAMPLES / "ranks_resume.py", how, folder, steps, world=ranks)[0]
    match = re.fullmatch(rf"{how} on {ranks}, step {steps}: loss ([\d.]+), 1 skipped, scale 512\n", printed)
    assert match, printed
    return float(match[1])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The loss of twelve steps in one process."""
    return run("ddp", tmp_path_factory.mktemp("one"), ranks=1, steps=12)


@pytest.mark.parametrize(("how", "first", "then"), [("ddp", 2, 1), ("fsdp", 2, 1), ("tensor", 1, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(
    how: str, first: int, then: int, tmp_path: Path, uninterrupted: float
) -> None:
    """Weights, optimizer, scale and counts: the second half ends where an uninterrupted run ends."""
    half = run(how, tmp_path, ranks=first, steps=6)
    assert half > 1.3 * uninterrupted
    assert run(how, tmp_path, ranks=then, steps=12) == pytest.approx(uninterrupted, rel=1e-3)
