"""Taking times, on clocks that say what they are told."""

import time

import pytest
import torch

from benchmarks import timing
from benchmarks.timing import HostClock, Sample, Spread
from tests.benchmarks.helpers import FakeClock


def test_a_spread_is_the_median_and_values_that_occurred():
    assert Spread.of([5, 1, 2, 4, 3]) == Spread(3, 2, 4)
    assert Spread.of([1.0, 2.0]) == Spread(1.5, 1.0, 2.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
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
    clock, order = FakeClock(), []

    def side(name: str, seconds: float) -> timing.Run:
        def run(calls: int) -> None:
            order.append(name)
            clock.now += seconds * calls

        return run

    runs = {"a": side("a", 1.0), "b": side("b", 2.0), "c": side("c", 3.0)}
    readied: list[str] = []
    found = timing.in_turns(
        runs, HostClock(clock, clock), calls=10, seconds=1e9, rounds=(1, 3), before={"b": lambda: readied.append("b")}
    )
    assert "".join(order) == "abcbcacab"
    assert readied == ["b"] * 3
    assert {name: [sample.wall for sample in samples] for name, samples in found.items()} == {
        "a": [1.0] * 3, "b": [2.0] * 3, "c": [3.0] * 3,
    }


def test_the_time_given_bounds_the_rounds_but_never_below_the_least():
    clock = FakeClock()
    clocks = HostClock(clock, clock)
    count = lambda seconds, rounds: len(timing.in_turns(  # noqa: E731
        {"a": clock.job(1.0), "b": clock.job(1.0)}, clocks, seconds=seconds, rounds=rounds)["a"])
    assert count(0.0, (4, 100)) == 4
    assert count(20.0, (4, 100)) == 10
    assert count(1e9, (4, 100)) == 100


def test_host_time_ends_when_the_call_returns_and_wall_time_when_the_device_is_done():
    clock = FakeClock()

    def wait() -> None:
        clock.now += 5.0

    sample = HostClock(clock, lambda: 0.0, wait).take(clock.job(1.0), 2)
    assert sample == Sample(wall=3.5, host=1.0, cpu=0.0)


def test_calls_double_until_a_sample_is_long_enough():
    clock = FakeClock()
    assert timing.calls_for(clock.job(1e-4), 1e-3, HostClock(clock, clock)) == 16
    assert timing.calls_for(clock.job(1.0), 1e-3, HostClock(clock, clock)) == 1


def test_device_time_starts_when_the_host_has_queued_the_calls(monkeypatch: pytest.MonkeyPatch):
    """Caches emptied by reading, the device put to sleep for longer than the host takes, the clock, then the calls."""
    done: list[str] = []
    slept: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def elapsed_time(self, end: "Event") -> float:
            return 1.0

    class Cache:
        def sum(self) -> None:
            done.append("flush")

    monkeypatch.setattr(timing, "_flushed", lambda device: Cache())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: (slept.append(cycles), done.append("sleep")))
    clock = timing.clock_for(torch.device("cuda"), events=True)
    runs = {"it": lambda calls: (done.append("job"), time.sleep(0.01))}
    clock.take(runs["it"], 1)
    (sample,) = timing.in_turns(runs, clock, seconds=0.0, rounds=(1, 1))["it"]
    assert done == ["wait", "flush", "sleep", "event", "job", "event", "wait"] * 2
    assert slept[0] == pytest.approx(1e-4 * timing.CYCLES_PER_S)
    assert slept[1] > 0.01 * timing.CYCLES_PER_S
    assert sample.wall == 1e-3
    assert sample.host >= 0.01


def test_a_device_without_events_is_timed_on_the_host():
    assert isinstance(timing.clock_for(torch.device("cpu"), events=True), HostClock)
    assert isinstance(timing.clock_for(torch.device("cuda")), HostClock)
