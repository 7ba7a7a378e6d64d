"""What is counted rather than timed: copies, kernel launches, peak memory. Extra runs, untimed.

Counted by torch's profiler; a dispatch mode would keep weight casts from being cached.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Job = Callable[[], object]


def peak_and_copies(job: Job, device: torch.device) -> dict[str, int]:
    """`peak_bytes`: peak memory of one call above what was allocated; `copies`: its `aten::copy_` calls (casts)."""
    gc.collect()
    held = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True, profile_memory=device.type == "cpu") as recorded:
        job()
    events = _events(recorded)
    copies = sum(1 for event in events if event.name() == "aten::copy_")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return {"peak_bytes": torch.cuda.max_memory_allocated(device) - held, "copies": copies}
    moves = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    return {"peak_bytes": highest_sum(event.nbytes() for event in moves), "copies": copies}


def highest_sum(moves: Any) -> int:
    """The highest running sum of allocations (positive) and frees (negative), in the order they happened."""
    held = peak = 0
    for n_bytes in moves:
        held += n_bytes
        peak = max(peak, held)
    return peak


def launches(job: Job, device: torch.device) -> int | None:
    """Kernels, copies and fills that one call launches; None on a CPU or if the profiler sees no GPU."""
    if device.type != "cuda":
        return None
    try:
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
            job()
            torch.cuda.synchronize(device)
        events = _events(recorded)
    except Exception:  # the times are worth having without this count
        return None
    return sum(
        1 for event in events if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ) or None


def _events(recorded: profile) -> list[Any]:
    """The raw events: `key_averages` would take seconds for a long step."""
    if recorded.profiler is None:
        raise RuntimeError("the profiler recorded nothing")
    results: Any = recorded.profiler.kineto_results
    return results.events()
