"""What figures depend on: machine, versions, commit, load, and the best rates that the machine reaches."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import Spread, clock_for, in_turns

ROOT = Path(__file__).resolve().parents[1]


def describe(device: torch.device) -> dict[str, Any]:
    """The facts that every row of results carries."""
    on_gpu = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "device_type": device.type,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda if on_gpu else None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--", "ampkit", "kernels", "benchmarks", ":!benchmarks/results")),
        "load_at_start": load(),
    }


def _processor() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """The output of git; None outside a checkout."""
    try:
        ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


def load() -> float | None:
    """The system's load average over a minute, where it has one."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def ceilings(device: torch.device) -> dict[str, float]:
    """The best rates of this machine, measured now: memory GB/s (read and written), matrix products in GFLOP/s.

    Memory is the better of a copy and an update in place, both larger than the caches: on a CPU a copy first reads the
    lines that it overwrites.
    """
    on_gpu = device.type == "cuda"
    size, side = (1 << 30, 8192) if on_gpu else (1 << 28, 1024)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    left = {dtype: torch.randn(side, side, device=device).to(dtype) for dtype in (torch.float32, torch.bfloat16)}

    def copy(calls: int) -> None:
        for _ in range(calls):
            target.copy_(source)

    def product(matrix: torch.Tensor, calls: int) -> None:
        for _ in range(calls):
            torch.mm(matrix, matrix)

    def update(calls: int) -> None:
        for _ in range(calls):
            source.add_(1.0)

    runs: dict[str, Any] = {"copy": copy, "update": update}
    for dtype, matrix in left.items():
        runs[str(dtype)] = lambda calls, matrix=matrix: product(matrix, calls)
    for run in runs.values():
        run(2)
    warm = time.perf_counter()
    while on_gpu and time.perf_counter() - warm < 1.0:      # an idle device lowers its clocks
        copy(1)
        torch.cuda.synchronize(device)
    taken = in_turns(runs, clock_for(device, events=True), seconds=2.0, rounds=(5, 30))
    best = {name: Spread.of([sample.wall for sample in samples]).median for name, samples in taken.items()}
    return {
        "memory_gb_per_s": 2 * size / min(best["copy"], best["update"]) / 1e9,
        "float32_gflop_per_s": 2 * side**3 / best["torch.float32"] / 1e9,
        "bfloat16_gflop_per_s": 2 * side**3 / best["torch.bfloat16"] / 1e9,
    }
