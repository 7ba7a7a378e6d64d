"""The family that times the host alone: both sides do all of their Python, and nothing of what a device would do."""

from typing import Any
from unittest import mock

import pytest

from benchmarks import host
from benchmarks.case import AMPKIT, TORCH_OPERATORS
from tests.benchmarks.helpers import CPU

pytest.importorskip("triton")


@pytest.mark.parametrize(("job", "ours", "theirs"), [("AdamW step", 2, 2), ("SGD step", 1, 1), ("unscale", 1, 1)])
def test_both_sides_launch_what_they_launch_on_a_gpu(
    job: str, ours: int, theirs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time: the first makes state and tables."""
    launched: list[Any] = []
    monkeypatch.setattr(host, "nothing", lambda *args, **options: launched.append((args, options)))
    sides = host.Host(name=job, job=job, count=3).sides(CPU)
    for name, expected in ((AMPKIT, ours), (TORCH_OPERATORS, theirs)):
        sides[name].run(1)
        launched.clear()
        sides[name].run(1)
        assert len(launched) == expected, name


def test_moving_gradients_move() -> None:
    from ampkit_kernels.triton_ops import pointer_table

    sent = []
    with mock.patch.object(pointer_table, "send", lambda values, destination: sent.append(len(values))):
        for moving, expected in ((False, []), (True, [3, 3])):
            run = host.Host(name="step", job="AdamW step", count=3, moving=moving).sides(CPU)[AMPKIT].run
            run(2)
            sent.clear()
            run(2)
            assert sent == expected
