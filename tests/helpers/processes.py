"""Run code in a new interpreter."""

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
