"""Run the tests that the figures depend on before anything is measured; a failure ends the run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.environment import ROOT

# Results equal to torch.amp's, gradients and clipping, and the benchmarks' own arithmetic.
FILES = (
    "tests/parity/test_bitwise_training.py",
    "tests/benchmarks",
    "tests/gradients/test_clipping.py",
    "tests/gradients/test_gradients.py",
)


def pass_gate() -> str:
    """Run the tests; return a line that names them and pytest's summary.

    Raises `RuntimeError` with the end of pytest's output if a test fails or pytest is missing.
    """
    if importlib.util.find_spec("pytest") is None:
        raise RuntimeError(
            "pytest is not installed, so the figures are not tested; install it or use "
            "--no-gate, and the report will say so"
        )
    print("running tests first", flush=True)
    ran = run_tests(FILES)
    tail = ran.stdout.splitlines()[-15:]
    if ran.returncode != 0:
        raise RuntimeError("\n".join(["tests fail, so nothing is measured:", *tail]))
    return f"{', '.join(FILES)}: {tail[-1].strip('= ')}"


def run_tests(files: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run pytest over some files, from the root of the checkout, in another process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
