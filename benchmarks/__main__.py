"""`python -m benchmarks`: check, measure, report. `--list` shows the cases, `--help` the rest."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gate, report, results
from benchmarks.case import Case, UnavailableError
from benchmarks.device import LOST, DeviceLostError, must_answer
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
    found.add_argument("--resume", action="store_true", help="go on where a run into the same folder was cut off")
    found.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="folder for results and report")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 if the gate is red, nothing matches or any case failed; 130 after an interrupt.

    3 if a case left the GPU unusable: a fresh process goes on behind it with `--resume`.
    """
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
    path, running = options.out / "results.jsonl", options.out / "running.json"
    try:
        earlier = _earlier(path) if options.resume else []
        if earlier:
            environment = earlier[0]["environment"]
        else:
            print(f"gate: {options.gate} ...", flush=True)
            vouched = gate.pass_gate(options.gate)
            environment = {**describe(device), "gate": vouched, "effort": options.effort, "ceilings": ceilings(device)}
    except (RuntimeError, ValueError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted before anything was measured", flush=True)
        return 130
    machine = f"{environment['device']}, torch {environment['torch']}"
    print(f"{environment['gate']}\n{machine}, {len(cases)} cases", flush=True)
    if not options.resume:
        running.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    if running.exists():        # the last process ended in the middle of this case
        died = json.loads(running.read_text(encoding="utf-8"))
        row = {**died, "device": device.type, "error": "the process ended while this was measured"}
        results.append(path, {**row, "environment": environment})
        earlier.append(row)
        running.unlink()
    done = {results.key(row) for row in earlier}
    status = int(any(_failed(row) for row in earlier))
    try:
        for number, case in enumerate(cases, 1):
            if (case.family, case.name) in done:
                continue
            if options.minutes is not None and time.perf_counter() - began > options.minutes * 60:
                print(f"out of time: {len(cases) - number + 1} cases were not measured", flush=True)
                break
            running.write_text(json.dumps({"family": case.family, "name": case.name}), encoding="utf-8")
            row = _attempt(case, device, options.effort)
            status = max(status, int(_failed(row)))
            results.append(path, {**row, "environment": environment})
            running.unlink()
            print(f"[{number}/{len(cases)}] {report.one_line(row)}", flush=True)
            if "error" in row and device.type == "cuda":
                must_answer(device)
                torch.cuda.empty_cache()
    except KeyboardInterrupt:
        print("interrupted; reporting what there is", flush=True)
        status = 130
    except DeviceLostError as error:
        print(error, file=sys.stderr)
        status = LOST
    if path.exists():
        print(f"\n{report.write(path, options.out)}\n{time.perf_counter() - began:.0f} s in all", flush=True)
    return status


def _earlier(path: Path) -> list[dict[str, Any]]:
    """The rows that a run before this one left."""
    if not path.exists():
        return []
    results.mend(path)
    return results.load(path) if path.stat().st_size else []


def _failed(row: dict[str, Any]) -> bool:
    return "error" in row and not row.get("skipped")


def _attempt(case: Case, device: torch.device, effort: float) -> dict[str, Any]:
    """The row of a case, or what went wrong: one failure must not cost the others."""
    row = {"family": case.family, "name": case.name, "device": device.type}
    try:
        return measure(case, device, effort=effort)
    except UnavailableError as error:
        return {**row, "error": str(error), "skipped": True}
    except Exception as error:
        return {**row, "error": f"{type(error).__name__}: {error}"[:500]}


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
