"""Times of pairs: two ways of doing one job, run in turn, compared pair by pair.

Device time is the device's own: every run starts with caches that hold none of its data, and with the device kept busy
until the host has queued the whole job, as it is after a backward pass. Otherwise a kernel of a tenth of a millisecond
would be timed as the Python that launches it, which is `host_ms`.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

FLUSHED_BYTES = 256 << 20  # several times the largest second-level cache
CYCLES_PER_MS = 2_000_000  # of the fastest clock; a slower one only waits longer
MOST_HEAD_START_MS = 50.0


@dataclass(frozen=True)
class Sample:
    """One run: device and host milliseconds."""

    device_ms: float
    host_ms: float


@functools.cache
def _flushed(device: torch.device) -> torch.Tensor:
    return torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)


def run_once(job: Callable[[], object], device: torch.device, head_start_ms: float = 0.0) -> Sample:
    """Device time by events around the call, which the device reaches `head_start_ms` late; host time of the call."""
    if device.type != "cuda":
        start = time.perf_counter()
        job()
        elapsed = (time.perf_counter() - start) * 1e3
        return Sample(elapsed, elapsed)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    _flushed(device).zero_()
    torch.cuda._sleep(int(min(head_start_ms, MOST_HEAD_START_MS) * CYCLES_PER_MS))
    before.record()
    start = time.perf_counter()
    job()
    host = (time.perf_counter() - start) * 1e3
    after.record()
    torch.cuda.synchronize(device)
    return Sample(before.elapsed_time(after), host)


def interleaved(
    jobs: dict[str, Callable[[], object]], device: torch.device, repeats: int, warmup: int, seconds: float
) -> dict[str, list[Sample]]:
    """Samples of every job, taken in turn so that drifts hit all alike; stops early when `seconds` are over."""
    head_starts = dict.fromkeys(jobs, 0.0)
    for _ in range(warmup):
        for name, job in jobs.items():
            head_starts[name] = 1.5 * run_once(job, device).host_ms + 0.1
    samples: dict[str, list[Sample]] = {name: [] for name in jobs}
    deadline = time.perf_counter() + seconds
    for i in range(repeats):
        if i >= 3 and time.perf_counter() > deadline:
            break
        for name, job in jobs.items():
            samples[name].append(run_once(job, device, head_starts[name]))
    return samples


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20 % and 80 % quantile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)]


def ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> tuple[float, float, float]:
    """Median and quantiles of ours / theirs in device time, pair by pair."""
    return quantiles([a.device_ms / b.device_ms for a, b in zip(ours, theirs, strict=True)])
