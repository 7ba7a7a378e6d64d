"""No figures from wrong code: the tests behind them run first, and a failure ends the run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.environment import ROOT

# What the figures depend on: results equal to torch.amp's, gradients and clipping, and the benchmarks' own arithmetic.
QUICK = (
    "tests/parity/test_bitwise_training.py", "tests/benchmarks", "tests/gradients/test_clipping.py",
    "tests/gradients/test_gradients.py",
)
GATES = ("quick", "full", "none")


def pass_gate(kind: str) -> str:
    """Run the tests of a gate and say what was run; "none" runs nothing and says that.

    Raises `RuntimeError` with the end of pytest's output if a test fails or pytest is missing.
    """
    if kind not in GATES:
        raise ValueError(f"unknown gate {kind!r}; expected one of {', '.join(GATES)}")
    if kind == "none":
        return "no tests were run"
    if importlib.util.find_spec("pytest") is None:
        raise RuntimeError("pytest is not installed, so no test can vouch for the figures; install it or use "
                           "--gate none, and the report will say so")
    files = QUICK if kind == "quick" else ("tests",)
    ran = run_tests(files)
    if ran.returncode != 0:
        tail = "\n".join(ran.stdout.splitlines()[-15:])
        raise RuntimeError(f"tests fail, so nothing is measured:\n{tail}")
    summary = ran.stdout.strip().splitlines()[-1].strip("= ")
    return f"{'the full test suite' if kind == 'full' else ', '.join(files)}: {summary}"


def run_tests(files: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """pytest over some files, from the root of the checkout, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )
