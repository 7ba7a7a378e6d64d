"""`python -m benchmarks`: the gate, what a run writes, and going on where one was cut off."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import gate, results
from benchmarks.case import Case, Side, UnavailableError
from benchmarks.environment import ROOT
from tests.benchmarks.helpers import sleepy_case


def test_what_stops_a_run_before_its_first_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """A red gate; a folder that cannot be made, said before minutes of tests; Ctrl-C during those; wrong options."""
    red = subprocess.CompletedProcess([], 1, "FAILED tests/test_x.py::test_y\n1 failed", "")
    monkeypatch.setattr(gate, "run_tests", lambda files: red)
    assert command.main(["regions/*", "--out", str(tmp_path)]) == 1
    assert "tests fail, so nothing is measured:\nFAILED tests/test_x.py::test_y" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.gate, "pass_gate", interrupted)
    (tmp_path / "file").touch()
    assert command.main(["regions/*", "--out", str(tmp_path / "file" / "out")]) == 1
    assert "--out: cannot write into" in capsys.readouterr().err
    assert command.main(["regions/*", "--out", str(tmp_path)]) == 130
    assert command.main(["nothing"]) == 1
    assert command.main(["--effort", "0"]) == 1
    if not torch.cuda.is_available():
        assert command.main(["--device", "cuda"]) == 1
        assert "no CUDA device" in capsys.readouterr().err


def test_the_gate_runs_real_tests(tmp_path: Path):
    """Files that exist, and pytest's own verdict on one that fails."""
    assert all((ROOT / name).exists() for name in gate.FILES)
    failing = tmp_path / "test_red.py"
    failing.write_text("def test_red():\n    assert 1 == 2\n")
    assert gate.run_tests([str(failing)]).returncode == 1


def acting(case_name: str, action) -> Case:
    """A case that does something when its sides are made, and then cannot run."""

    class Acting(Case):
        def sides(self, device: torch.device) -> dict[str, Side]:
            action()
            raise UnavailableError("it needs a moon, which is not there")

    return Acting(family="training", name=case_name)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run the command over cases; returns its status and the rows by name."""
    monkeypatch.setattr(command.counts, "table", dict)

    def measure(cases: list[Case], *arguments: str) -> tuple[int, dict]:
        monkeypatch.setattr(command, "choose", lambda *_, **__: list(cases))
        status = command.main(["--no-gate", "--effort", "0.01", "--out", str(tmp_path), *arguments])
        path = tmp_path / "results.jsonl"
        return status, {row["name"]: row for row in results.load(path)} if path.exists() else {}

    return measure


def test_a_run_writes_results_and_a_report(measured, tmp_path: Path, capsys):
    """A case that fails is shown, costs nothing else, and turns the status red; one that cannot run here does not."""
    broken, _ = sleepy_case(base="absent")
    object.__setattr__(broken, "name", "broken")
    status, rows = measured([sleepy_case()[0], acting("lunar", lambda: None)])
    assert (status, list(rows)) == (0, ["sleepy", "lunar"])
    assert rows["lunar"]["skipped"]
    assert "training/lunar: skipped: it needs a moon" in capsys.readouterr().out
    assert {"torch", "triton", "commit", "dirty", "device", "gate"} <= rows["sleepy"]["environment"].keys()
    assert json.loads((tmp_path / "results.jsonl").read_text().splitlines()[0]) == rows["sleepy"]
    text = (tmp_path / "report.md").read_text()
    assert "no tests were run" in text
    assert "- training/lunar: it needs a moon" in text
    status, rows = measured([broken, sleepy_case()[0]])
    assert (status, list(rows)) == (1, ["broken", "sleepy"])
    assert rows["broken"]["error"].startswith("ValueError: case 'broken'")
    assert measured([broken], "--minutes", "0") == (0, {})
    assert "out of time: 1 cases were not measured" in capsys.readouterr().out


def test_a_run_goes_on_where_the_process_ended(measured, tmp_path: Path):
    """What was measured stays, the case that the process ended in is named and left, the rest follows."""
    def ends() -> None:
        raise KeyboardInterrupt

    cases = [sleepy_case()[0], acting("deadly", ends), acting("after", lambda: None)]
    status, rows = measured(cases)
    assert (status, list(rows)) == (130, ["sleepy"])
    first = (tmp_path / "results.jsonl").read_text()
    (tmp_path / "results.jsonl").write_text(first + first[:30])     # cut off in the middle of a line
    cases[0] = acting("sleepy", ends)       # is not run again
    status, rows = measured(cases, "--resume")
    assert (status, list(rows)) == (1, ["sleepy", "deadly", "after"])
    assert "sides" in rows["sleepy"]
    assert rows["deadly"]["error"] == "the process ended while this was measured"
    assert not (tmp_path / "running.json").exists()
