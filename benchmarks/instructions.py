"""Instructions of a case's sides, counted by valgrind's callgrind: `python -m benchmarks.instructions [PATTERNS]`.

Counts hardly differ from run to run and do not depend on what else the machine does: they show changes of a percent,
where times of small jobs differ by several. A count is not a time: it knows nothing of caches, and valgrind runs the
kernels that torch has for AVX2. Differences between sides are of Python and C++ around the same kernels.

The command runs itself under valgrind, which needs `valgrind` with its headers and a C compiler. A case takes tens of
seconds, most of it the import of torch.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.environment import ROOT
from benchmarks.registry import choose, every_case

# Jobs whose kernels are small compared with the code around them.
SMALL = (
    "operators/*",
    "regions/*",
    "weights/10 weights",
    "mlp/d=32,*",
    "width/d=32,*",
    "small/transformer*",
    "inference/*d=32",
    "accumulation/d=32*",
    "features/*",
)
TINY, LARGE = 50, 4  # calls that are counted, of cases whose samples are many calls, and of others
WARM_UP = 6

_REQUESTS = """\
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void stop(const char *name) { CALLGRIND_STOP_INSTRUMENTATION; CALLGRIND_DUMP_STATS_AT(name); }
"""


class MissingToolError(RuntimeError):
    """A program that counting needs is not installed."""


def count(patterns: Sequence[str], folder: Path) -> dict[str, dict[str, int]]:
    """Instructions of one call of each side, by case and side: run in another process, under valgrind.

    Raises `MissingToolError` without valgrind, its headers or a C compiler, `RuntimeError` if the process fails.
    """
    requests = _requests(folder)
    command = [
        *("valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder / 'counts'}"),
        *(sys.executable, "-m", "benchmarks.instructions", "--inside", str(requests), *patterns),
    ]
    variables = {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels"))),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise RuntimeError(f"counting failed:\n{ran.stderr[-2000:]}")
    return per_call(folder.glob("counts*"))


def _requests(folder: Path) -> Path:
    """Return a library with the calls by which a program tells callgrind when to count."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if shutil.which("valgrind") is None or compiler is None:
        raise MissingToolError(
            "counting instructions needs valgrind and a C compiler, for example: apt install valgrind gcc"
        )
    source, library = folder / "requests.c", folder / "requests.so"
    source.write_text(_REQUESTS)
    built = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0:
        raise MissingToolError(f"valgrind's headers do not compile; install them with valgrind:\n{built.stderr[-500:]}")
    return library


def per_call(outputs: Iterable[Path]) -> dict[str, dict[str, int]]:
    """Instructions of one call, from callgrind's files: one for each side and number of calls."""
    totals: dict[tuple[str, str], dict[int, int]] = {}
    for path in outputs:
        text = path.read_text(errors="replace")
        name = re.search(r"^desc: Trigger: Client Request: (.+)\|(.+)\|(\d+)$", text, re.MULTILINE)
        total = re.search(r"^totals: (\d+)", text, re.MULTILINE)
        if name is not None and total is not None:
            totals.setdefault((name[1], name[2]), {})[int(name[3])] = int(total[1])
    counts: dict[str, dict[str, int]] = {}
    for (case, side), by_calls in sorted(totals.items()):
        fewer, more = sorted(by_calls)  # the difference is without what a side does once, such as entering a region
        counts.setdefault(case, {})[side] = round((by_calls[more] - by_calls[fewer]) / (more - fewer))
    return counts


def _inside(library: str, patterns: Sequence[str]) -> None:
    """Count, in the process that valgrind runs."""
    requests = ctypes.CDLL(library)
    torch.set_num_threads(1)
    for case in choose("cpu", patterns):
        sides = case.sides(torch.device("cpu"))
        for name, side in sides.items():
            run, before = side.run, side.before or (lambda: None)
            before()
            run(WARM_UP)
            for calls in (1, 1 + (TINY if case.sample_seconds else LARGE)):
                before()
                gc.collect()
                gc.disable()
                requests.start()
                run(calls)
                requests.stop(f"{case.family}/{case.name}|{name}|{calls}".encode())
                gc.enable()


def table(counts: Mapping[str, Mapping[str, int]]) -> str:
    """Markdown: the base's thousands of instructions, and what every other side takes more, with the ratio."""
    bases = {f"{case.family}/{case.name}": case.base for case in every_case()}
    sides = list(dict.fromkeys(name for row in counts.values() for name in row))
    lines = [["case", *sides], ["---"] * (len(sides) + 1)]
    for case, row in counts.items():
        base = row[bases[case]]
        cells = [
            "" if name not in row else f"{row[name] / 1e3:,.1f}" if name == bases[case]
            else f"{(row[name] - base) / 1e3:+,.1f} ({row[name] / base:.2f})"
            for name in sides
        ]  # fmt: skip
        lines.append([case, *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; status 1 if something that is needed is missing or fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument("patterns", nargs="*", default=SMALL, help="cases by shell pattern: 'operators/*'")
    parser.add_argument("--inside", metavar="LIBRARY", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.inside is not None:
        _inside(options.inside, options.patterns)
        return 0
    try:
        choose("cpu", options.patterns)
        with tempfile.TemporaryDirectory() as folder:
            counts = count(options.patterns, Path(folder))
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Thousands of instructions of one call, and over the base's; torch {torch.__version__}\n")
    print(table(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
