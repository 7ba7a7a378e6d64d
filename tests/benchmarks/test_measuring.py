"""From a case to a row of results, and what is counted on the way."""

import subprocess

import pytest
import torch

from benchmarks import counts, dispatch, measure, overhead, trainer, weights
from benchmarks.case import AMPKIT, SAME_LIST, TORCH, WrongAnswerError
from benchmarks.environment import Others, describe
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
    sides = weights.WeightCasts(name="", weights=3).sides(CPU)
    for side in sides.values():
        side.run(1)
    assert {name: side.facts()["casts"] for name, side in sides.items()} == {TORCH: 3, SAME_LIST: 3, weights.KEPT: 0}


@pytest.mark.parametrize("name", overhead.OPERATORS)
def test_operators_run_in_every_region(name: str):
    for side in overhead.Operator(name=name, operator=name).sides(CPU).values():
        side.run(2)
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("way", overhead.WAYS)
def test_regions_are_opened_in_every_way(way: str):
    for side in overhead.Entering(name=way, way=way).sides(CPU).values():
        side.run(2)
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
    elsewhere, clock = sleepy_case(seconds=20.0, in_process=False)
    found = measure.measure(elsewhere, CPU, clock=clock)
    assert found["sides"][AMPKIT]["cpu_ratio"] is None
    assert found["other_cores"] is None
    with pytest.raises(ValueError, match=r"compared with 'nobody', which is none of torch\.amp, ampkit"):
        measure.measure(sleepy_case(base="nobody")[0], CPU, clock=clock)


def test_other_programs_are_noticed():
    """A child that computes for a while is seen; our own computing is not."""
    others = Others()
    with others.watched(), subprocess.Popen(["python3", "-c", "for _ in range(20_000_000): pass"]) as child:
        child.wait()
    if others.cores is None:
        pytest.skip("this system does not say how busy it is")
    assert others.cores > 0.3


def test_nothing_but_python_and_torch_is_needed_to_say_where_one_is(monkeypatch: pytest.MonkeyPatch):
    """A bare machine need not have git."""
    monkeypatch.setenv("PATH", "")
    assert describe(CPU)["commit"] is None


@pytest.mark.parametrize("case", dispatch.cases(), ids=lambda case: case.name)
def test_every_design_runs_every_operator(case: dispatch.Dispatch):
    sides = case.sides(CPU)
    assert TORCH in sides
    for side in sides.values():
        side.run(2)
    assert torch._C._len_torch_dispatch_stack() == 0
