"""`benchmarks/gpu.sh`, with an interpreter that only writes down what it was asked to run."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.environment import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.sh"
FAKE = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
case "$*" in
    *benchmarks*--resume*) exit 0 ;;
    *benchmarks*) exit "${MEASURED:-0}" ;;
esac
"""


def run(folder: Path, *arguments: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script from a folder; returns what it printed and what it ran."""
    (folder / "bin").mkdir()
    python, calls = folder / "bin" / "python", folder / "calls"
    python.write_text(FAKE)
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": "bin/python", "OUT": "results", "CALLS": str(calls)} | variables
    done = subprocess.run(
        [str(SCRIPT), *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize(("status", "runs"), [("3", 2), ("1", 1)])
def test_cases_go_on_in_a_new_process_after_a_lost_device_only(tmp_path: Path, status: str, runs: int):
    done, calls = run(tmp_path, "kernels", "--dry-run", MEASURED=status)
    checks, *measured = [call for call in calls if "benchmarks" in call or "test_operations" in call]
    assert checks.endswith("-k interpreted tests/kernels/test_operations.py")
    assert measured == [measured[0], f"{measured[0]} --resume"][:runs]
    assert (re.search(r"benchmarks: exit 3.*benchmarks: exit 0", done.stdout, re.DOTALL) is not None) == (runs == 2)


def test_the_limits_of_the_stages_fit_into_a_half(tmp_path: Path):
    text = SCRIPT.read_text()
    deadline = int(re.search(r"SECONDS \+ (\d+)", text)[1])
    for half in ("kernels", "models"):
        body = re.search(rf"^{half}\(\) {{.*?^}}", text, re.DOTALL | re.MULTILINE)[0]
        limits = re.findall(r"(?:stage|persistent) \w+ (\d+)", body)
        assert 400 < sum(map(int, limits)) <= deadline
        minutes = float(re.search(r"--device cuda --minutes ([\d.]+)", body)[1])
        measuring = int(re.search(r"persistent benchmarks (\d+)", body)[1])
        assert minutes * 60 + 30 <= measuring       # a case that has begun, ceilings, the report
    done, _ = run(tmp_path, "everything")
    assert done.returncode == 2
    assert "unknown argument 'everything'; expected kernels, models or --dry-run" in done.stderr
