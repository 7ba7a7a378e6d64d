"""Times of pairs: two ways of doing one job, run in turn, compared pair by pair."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    """One run: device and host milliseconds."""

    device_ms: float
    host_ms: float


def run_once(job: Callable[[], object], device: torch.device) -> Sample:
    """Device time by events around the call; host time until the call returned."""
    if device.type != "cuda":
        start = time.perf_counter()
        job()
        elapsed = (time.perf_counter() - start) * 1e3
        return Sample(elapsed, elapsed)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    before.record()
    job()
    after.record()
    host = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize(device)
    return Sample(before.elapsed_time(after), host)


def interleaved(
    jobs: dict[str, Callable[[], object]], device: torch.device, repeats: int, warmup: int, seconds: float
) -> dict[str, list[Sample]]:
    """Samples of every job, taken in turn so that drifts hit all alike; stops early when `seconds` are over."""
    for _ in range(warmup):
        for job in jobs.values():
            job()
    samples: dict[str, list[Sample]] = {name: [] for name in jobs}
    deadline = time.perf_counter() + seconds
    for i in range(repeats):
        if i >= 3 and time.perf_counter() > deadline:
            break
        for name, job in jobs.items():
            samples[name].append(run_once(job, device))
    return samples


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20 % and 80 % quantile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)]


def ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> tuple[float, float, float]:
    """Median and quantiles of ours / theirs in device time, pair by pair."""
    return quantiles([a.device_ms / b.device_ms for a, b in zip(ours, theirs, strict=True)])


def launches(job: Callable[[], object], device: torch.device) -> int | None:
    """Kernels and copies that one call puts on the device; None where the profiler cannot tell."""
    if device.type != "cuda":
        return None
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            job()
            torch.cuda.synchronize(device)
        return sum(
            1 for event in profile.events() or () if event.device_type == torch.autograd.DeviceType.CUDA
        )
    except Exception:  # a machine without a working profiler still has times to give
        return None
