"""The pool of ranks that other tests rely on: it answers, it says what went wrong, and it survives."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import RankError, on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")


def total(rank: int, world: int, values: torch.Tensor) -> tuple[int, list[float]]:
    mine = values * (rank + 1)
    dist.all_reduce(mine)
    return os.getpid(), mine.tolist()


def raises_on(rank: int, world: int, failing: int) -> None:
    if rank == failing:
        raise ValueError(f"rank {rank} raises")
    dist.all_reduce(torch.ones(1))


def dies(rank: int, world: int) -> None:
    os._exit(7)


def sleeps(rank: int, world: int) -> None:
    time.sleep(60)


def test_the_pool_answers_and_survives_an_exception() -> None:
    """The same processes handle every call; a rank that raises ends the wait of the others."""
    values = torch.tensor([1.0, 2.0])
    first = on_ranks(total, values)
    assert [sums for _, sums in first] == [[3.0, 6.0]] * 2
    for failing in (0, 1):
        began = time.monotonic()
        with pytest.raises(RankError, match=rf"rank {failing}:\nTraceback[^$]*ValueError: rank {failing} raises"):
            on_ranks(raises_on, failing)
        assert time.monotonic() - began < 30, "the other rank waited for its time limit"
    assert on_ranks(total, values) == first


def test_the_pool_starts_again_after_a_death_and_a_hang() -> None:
    """And the error says which rank, and where it stood."""
    with pytest.raises(RankError, match="rank 0 died with exit code 7"):
        on_ranks(dies, world=1)
    with pytest.raises(RankError, match=r"rank 0 did not answer in time[^$]*in sleeps"):
        on_ranks(sleeps, world=1, timeout=2)
