"""Compile every kernel variant for sm_80 (those of FP8: sm_89), sm_90 and sm_100 and judge the code. Needs no GPU.

    python -m tests.kernels.aot_check [--capability 90] [--only TEXT]

Must run without TRITON_INTERPRET. Kernels that are bad on purpose must be judged bad, else the check itself fails. Exit
code 1 when anything is wrong.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

CAPABILITIES, FLOAT8_CAPABILITIES = (80, 90, 100), (89, 90, 100)
FLOAT8 = ("amax ", "row ", "tile ")
BATCH = 15   # variants that are compiled before the disassembler reads them


def judge(job: tuple[int, list[str]]) -> list[tuple[str, int, list[str], str]]:
    """Compile cases by name for one architecture; returns what is wrong with each, and a line describing it."""
    from tests.kernels import aot, aot_cases

    capability, names = job
    cases = {case.name: case for case in (*aot_cases.all_cases(), *aot_cases.bad_cases().values())}
    binaries, found = {}, []
    for name in names:
        try:
            binaries[name] = aot.compile_case(cases[name], capability)
        except Exception as error:  # a finding about this variant, not the end of the check
            found.append((name, capability, [f"does not compile: {type(error).__name__}: {str(error)[-500:]}"], ""))
    for (name, _), code in zip(binaries.items(), aot.read([*binaries.values()], capability), strict=True):
        line = f"{code.registers:3d} registers, 128-bit loads {code.wide('LDG'):2d}, stores {code.wide('STG'):2d}"
        found.append((name, capability, aot.faults(cases[name], code), line))
    return found


def judged(jobs: list[tuple[int, list[str]]]) -> Iterator[list[tuple[str, int, list[str], str]]]:
    """`judge` over all jobs, in processes of their own where that pays."""
    if len(jobs) <= 2:
        yield from map(judge, jobs)
        return
    # Spawned, not forked: a compiler with threads of its own does not survive a fork.
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 8), multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(judge, jobs)


def main(argv: list[str] | None = None) -> int:
    """Run the check; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compile every kernel ahead of time and judge the code.")
    parser.add_argument(
        "--capability", type=int, action="append", help="compute capability, as 90; repeatable"
    )
    parser.add_argument("--only", default="", help="only variants whose name contains this")
    parser.add_argument("--quiet", action="store_true", help="print what is wrong, and the total")
    options = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("TRITON_INTERPRET is set: nothing can be compiled in interpret mode; unset it", file=sys.stderr)
        return 2
    import triton

    from tests.kernels import aot_cases

    started = time.perf_counter()
    names = [case.name for case in aot_cases.all_cases() if options.only in case.name]
    bad = {case.name: fault for fault, case in aot_cases.bad_cases().items()}
    float8 = [name for name in names if name.startswith(FLOAT8)]
    others = [name for name in names if name not in float8]
    jobs = [
        (capability, batch[i : i + BATCH])
        for batch, capabilities in ((others, CAPABILITIES), (float8, FLOAT8_CAPABILITIES))
        for capability in options.capability or capabilities for i in range(0, len(batch), BATCH)
    ]
    jobs.append((90, list(bad)))
    n_wrong = n_judged = 0
    for name, capability, faults, line in chain.from_iterable(judged(jobs)):
        if name in bad:
            if not any(bad[name] in fault for fault in faults):
                n_wrong += 1
                print(f"WRONG  the check passed a kernel that is {name}: it would catch nothing")
            continue
        n_judged += 1
        n_wrong += bool(faults)
        if faults:
            print(f"WRONG  sm_{capability} {name}: {'; '.join(faults)}")
        elif not options.quiet:
            print(f"ok     sm_{capability:<4d}{name:34s}{line}")
    seconds = time.perf_counter() - started
    print(f"triton {triton.__version__}: {n_judged} variants, {n_wrong} wrong, {seconds:.0f} s")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
