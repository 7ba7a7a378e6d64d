"""Compile every kernel variant for sm_80 (FP8: sm_89), sm_90 and sm_100 and judge the machine code. Needs no GPU.

    python -m tests.kernels.aot_check [--capability 90] [--only TEXT]

Must run without TRITON_INTERPRET. The check fails unless it finds the faults of kernels that are bad on purpose. Exit
code 1 for any fault.
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

BATCH = 15  # variants that are compiled before the disassembler reads them


def judge(job: tuple[int, list[str]]) -> list[tuple[str, int, list[str], str]]:
    """Compile cases by name for one architecture; returns the faults of each, and a line that describes its code."""
    from tests.kernels import aot, aot_cases

    capability, names = job
    cases = {case.name: case for case in aot_cases.all_cases()}
    binaries, judged = {}, []
    for name in names:
        try:
            binaries[name] = aot.compile_case(cases[name], capability)
        except Exception as error:  # a finding about this variant, not the end of the check
            judged.append((name, capability, [f"does not compile: {type(error).__name__}: {str(error)[-500:]}"], ""))
    for (name, _), code in zip(binaries.items(), aot.read([*binaries.values()], capability), strict=True):
        line = f"{code.registers:3d} registers, 128-bit loads {code.wide('LDG'):2d}, stores {code.wide('STG'):2d}"
        judged.append((name, capability, aot.faults(cases[name], code), line))
    return judged


def main(argv: list[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compile every kernel ahead of time and judge the code.")
    parser.add_argument("--capability", type=int, action="append", help="compute capability, as 90; repeatable")
    parser.add_argument("--only", default="", help="only variants whose name contains this, and the bad kernels")
    options = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("TRITON_INTERPRET is set: nothing can be compiled in interpret mode; unset it", file=sys.stderr)
        return 2
    import triton

    from tests.kernels import aot_cases

    started = time.perf_counter()
    cases = [case for case in aot_cases.all_cases() if options.only in case.name or case.bad]
    jobs = []
    for capability in options.capability or sorted({each for case in cases for each in case.capabilities}):
        names = [case.name for case in cases if capability in case.capabilities]
        jobs += [(capability, names[i : i + BATCH]) for i in range(0, len(names), BATCH)]
    n_wrong = n_judged = 0
    # Spawned, not forked: a compiler with threads of its own does not survive a fork. A single job needs no process.
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8), multiprocessing.get_context("spawn")) as pool:
        run = pool.map if len(jobs) > 1 else map
        for name, capability, faults, line in chain.from_iterable(run(judge, jobs)):
            n_judged += 1
            n_wrong += bool(faults)
            print(f"{'WRONG' if faults else 'ok':7s}sm_{capability:<4d}{name:34s}{'; '.join(faults) or line}")
    seconds = time.perf_counter() - started
    print(f"triton {triton.__version__}: {n_judged} variants, {n_wrong} wrong, {seconds:.0f} s")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
