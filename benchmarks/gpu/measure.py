"""Measure every job on every list and write rows of JSON as they come, so that an interruption loses nothing."""

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.counts import launches

from . import byte_model
from .device import must_answer
from .jobs import Comparison, Material, comparisons
from .lists import LISTS, REHEARSAL
from .report import load
from .timing import interleaved, quantiles, ratio

COPY_BYTES = 4 << 30


def environment(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    commit = ""
    if shutil.which("git"):  # which a bare GPU machine need not have
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU (rehearsal)",
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else None,
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit or None,
    }


def copy_rate(device: torch.device, n_bytes: int, repeats: int) -> float:
    """GB/s of a large device-to-device copy, bytes read and written: the ceiling for everything here."""
    source = torch.randn(n_bytes // 4, device=device)
    destination = torch.empty_like(source)
    warm = time.perf_counter()
    while device.type == "cuda" and time.perf_counter() - warm < 1.0:  # an idle device has lowered its clocks
        destination.copy_(source)
        torch.cuda.synchronize(device)
    samples = interleaved({"copy": lambda: destination.copy_(source)}, device, repeats, 3, 5.0)["copy"]
    return 2 * n_bytes / quantiles([s.device_ms for s in samples])[0] / 1e6


def row(
    name: str, dtype: str, comparison: Comparison, device: torch.device, rate: float, repeats: int
) -> dict:
    """Times, ratios, bandwidths and launch counts of one comparison."""
    samples = interleaved(comparison.sides, device, repeats, warmup=3, seconds=6.0)
    result: dict[str, Any] = {"list": name, "dtype": dtype, "job": comparison.job, "sides": {}}
    result["elements"] = comparison.elements
    result["repeats"] = len(samples["ampkit"])
    scale = 1.0 if dtype == "float32" else 0.5
    for side, taken in samples.items():
        device_ms, low, high = quantiles([s.device_ms for s in taken])
        entry: dict[str, Any] = {"device_ms": device_ms, "low": low, "high": high}
        entry["host_ms"] = quantiles([s.host_ms for s in taken])[0]
        model = byte_model.OURS if side == "ampkit" else byte_model.TORCH
        per_element = model[comparison.job].total
        if side == "torch foreach":
            per_element = byte_model.TORCH_FOREACH_CLIP_ADAMW
        entry["bytes_per_element"] = per_element * scale
        entry["gb_per_s"] = per_element * scale * comparison.elements / device_ms / 1e6
        entry["of_copy_rate"] = entry["gb_per_s"] / rate
        entry["launches"] = launches(comparison.sides[side], device)
        if side != "ampkit":
            entry["ratio"], entry["ratio_low"], entry["ratio_high"] = ratio(samples["ampkit"], taken)
        result["sides"][side] = entry
    return result


def measure(out: Path, device: torch.device, rehearsal: bool, seconds: float, resume: bool = False) -> None:
    """Measure until done or out of time; rows go to `out/rows.jsonl`, the environment to `out/environment.json`.

    With `resume`, lists that have a row already, and one that the process died at, are left as they are. Raises
    `DeviceLostError`, everything written, where a job has left the device unusable.
    """
    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    repeats = 3 if rehearsal else 15
    facts_file, rows_file = out / "environment.json", out / "rows.jsonl"
    if not (resume and facts_file.exists()):
        rate = copy_rate(device, 1 << 20 if rehearsal else COPY_BYTES, repeats)
        facts_file.write_text(
            json.dumps({**environment(device), "copy_gb_per_s": rate, "rehearsal": rehearsal}, indent=2)
        )
        rows_file.unlink(missing_ok=True)
    facts = json.loads(facts_file.read_text())
    rate = facts["copy_gb_per_s"]
    print(f"{facts['device']}, torch {facts['torch']}, copy {rate:.0f} GB/s", flush=True)
    done = {(taken["list"], taken["dtype"]) for taken in load(rows_file)} | {tuple(facts.get("died_at", ()))}
    impl = "reference" if rehearsal else "triton"
    with rows_file.open("a") as rows:

        def write(taken: dict[str, Any]) -> None:
            rows.write(json.dumps(taken) + "\n")
            rows.flush()

        for name, shapes in (REHEARSAL if rehearsal else LISTS).items():
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                label = str(dtype).removeprefix("torch.")
                if (name, label) in done:
                    continue
                if time.perf_counter() - started > seconds:
                    print(f"out of time before {name} {label}", flush=True)
                    return
                facts_file.write_text(json.dumps({**facts, "died_at": [name, label]}, indent=2))
                try:
                    material = Material(shapes(), device, dtype)
                    for comparison in comparisons(material, impl):
                        taken = row(name, label, comparison, device, rate, repeats)
                        write(taken)
                        ours = taken["sides"]["ampkit"]
                        print(f"{name:12s} {label:9s}{taken['job']:16s}{ours['device_ms']:9.3f} ms", flush=True)
                except Exception as error:  # one list that fails must not cost the others
                    write({"list": name, "dtype": label, "error": repr(error)[:500]})
                    print(f"{name} {label}: {error!r}", flush=True)
                    must_answer(device)
                facts_file.write_text(json.dumps(facts, indent=2))
                material = comparison = None
                if device.type == "cuda":
                    torch.cuda.empty_cache()
