"""Interleaved timing: the sides of a case take turns, and are compared round by round.

Other load on the machine then affects all of them, and a ratio within one round is free of slow drift. The side that
goes first rotates. Two clocks: the host's, for what a user waits for, and CUDA events, for the kernels alone.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Run = Callable[[int], object]  # runs the job that many times

FLUSHED_BYTES = 256 << 20  # several times the largest second-level cache
CYCLES_PER_S = 2e9  # a fast GPU clock; on a slower GPU the wait is longer
MOST_HEAD_START = 0.05


@dataclass(frozen=True)
class Spread:
    """Median with 20 % and 80 % quantiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value. Quantiles are values that occurred (nearest rank)."""
        if not values:
            raise ValueError("no values to summarise")
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)])


@dataclass(frozen=True)
class Sample:
    """Seconds per call of one timed stretch."""

    wall: float  # until the device was done; on an `EventClock` the device's own time
    host: float  # until the call returned, which is `wall` on a CPU
    cpu: float  # CPU time of this process, all threads; other load disturbs it least


class Clock(Protocol):
    """Takes samples. `warm_up`: the number of samples to drop first."""

    @property
    def warm_up(self) -> int: ...
    def now(self) -> float: ...
    def take(self, run: Run, calls: int) -> Sample: ...


@dataclass(frozen=True)
class HostClock:
    """Time on the host, from an idle device to an idle device. Tests pass other clocks."""

    wall: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = time.process_time
    wait: Callable[[], object] = lambda: None  # blocks until the device is idle
    warm_up: int = 1

    def now(self) -> float:
        """Seconds, from any start."""
        return self.wall()

    def take(self, run: Run, calls: int) -> Sample:
        """One sample of `calls` calls in a row."""
        self.wait()
        cpu, start = self.cpu(), self.wall()
        run(calls)
        returned = self.wall()
        self.wait()
        end, cpu = self.wall(), self.cpu() - cpu
        return Sample((end - start) / calls, (returned - start) / calls, cpu / calls)


class EventClock:
    """A GPU's own time, by CUDA events around the calls.

    Every sample starts with cold caches, and with the device kept busy until the host has queued the calls, as after a
    backward pass. Otherwise a kernel of 0.1 ms would be timed as the Python that launches it, which is the sample's
    `host`. The previous sample says how long the host takes.
    """

    warm_up = 3  # the first compiles, the second measures the host

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host: dict[Run, float] = {}

    def now(self) -> float:
        """Seconds on the host, from any start."""
        return time.perf_counter()

    def take(self, run: Run, calls: int) -> Sample:
        """One sample of `calls` calls in a row."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        # Read, not written: write-back of dirty lines would fall into the timed interval.
        _flushed(self.device).sum()
        head_start = 1.5 * self._host.get(run, 0.0) + 1e-4
        torch.cuda._sleep(int(min(head_start, MOST_HEAD_START) * CYCLES_PER_S))
        before.record()
        cpu, start = time.process_time(), time.perf_counter()
        run(calls)
        host = time.perf_counter() - start
        cpu = time.process_time() - cpu
        after.record()
        torch.cuda.synchronize(self.device)
        self._host[run] = host
        return Sample(before.elapsed_time(after) / 1e3 / calls, host / calls, cpu / calls)


@functools.cache
def _flushed(device: torch.device) -> torch.Tensor:
    return torch.zeros(FLUSHED_BYTES // 4, device=device)


def clock_for(device: torch.device, *, events: bool = False) -> Clock:
    """Return the clock for a device: a GPU's own with `events`, else the host's. Elsewhere there is only the host's."""
    if device.type != "cuda":
        return HostClock()
    return EventClock(device) if events else HostClock(wait=lambda: torch.cuda.synchronize(device))


def calls_for(run: Run, seconds: float, clock: Clock) -> int:
    """Return the number of calls in a sample of at least `seconds`: a power of two, by doubling."""
    calls = 1
    while clock.take(run, calls).wall * calls < seconds and calls < 1 << 20:
        calls *= 2
    return calls


def in_turns(
    runs: Mapping[str, Run],
    clock: Clock,
    *,
    calls: int = 1,
    seconds: float,
    rounds: tuple[int, int] = (5, 200),
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, list[Sample]]:
    """Return samples of every run, equally many of each: at least `rounds[0]`, at most `rounds[1]`, as `seconds` allow.

    `before[name]` is called, untimed, ahead of every sample of that run.
    """
    least, most = rounds
    names = list(runs)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    deadline = clock.now() + seconds
    for turn in range(most):
        if turn >= least and clock.now() >= deadline:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if before is not None and name in before:
                before[name]()
            samples[name].append(clock.take(runs[name], calls))
    return samples


def ratios(ours: Sequence[Sample], theirs: Sequence[Sample], clock: str = "wall") -> Spread:
    """Ours over theirs, round by round; below 1 ours is faster. `clock` is a field of `Sample`.

    Raises `ValueError` if there are not equally many, because then rounds do not match.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} samples and {len(theirs)}; ratios need one of each per round")
    return Spread.of([getattr(a, clock) / max(getattr(b, clock), 1e-12) for a, b in zip(ours, theirs, strict=True)])
