"""Timing, on clocks that the test sets; from a case to a row of results; what is counted."""


import pytest
import torch

from benchmarks import counts, measure, regions, timing
from benchmarks.case import AMPKIT, KEPT, SAME_LIST, TORCH, WrongAnswerError
from benchmarks.environment import describe
from benchmarks.scaling import Scaling
from benchmarks.timing import HostClock, Sample, Spread
from tests.benchmarks.helpers import CPU, FakeClock, sleepy_case


def test_a_spread_is_the_median_and_values_that_occurred():
    assert Spread.of([5, 1, 2, 4, 3]) == Spread(3, 2, 4)
    assert Spread.of([*range(101)]) == Spread(50, 20, 80)
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])


def test_ratios_are_taken_round_by_round():
    """The machine slows down tenfold halfway: medians of times would mislead, pairwise ratios do not."""
    theirs = [Sample(t, t, t) for t in (1.0, 1.0, 10.0, 10.0, 10.0)]
    ours = [Sample(t / 2, t / 2, t * 2) for t in (1.0, 1.0, 10.0, 10.0, 10.0)]
    assert timing.ratios(ours, theirs) == Spread(0.5, 0.5, 0.5)
    assert timing.ratios(ours, theirs, "cpu") == Spread(2.0, 2.0, 2.0)
    with pytest.raises(ValueError, match="5 samples beside 4"):
        timing.ratios(ours, theirs[1:])


def test_sides_take_turns_and_the_first_rotates():
    clock, order, readied = FakeClock(), [], []

    def side(name: str, seconds: float) -> timing.Run:
        def run(calls: int) -> None:
            order.append(name)
            clock.now += seconds * calls

        return run

    runs = {"a": side("a", 1.0), "b": side("b", 2.0), "c": side("c", 3.0)}
    found = timing.in_turns(
        runs, HostClock(clock, clock), calls=10, seconds=1e9, rounds=(1, 3), before={"b": lambda: readied.append("b")}
    )
    assert "".join(order) == "abcbcacab"
    assert readied == ["b"] * 3
    assert {name: [sample.wall for sample in samples] for name, samples in found.items()} == {
        "a": [1.0] * 3, "b": [2.0] * 3, "c": [3.0] * 3,
    }


def test_host_time_ends_when_the_call_returns_and_wall_time_when_the_device_is_done():
    clock = FakeClock()

    def wait() -> None:
        clock.now += 5.0

    sample = HostClock(clock, lambda: 0.0, wait).take(clock.job(1.0), 2)
    assert sample == Sample(wall=3.5, host=1.0, cpu=0.0)
    assert timing.calls_for(clock.job(1e-4), 1e-3, HostClock(clock, clock)) == 16
    assert isinstance(timing.clock_for(CPU, events=True), HostClock)


def test_a_row_says_what_was_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")      # a bare machine need not have git
    facts = describe(CPU)
    assert facts["commit"] is None
    assert {"device", "torch", "triton", "python", "threads", "dirty", "load_at_start"} <= facts.keys()
    case, clock = sleepy_case(seconds=20.0)
    row = measure.measure(case, CPU, clock=clock)
    half = {"median": 0.5, "low": 0.5, "high": 0.5}
    assert row["rounds"] == 7
    assert row["sides"][AMPKIT]["ratio"] == row["sides"][AMPKIT]["cpu_ratio"] == half
    assert row["sides"][TORCH]["wall"]["median"] == 2.0
    assert row["sides"][AMPKIT]["facts"] == {"casts": 3}
    assert row["aims"] == [{"side": AMPKIT, "limit": 0.4, "base": TORCH, "ratio": half}]
    with pytest.raises(ValueError, match=r"compared with 'absent', which is none of torch\.amp, ampkit"):
        measure.measure(sleepy_case(base="absent")[0], CPU, clock=clock)


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
    sides = regions.WeightCasts(name="", weights=3).sides(CPU)
    for side in sides.values():
        side.run(1)
    assert {name: side.facts()["casts"] for name, side in sides.items()} == {TORCH: 3, AMPKIT: 3, SAME_LIST: 3, KEPT: 0}


@pytest.mark.parametrize("job", ["unscale", "clip", "AdamW", "clip + AdamW", "python"])
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
