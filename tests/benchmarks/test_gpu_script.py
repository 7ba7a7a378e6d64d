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
    *find_spec*) exit 1 ;;
    *gpu_checks*--resume*) exit 0 ;;
    *gpu_checks*) exit "${CHECKS:-0}" ;;
esac
"""


class Ran:
    """What a run of the script asked for, said and left."""

    def __init__(self, folder: Path, *arguments: str, **variables: str) -> None:
        (folder / "bin").mkdir()
        python = folder / "bin" / "python"
        python.write_text(FAKE)
        python.chmod(0o755)
        calls = folder / "calls"
        environment = os.environ | {"PYTHON": "bin/python", "OUT": "results", "CALLS": str(calls)} | variables
        self.done = subprocess.run(
            [str(SCRIPT), *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        self.calls = calls.read_text().splitlines() if calls.exists() else []

    def of(self, what: str) -> list[str]:
        """The calls that ran a module."""
        return [call for call in self.calls if call.startswith(f"-m {what} ")]


def test_folders_and_interpreters_are_relative_to_the_caller(tmp_path: Path):
    ran = Ran(tmp_path, "--dry-run")
    assert ran.done.returncode == 0, ran.done.stderr
    for half in ("kernels", "models"):
        assert (tmp_path / "results" / half / "log.txt").exists()
        assert any(f"--out {tmp_path}/results/{half}" in call for call in ran.of("benchmarks"))
    assert "exit 127" not in ran.done.stdout


def test_checks_go_on_in_a_fresh_process_after_a_lost_device(tmp_path: Path):
    ran = Ran(tmp_path, "kernels", "--dry-run", CHECKS="3")
    first, second = ran.of("tests.gpu_checks")
    assert second == f"{first} --resume"
    assert re.search(r"checks: exit 3.*checks: exit 0", ran.done.stdout, re.DOTALL)


def test_a_check_that_only_fails_is_not_run_again(tmp_path: Path):
    assert len(Ran(tmp_path, "kernels", "--dry-run", CHECKS="1").of("tests.gpu_checks")) == 1


@pytest.mark.parametrize("place", ["PATH", "toolkit", "nowhere"])
def test_the_memory_checker_is_found_where_the_toolkit_puts_it(tmp_path: Path, place: str):
    folder = tmp_path / "cuda" / "bin"
    folder.mkdir(parents=True)
    tool = folder / "compute-sanitizer"
    tool.write_text('#!/usr/bin/env bash\necho "sanitizer $*" >> "$CALLS"\n')
    tool.chmod(0o755)
    variables = {"CUDA_HOME": str(folder.parent)} if place == "toolkit" else {"CUDA_HOME": str(tmp_path)}
    if place == "PATH":
        variables["PATH"] = f"{folder}:{os.environ['PATH']}"
    ran = Ran(tmp_path, "kernels", **variables)
    checked = [call for call in ran.calls if call.startswith("sanitizer") and "tests.gpu_checks --small" in call]
    if place != "nowhere":
        assert len(checked) == 1
    elif not checked:       # unless this machine has a toolkit of its own
        assert "sanitizer: no compute-sanitizer on the PATH or in a CUDA toolkit" in ran.done.stdout


def test_the_limits_of_the_stages_fit_into_a_half():
    text = SCRIPT.read_text()
    deadline = int(re.search(r"SECONDS \+ (\d+)", text)[1])
    for half in ("kernels", "models"):
        body = re.search(rf"^{half}\(\) {{.*?^}}", text, re.DOTALL | re.MULTILINE)[0]
        limits = re.findall(r"(?:stage|persistent|gpu_tests) \w+ (\d+)", body)
        assert 400 < sum(map(int, limits)) <= deadline
        minutes = float(re.search(r"--device cuda --minutes ([\d.]+)", body)[1])
        measuring = int(re.search(r"persistent benchmarks (\d+)", body)[1])
        assert minutes * 60 + 30 <= measuring       # a case that has begun, ceilings, the report


def test_an_unknown_word_is_refused(tmp_path: Path):
    ran = Ran(tmp_path, "everything")
    assert ran.done.returncode == 2
    assert "unknown argument 'everything'; expected kernels, models or --dry-run" in ran.done.stderr
