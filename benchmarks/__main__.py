"""`python -m benchmarks`: run tests, measure cases, write a report. `--list` shows the cases, `--help` all options."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import counts, gate, report, results
from benchmarks.case import Case, UnavailableError
from benchmarks.device import LOST, DeviceLostError, must_answer
from benchmarks.environment import describe
from benchmarks.measure import measure
from benchmarks.registry import choose
from benchmarks.results import Row

RESULTS, RUNNING = "results.jsonl", "running.json"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    command = argparse.ArgumentParser(prog="python -m benchmarks", description="ampkit and torch.amp, pair by pair")
    command.add_argument("patterns", nargs="*", help="cases by shell pattern: 'training/*', '*/char-GPT*'")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--list", action="store_true", help="name the cases and stop")
    command.add_argument("--large-first", action="store_true", help="begin with the last case, where time is short")
    command.add_argument("--no-gate", action="store_true", help="measure without running tests first")
    command.add_argument("--effort", type=float, default=1.0, help="factor on the time per case (default: 1)")
    command.add_argument("--minutes", type=float, help="begin no case after this long")
    command.add_argument("--threads", type=int, default=1, help="torch threads on the CPU (default: 1)")
    command.add_argument("--resume", action="store_true", help="continue a run into the same folder that was cut off")
    command.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="folder for results and report")
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks. Exit status 0; 1 if tests fail, no case matches or a case failed; 130 after an interrupt.

    3 if a case left the GPU unusable: a new process continues after it with `--resume`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(arguments)
    began = time.perf_counter()
    try:
        cases = choose(options.device, options.patterns)
        if options.list:
            print("\n".join(f"{case.family}/{case.name}" for case in cases))
            return 0
        if options.large_first:
            cases.reverse()
        environment, earlier = _prepared(options)
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted before anything was measured", flush=True)
        return 130
    status = int(any(_failed(row) for row in earlier))
    done = {results.key(row) for row in earlier}
    try:
        for number, case in enumerate(cases, 1):
            if (case.family, case.name) in done:
                continue
            if options.minutes is not None and time.perf_counter() - began > options.minutes * 60:
                print(f"out of time: {len(cases) - number + 1} cases were not measured", flush=True)
                break
            row = _measured(case, options, environment)
            print(f"[{number}/{len(cases)}] {report.one_line(row)}", flush=True)
            status = max(status, int(_failed(row)))
            if "error" in row and options.device == "cuda":
                must_answer(torch.device("cuda"))
                torch.cuda.empty_cache()
    except KeyboardInterrupt:
        print("interrupted; reporting the cases that were measured", flush=True)
        status = 130
    except DeviceLostError as error:
        print(error, file=sys.stderr)
        status = LOST
    path = options.out / RESULTS
    if path.exists():
        print(f"\n{report.write(path)}\n{time.perf_counter() - began:.0f} s in all", flush=True)
    return status


def _prepared(options: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    """Run the gate; return the environment for every row, and the rows of the run that this one continues.

    Raises `ValueError` for options that cannot be met, `RuntimeError` if tests fail.
    """
    if options.effort <= 0 or options.threads < 1:
        raise ValueError("--effort and --threads must be above 0")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"no CUDA device is available to torch {torch.__version__}; use --device cpu")
    torch.set_num_threads(options.threads)
    path, running = options.out / RESULTS, options.out / RUNNING
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: cannot write into {options.out} ({error.strerror})") from None
    earlier: list[Row] = []
    if options.resume and path.exists():
        results.drop_incomplete_line(path)
        earlier = results.load(path) if path.stat().st_size else []
    if earlier:
        environment = earlier[0]["environment"]
    else:
        python_calls = counts.table()  # before anything else has run here
        gate_text = "no tests were run" if options.no_gate else gate.pass_gate()
        environment = describe(torch.device(options.device))
        environment |= {"gate": gate_text, "effort": options.effort, "python_calls": python_calls}
        print(f"{gate_text}\n{environment['device']}, torch {torch.__version__}", flush=True)
    if not options.resume:
        running.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    elif running.exists():  # the last process ended in the middle of this case
        interrupted = json.loads(running.read_text(encoding="utf-8"))
        row = {**interrupted, "device": options.device, "error": "the process ended while this was measured"}
        results.append(path, {**row, "environment": environment})
        earlier.append(row)
        running.unlink()
    return environment, earlier


def _measured(case: Case, options: argparse.Namespace, environment: dict[str, Any]) -> Row:
    """Measure a case and append its row to the results; an exception becomes a row with an "error"."""
    running, name = options.out / RUNNING, {"family": case.family, "name": case.name}
    running.write_text(json.dumps(name), encoding="utf-8")
    row = {**name, "device": options.device}
    try:
        row = measure(case, torch.device(options.device), effort=options.effort)
    except UnavailableError as error:
        row |= {"error": str(error), "skipped": True}
    except Exception as error:
        row |= {"error": f"{type(error).__name__}: {error}"[:500]}
    results.append(options.out / RESULTS, {**row, "environment": environment})
    running.unlink()
    return row


def _failed(row: Row) -> bool:
    return "error" in row and not row.get("skipped")


if __name__ == "__main__":
    sys.exit(main())
