"""The environment of a measurement: machine, versions, commit, load."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def describe(device: torch.device) -> dict[str, Any]:
    """Return the environment that is saved with every row."""
    on_gpu = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "device_type": device.type,
        "instructions": instruction_set(),
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


def instruction_set() -> str:
    """Return the vector instructions that torch uses on this CPU, and whether it multiplies bfloat16 natively."""
    capability = torch.backends.cpu.get_cpu_capability()
    if torch.cpu._is_amx_tile_supported():
        return f"{capability}, AMX"
    return f"{capability}, BF16" if torch.cpu._is_avx512_bf16_supported() else capability


def _processor() -> str:
    """Return the processor's name as the system gives it."""
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
    """Return the output of git; None outside a checkout."""
    try:
        ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


def load() -> float | None:
    """Return the system's load average over a minute, where it has one."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
