"""Code that a test runs in an interpreter of its own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.paths import ROOT


def fresh_python(code: str, *flags: str, cwd: Path = ROOT, path: str | None = None) -> str:
    """Run code in a new interpreter that finds the checkout; return what it printed."""
    search = path or os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    ran = subprocess.run(
        [sys.executable, *flags, "-c", code],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": search},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def torchrun(script: Path, *arguments: str, ranks: int, timeout: float = 100) -> str:
    """Run a script on gloo ranks, as a user does; return what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    search = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for last in (False, True):      # gloo's threads can end badly once in many runs, after all is done and printed
        try:
            ran = subprocess.run(
                [*command, str(script), *arguments], capture_output=True, text=True, env=environment, timeout=timeout
            )
        except subprocess.TimeoutExpired as error:      # a rank that does not exit
            if last or not error.stdout:
                raise
            continue
        if "terminate called without an active exception" not in ran.stderr:
            break
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout
