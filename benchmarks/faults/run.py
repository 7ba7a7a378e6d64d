"""Runs `ampkit debug` of a checkout on cases: each in a process forked from one that has torch and ampkit imported."""

from __future__ import annotations

import importlib
import json
import os
import resource
import runpy
import shutil
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from benchmarks.faults.inject import Case, packages_folder

SECONDS = 100  # of processor time for each case
RUNS = "runs.jsonl"


def run(cases: Iterable[Case], folder: Path, checkout: Path | None = None, *options: str, processes: int = 1) -> None:
    """Run the cases that a folder has no result of.

    Args:
        cases: The cases.
        folder: The folder for the results: ID.json is a case's report, ID.txt its output, and `runs.jsonl` has a line
            of JSON for each case with its exit code and processor seconds.
        checkout: The checkout whose ampkit runs; None for the ampkit that this process imports.
        options: Further options of `ampkit debug`.
        processes: The number of cases that run at the same time.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    done = {entry["id"] for entry in runs(folder)}
    waiting = [case for case in cases if case.id not in done]
    _import_ampkit(checkout)
    running: dict[int, Case] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            case = waiting.pop(0)
            shutil.rmtree(folder / case.id, ignore_errors=True)
            case.lay_out(folder / case.id)
            child = os.fork()
            if child == 0:
                _run(case, folder, options)
            running[child] = case
        child, status, usage = os.wait3(0)
        case = running.pop(child)
        seconds = round(usage.ru_utime + usage.ru_stime, 1)
        entry = json.dumps({"id": case.id, "exit": os.waitstatus_to_exitcode(status), "seconds": seconds})
        with (folder / RUNS).open("a", encoding="utf-8") as file:
            print(entry, file=file)
        print(entry, flush=True)
        shutil.rmtree(folder / case.id)


def runs(folder: Path) -> list[dict[str, str | int | float]]:
    """Return the entries of a folder's `runs.jsonl`."""
    path = folder / RUNS
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def _import_ampkit(checkout: Path | None) -> None:
    os.environ.update(OMP_NUM_THREADS="1", TRITON_INTERPRET="1")
    sys.path.insert(0, str(packages_folder()))
    if checkout is not None:
        sys.path[:0] = [str(checkout), str(checkout / "kernels")]
    importlib.import_module("torch._dynamo")  # otherwise each child imports it when an optimizer steps
    cli = importlib.import_module("ampkit.debugging.cli")
    if checkout is not None and checkout.resolve() not in Path(str(cli.__file__)).resolve().parents:
        raise ValueError(f"{cli.__file__} was imported; expected ampkit of {checkout}")


def _run(case: Case, folder: Path, options: Iterable[str]) -> None:
    """Replace this process by `ampkit debug` on a case."""
    code = 3
    try:
        os.chdir(folder / case.id)
        output = os.open(folder / f"{case.id}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
        sys.argv = ["ampkit", "debug", *options, "--json", str(folder / f"{case.id}.json"), *case.command()]
        runpy.run_module("ampkit", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
