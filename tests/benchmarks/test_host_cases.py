"""The family that times the host alone: both sides do all of their Python, and nothing of what a device would do."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch

import ampkit_kernels
from benchmarks import host
from benchmarks.case import AMPKIT, TORCH_OPERATORS, UnavailableError
from tests.benchmarks.helpers import CPU

pytest.importorskip("triton")


def test_every_case_runs_and_leaves_nothing_behind() -> None:
    before = torch._foreach_norm, torch._fused_adamw_, ampkit_kernels.backend
    for case in host.cases():
        small = dataclasses.replace(case, count=3, groups=min(case.groups, 3))
        for side in small.sides(CPU).values():
            side.run(2)
    assert before == (torch._foreach_norm, torch._fused_adamw_, ampkit_kernels.backend)
    with mock.patch.object(host, "find_spec", return_value=None), pytest.raises(UnavailableError, match="Triton"):
        host.Host(name="any", job="unscale", count=1).sides(CPU)


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
