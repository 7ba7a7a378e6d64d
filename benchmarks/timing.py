"""Timing by turns: several ways of doing one job run one after another, again and again, compared round by round.

Whatever else the machine does then hits all of them, and a ratio taken within one round is free of slow drifts. Which
side goes first rotates, so none profits from its place.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Run = Callable[[int], object]       # runs the job that many times


@dataclass(frozen=True)
class Spread:
    """Median with 20 % and 80 % quantiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value. Quantiles are values that occurred (nearest rank)."""
        if not values:
            raise ValueError("no values to summarise")
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)])


@dataclass(frozen=True)
class Sample:
    """Seconds per call of one timed stretch."""

    wall: float     # until the device was done
    host: float     # until the call returned, which is `wall` on a CPU
    cpu: float      # of this process' processor time, all threads: what a busy machine disturbs least


@dataclass(frozen=True)
class Clocks:
    """Where times come from; tests put their own in."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time
    wait: Callable[[], object] = lambda: None       # blocks until the device is idle


def take(run: Run, calls: int, clocks: Clocks) -> Sample:
    """One sample of `calls` calls in a row."""
    clocks.wait()
    cpu, start = clocks.cpu(), clocks.wall()
    run(calls)
    returned = clocks.wall()
    clocks.wait()
    end, cpu = clocks.wall(), clocks.cpu() - cpu
    return Sample((end - start) / calls, (returned - start) / calls, cpu / calls)


def calls_for(run: Run, seconds: float, clocks: Clocks) -> int:
    """How many calls make a sample of at least `seconds`: a power of two, found by doubling."""
    calls = 1
    while take(run, calls, clocks).wall * calls < seconds and calls < 1 << 20:
        calls *= 2
    return calls


def in_turns(
    runs: Mapping[str, Run],
    clocks: Clocks,
    *,
    calls: int = 1,
    seconds: float,
    rounds: tuple[int, int] = (5, 200),
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, list[Sample]]:
    """Samples of every run, equally many of each: at least `rounds[0]`, at most `rounds[1]`, as `seconds` allow.

    `before[name]` is called, untimed, ahead of every sample of that run.
    """
    least, most = rounds
    names = list(runs)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    deadline = clocks.wall() + seconds
    for turn in range(most):
        if turn >= least and clocks.wall() >= deadline:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if before is not None and name in before:
                before[name]()
            samples[name].append(take(runs[name], calls, clocks))
    return samples


def ratios(ours: Sequence[Sample], theirs: Sequence[Sample], clock: str = "wall") -> Spread:
    """Ours over theirs, round by round; below 1 ours is faster. `clock` is a field of `Sample`.

    Raises `ValueError` if there are not equally many, because then rounds do not match.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} samples beside {len(theirs)}; ratios need one of each per round")
    return Spread.of([
        getattr(a, clock) / max(getattr(b, clock), 1e-12) for a, b in zip(ours, theirs, strict=True)
    ])
