"""`python -m benchmarks`: check, measure, report. `--list` shows the cases, `--help` the rest."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gate, report, results
from benchmarks.case import Case
from benchmarks.environment import ceilings, describe
from benchmarks.measure import measure
from benchmarks.registry import choose


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m benchmarks", description="ampkit beside torch.amp, pair by pair")
    found.add_argument("patterns", nargs="*", help="cases by shell pattern: 'training/*', '*/char-GPT*'")
    found.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    found.add_argument("--list", action="store_true", help="name the cases and stop")
    found.add_argument("--everything", action="store_true", help="also the cases that the default run leaves out")
    found.add_argument("--large-first", action="store_true", help="begin with the last case, where time is short")
    found.add_argument("--gate", choices=gate.GATES, default="quick", help="tests to pass first (default: quick)")
    found.add_argument("--effort", type=float, default=1.0, help="stretch the time per case (default: 1)")
    found.add_argument("--minutes", type=float, help="begin no case after this long")
    found.add_argument("--threads", type=int, default=1, help="torch threads on the CPU (default: 1)")
    found.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="folder for results and report")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 if the gate is red, nothing matches or any case failed; 130 after an interrupt."""
    options = parser().parse_args(argv)
    try:
        cases = choose(options.device, options.patterns, everything=options.everything)
    except ValueError as error:
        return _fail(str(error))
    if options.large_first:
        cases.reverse()
    if options.list:
        for case in cases:
            print(f"{case.family}/{case.name}")
        return 0
    if options.effort <= 0 or options.threads < 1:
        return _fail("--effort and --threads must be above 0")
    if options.device == "cuda" and not torch.cuda.is_available():
        return _fail(f"no CUDA device is available to torch {torch.__version__}; use --device cpu")
    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return _fail(f"--out: cannot write into {options.out} ({error.strerror})")
    device = torch.device(options.device)
    try:
        print(f"gate: {options.gate} ...", flush=True)
        vouched = gate.pass_gate(options.gate)
        environment = {**describe(device), "gate": vouched, "effort": options.effort, "ceilings": ceilings(device)}
    except RuntimeError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted before anything was measured", flush=True)
        return 130
    print(f"{vouched}\n{environment['device']}, torch {environment['torch']}, {len(cases)} cases", flush=True)
    path = options.out / "results.jsonl"
    path.unlink(missing_ok=True)
    status = 0
    try:
        for number, case in enumerate(cases, 1):
            if options.minutes is not None and time.perf_counter() - began > options.minutes * 60:
                print(f"out of time: {len(cases) - number + 1} cases were not measured", flush=True)
                break
            row = _attempt(case, device, options.effort)
            status = max(status, int("error" in row))
            results.append(path, {**row, "environment": environment})
            print(f"[{number}/{len(cases)}] {report.one_line(row)}", flush=True)
    except KeyboardInterrupt:
        print("interrupted; reporting what there is", flush=True)
        status = 130
    if path.exists():
        print(f"\n{report.write(path, options.out)}\n{time.perf_counter() - began:.0f} s in all", flush=True)
    return status


def _attempt(case: Case, device: torch.device, effort: float) -> dict[str, Any]:
    """The row of a case, or what went wrong: one failure must not cost the others."""
    try:
        return measure(case, device, effort=effort)
    except Exception as error:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        text = f"{type(error).__name__}: {error}"
        return {"family": case.family, "name": case.name, "device": device.type, "error": text[:500]}


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
