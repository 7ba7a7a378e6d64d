"""Counts next to the times: Python calls, copies, kernel launches, peak memory. Extra runs, untimed.

Copies, launches and memory are counted by torch's profiler; a dispatch mode would keep weight casts from being cached.
`python -m benchmarks.counts` prints the Python calls that run in every training step, ampkit's and torch.amp's:
unlike times, they do not depend on how busy the machine is. `--trace NAME` lists the functions.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import ampkit.optim
import ampkit_kernels
from ampkit import GradScaler, Policy, autocast

Job = Callable[[], object]
OWN = tuple(f"{Path(module.__path__[0])}/" for module in (ampkit, ampkit_kernels, torch.amp))
PARAMETERS = 1


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
    """Return the highest running sum of allocations (positive) and frees (negative), in the order they happened."""
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
    return (
        sum(1 for event in events if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()) or None
    )


def _events(recorded: profile) -> list[Any]:
    """Return the raw events: `key_averages` would take seconds for a long step."""
    if recorded.profiler is None:
        raise RuntimeError("the profiler recorded nothing")
    results: Any = recorded.profiler.kineto_results
    return results.events()


# --- Python calls


class Calls(NamedTuple):
    """Functions of Python that a job calls: `own` are those of ampkit, its kernels and torch.amp."""

    own: int
    all: int


class Counted(NamedTuple):
    """A job, and a function that prepares it before each call, uncounted."""

    job: Job
    before: Job = lambda: None


def trace(counted: Counted) -> list[str]:
    """`file:line function` of every Python function that the job calls when it is warm, in order."""
    lines: list[str] = []

    def saw(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            lines.append(f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno} {frame.f_code.co_qualname}")

    for warm in (False,) * 4 + (True,):
        counted.before()
        sys.setprofile(saw if warm else None)
        try:
            counted.job()
        finally:
            sys.setprofile(None)
    return lines


def python_calls(name: str, ours: bool) -> Calls:
    """Return the number of Python functions that a job of `JOBS` calls once it is warm."""
    with JOBS[name](ours) as counted:
        lines = trace(counted)
    return Calls(sum(line.startswith(OWN) for line in lines), len(lines))


def table() -> dict[str, list[str]]:
    """For each job the calls with ampkit and with torch.amp, as "own / all"."""
    return {
        name: [f"{calls.own} / {calls.all}" for calls in (python_calls(name, True), python_calls(name, False))]
        for name in JOBS
    }


@contextlib.contextmanager
def _region(ours: bool, same_list: bool = False) -> Iterator[Counted]:
    options = {"policy": Policy.torch("cpu")} if ours and same_list else {}
    make: Any = autocast if ours else torch.autocast
    if ours and same_list:
        with autocast("cpu", policy=Policy.torch("cpu")):  # a policy that is equal, and another object
            pass

    def job() -> None:
        with make("cpu", **options):
            pass

    yield Counted(job)


@contextlib.contextmanager
def _product(ours: bool) -> Iterator[Counted]:
    x, weight = torch.ones(2, 2), torch.nn.Parameter(torch.ones(2, 2))
    with autocast("cpu") if ours else torch.autocast("cpu"):
        yield Counted(lambda: x @ weight)


@contextlib.contextmanager
def _scaler(job: str, ours: bool) -> Iterator[Counted]:
    """Run an iteration with torch's AdamW up to the job: scale, clip, step, update."""
    params = _parameters()
    optimizer = torch.optim.AdamW(params)
    scaler: Any = (GradScaler if ours else torch.amp.GradScaler)("cpu")
    loss = torch.ones((), requires_grad=True)

    def clip() -> None:
        if ours:
            scaler.clip_grad_norm_(optimizer, 1.0)
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 1.0)

    def before() -> None:
        if scaler._scale is not None and job != "update":
            if job != "step":  # otherwise `step` ran as the job
                scaler.step(optimizer)
            scaler.update()
        for param in params:
            param.grad = torch.ones(3)
        scaler.scale(loss)
        if job == "update":
            scaler.step(optimizer)

    jobs = {"step": lambda: scaler.step(optimizer), "update": scaler.update, "clip": clip}
    yield Counted(jobs[job], before)


@contextlib.contextmanager
def _optimizer(ours: bool) -> Iterator[Counted]:
    yield Counted((ampkit.optim.AdamW(_parameters()) if ours else torch.optim.AdamW(_parameters(), fused=True)).step)


def _parameters() -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(PARAMETERS)]
    for param in params:
        param.grad = torch.ones(3)
    return params


JOBS: dict[str, Callable[[bool], contextlib.AbstractContextManager[Counted]]] = {
    "region": _region,
    "region, torch's list": functools.partial(_region, same_list=True),
    "x @ weight": _product,
    "scaler.step, torch's AdamW": functools.partial(_scaler, "step"),
    "scaler.update": functools.partial(_scaler, "update"),
    "unscale, check and clip": functools.partial(_scaler, "clip"),
    "ampkit.optim.AdamW.step and torch's fused": _optimizer,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or the functions that one job calls."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counts", description="Python calls of hot code")
    parser.add_argument("--trace", choices=JOBS, help="list the functions that a job calls in ampkit")
    chosen = parser.parse_args(argv).trace
    if chosen is not None:
        with JOBS[chosen](True) as counted:
            print("\n".join(trace(counted)))
        return 0
    print(f"Python calls, own / all; {PARAMETERS} parameter; torch {torch.__version__}\n")
    print("| job | ampkit | torch |\n| --- | --- | --- |")
    for name, (ours, theirs) in table().items():
        print(f"| {name} | {ours} | {theirs} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
