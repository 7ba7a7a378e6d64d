"""From a case to a row of results, and what is counted on the way."""

import pytest
import torch

from benchmarks import counts, measure, regions, trainer
from benchmarks.case import AMPKIT, KEPT, SAME_LIST, TORCH, WrongAnswerError
from benchmarks.environment import describe
from benchmarks.scaling import Scaling
from tests.benchmarks.helpers import CPU, TINY, sleepy_case, tiny_case


def test_copies_and_peaks_are_counted():
    """Two casts, of which the second lives on; a tensor of 4000 bytes that dies before them."""
    kept = []

    def job() -> None:
        torch.empty(1000)
        kept.append(torch.ones(250).bfloat16().double())

    job()
    assert counts.peak_and_copies(job, CPU) == {"peak_bytes": 4000, "copies": 2}
    assert counts.highest_sum([5, 10, -15, 8]) == 15
    assert counts.launches(job, CPU) is None


def test_weight_casts_are_counted():
    sides = regions.WeightCasts(name="", weights=3).sides(CPU)
    for side in sides.values():
        side.run(1)
    assert {name: side.facts()["casts"] for name, side in sides.items()} == {TORCH: 3, SAME_LIST: 3, KEPT: 0}


def test_operators_and_regions_run_in_every_way():
    for case in regions.cases():
        if not isinstance(case, regions.WeightCasts):
            for side in case.sides(CPU).values():
                side.run(2)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("job", ["unscale", "clip", "clip + AdamW", "python"])
def test_scalers_agree_and_disagreement_is_seen(job: str):
    case = Scaling(name="tiny", job=job, tensors=3, elements=50)
    sides = case.sides(CPU)
    case.check(sides)
    if job == "python":
        return
    right = sides[AMPKIT].run

    def wrong(calls: int) -> None:
        right(calls)
        for tensor in sides[AMPKIT].result():
            tensor.add_(1e-3)

    sides[AMPKIT].run = wrong
    with pytest.raises(WrongAnswerError, match=r"tiny: ampkit left other values than torch\.amp"):
        case.check(sides)


def test_a_training_case_whose_losses_differ_is_not_timed():
    case = tiny_case(trainer.Variant(), TINY["digits"])
    sides = case.sides(CPU)
    sides[SAME_LIST].result = lambda: [sides[TORCH].result()[0] + 1e-6]
    with pytest.raises(WrongAnswerError, match="after 3 steps the loss of ampkit, torch's list is"):
        case.check(sides)


def test_a_row_says_what_was_found():
    case, clock = sleepy_case(seconds=20.0)
    row = measure.measure(case, CPU, clock=clock)
    half = {"median": 0.5, "low": 0.5, "high": 0.5}
    assert row["rounds"] == 7
    assert row["sides"][AMPKIT]["ratio"] == row["sides"][AMPKIT]["cpu_ratio"] == half
    assert row["sides"][TORCH]["wall"]["median"] == 2.0
    assert row["sides"][AMPKIT]["facts"] == {"casts": 3}
    assert row["aims"] == [{"side": AMPKIT, "limit": 0.4, "base": TORCH, "ratio": half}]
    assert row["work"] == {"flops": 1e9, "bytes": 1e9, "model": "made up"}
    with pytest.raises(ValueError, match=r"compared with 'nobody', which is none of torch\.amp, ampkit"):
        measure.measure(sleepy_case(base="nobody")[0], CPU, clock=clock)


def test_nothing_but_python_and_torch_is_needed_to_say_where_one_is(monkeypatch: pytest.MonkeyPatch):
    """A bare machine need not have git."""
    monkeypatch.setenv("PATH", "")
    assert describe(CPU)["commit"] is None
