"""`python -m benchmarks`: what stops a run, what a row says, how a run goes on after an end, what is made of rows."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import compare, counts, gate, report, results
from benchmarks.case import AMPKIT, TORCH, Aim, Case, Side, UnavailableError
from benchmarks.environment import ROOT
from benchmarks.measure import measure
from benchmarks.timing import HostClock, Spread

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Fake(Case):
    """Sides that take 2 and 1 seconds of a clock of their own, tenfold from the third round on; they note turns."""

    family: str = "training"
    aims: tuple[Aim, ...] = (Aim(AMPKIT, 0.4), Aim("absent", 1.0))
    seconds: float = 0.0
    first: Callable[[], object] = lambda: None
    turns: list[str] = field(default_factory=list)
    clock: list[float] = field(default_factory=lambda: [0.0])

    def sides(self, device: torch.device) -> dict[str, Side]:
        self.first()

        def side(name: str, seconds: float) -> Side:
            def run(calls: int) -> None:
                self.turns.append(name)
                self.clock[0] += calls * seconds * (10 if len(self.turns) > 6 else 1)

            return Side(run, facts=lambda: {"casts": 3})

        return {TORCH: side(TORCH, 2.0), AMPKIT: side(AMPKIT, 1.0)}


def test_a_row_says_what_was_found() -> None:
    """Sides take turns and the first rotates; ratios are of one round, so a machine that slows down changes none."""
    case = Fake(name="a")
    row = measure(case, CPU, clock=HostClock(lambda: case.clock[0], lambda: case.clock[0]))
    half = {"median": 0.5, "low": 0.5, "high": 0.5}
    assert [name == AMPKIT for name in case.turns] == [False, True, *[False, True, True, False] * 2, False, True]
    assert row["rounds"] == 5
    assert row["sides"][AMPKIT]["ratio"] == row["sides"][AMPKIT]["cpu_ratio"] == half
    assert row["sides"][TORCH]["wall"] == {"median": 20.0, "low": 2.0, "high": 20.0}
    assert row["sides"][AMPKIT]["facts"] == {"casts": 3}
    assert row["aims"] == [{"side": AMPKIT, "limit": 0.4, "base": TORCH, "ratio": half}]
    assert Spread.of([*range(101)]) == Spread(50, 20, 80)
    with pytest.raises(ValueError, match=r"compared with 'absent', which is none of torch\.amp, ampkit"):
        measure(Fake(name="a", base="absent"), CPU)


def test_copies_and_peaks_are_counted() -> None:
    """Two casts, of which the second lives on; a tensor of 4000 bytes that dies before them."""
    kept = []

    def job() -> None:
        torch.empty(1000)
        kept.append(torch.ones(250).bfloat16().double())

    job()
    assert counts.peak_and_copies(job, CPU) == {"peak_bytes": 4000, "copies": 2}


def test_what_stops_a_run_before_its_first_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong options; a red gate, whose tests exist and whose verdict is pytest's."""
    (tmp_path / "file").touch()
    wrong = {
        "no case for 'cpu' matches": ["nothing"],
        "above 0": ["--effort", "0"],
        "--out: cannot write into": ["--out", str(tmp_path / "file" / "out")],
    }
    if not torch.cuda.is_available():
        wrong["no CUDA device"] = ["--device", "cuda"]
    for said, arguments in wrong.items():
        assert command.main(arguments) == 1
        assert said in capsys.readouterr().err
    assert [name for name in gate.FILES if not (ROOT / name).exists()] == []
    failing = tmp_path / "test_red.py"
    failing.write_text("def test_red():\n    assert 1 == 2\n")
    monkeypatch.setattr(gate, "FILES", (str(failing),))
    monkeypatch.setattr(command.counts, "table", dict)
    assert command.main(["*/*one tensor of 1e3", "--out", str(tmp_path / "out")]) == 1
    assert re.search(r"tests fail, so nothing is measured:\n[\s\S]*FAILED .*test_red", capsys.readouterr().err)
    assert not list((tmp_path / "out").iterdir())


def test_a_run_goes_on_where_the_process_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured stays; the case that the process ended in is named and left; a failure costs nothing else."""

    def run(cases: Sequence[Case], *arguments: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(command, "choose", lambda *_, **__: list(cases))
        status = command.main(["--no-gate", "--effort", "0.01", "--out", str(tmp_path), *arguments])
        return status, {row["name"]: row for row in results.load(path)}

    def ends() -> None:
        raise KeyboardInterrupt

    def lacks() -> None:
        raise UnavailableError("it needs a moon")

    monkeypatch.setattr(command.counts, "table", dict)
    path = tmp_path / "results.jsonl"
    others = [Fake(name="deadly", first=ends), Fake(name="broken", base="absent"), Fake(name="lunar", first=lacks)]
    status, rows = run([Fake(name="good"), *others])
    assert (status, list(rows)) == (130, ["good"])
    assert {"torch", "triton", "commit", "dirty", "device", "gate"} <= rows["good"]["environment"].keys()
    first = path.read_text()
    path.write_text(first + first[:30])  # cut off in the middle of a line
    status, rows = run([Fake(name="good", first=ends), *others], "--resume")
    assert (status, list(rows)) == (1, ["good", "deadly", "broken", "lunar"])
    assert "sides" in rows["good"]
    assert rows["deadly"]["error"] == "the process ended while this was measured"
    assert rows["broken"]["error"].startswith("ValueError: case 'broken'")
    assert rows["lunar"]["skipped"]
    assert not (tmp_path / "running.json").exists()
    text = (tmp_path / "report.md").read_text()
    assert "no tests were run" in text
    assert "- training/lunar: it needs a moon" in text
    capsys.readouterr()
    assert command.main(["--no-gate", "--minutes", "0", "--out", str(tmp_path)]) == 0
    assert "out of time: 4 cases were not measured" in capsys.readouterr().out


def test_the_page_shows_the_results_that_are_kept(tmp_path: Path) -> None:
    """Reports are made from the rows next to them; `--page` has written the page's summary, which links each report."""
    page = (ROOT / "docs" / "performance.md").read_text()
    paths = sorted((ROOT / "benchmarks" / "results").glob("*/results.jsonl"))
    for path in paths:
        rows = results.load(path)
        assert (path.parent / "report.md").read_text() == report.markdown(rows)
        assert f"](../benchmarks/results/{path.parent.name}/report.md)" in page.replace("\n", "")
        assert {change.direction for change in compare.compare(rows, rows)} == {"same"}
    assert paths
    shown = re.findall(r"<!-- figures: (\S+), written by", page)
    assert shown
    for folder in shown:
        copy = tmp_path / "performance.md"
        copy.write_text(page)
        report.put_into(copy, results.load(ROOT / "benchmarks" / "results" / folder / "results.jsonl"), folder)
        assert copy.read_text() == page


def test_a_comparison_finds_what_changed_beyond_its_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(name: str, **ratios: tuple[float, float]) -> str:
        for case, (ratio, width) in ratios.items():
            spread = {"median": ratio, "low": ratio - width, "high": ratio + width}
            environment = {"commit": "abc", "torch": "2", "device": "a machine", "date": "today"}
            results.append(
                tmp_path / name,
                {
                    "family": "training",
                    "name": case,
                    "base": TORCH,
                    "environment": environment,
                    "sides": {TORCH: {}, AMPKIT: {"ratio": spread}},
                },
            )
        return str(tmp_path / name)

    old = write("old", slower=(1.0, 0.01), faster=(1.0, 0.01), noisy=(1.0, 0.5), little=(1.0, 0.001), gone=(1.0, 0.01))
    new = write("new", slower=(1.3, 0.01), faster=(0.7, 0.01), noisy=(1.3, 0.5), little=(1.02, 0.001), new=(9.0, 0.01))
    assert compare.main([old, new]) == compare.main([old, old, "--fail"]) == 0
    assert compare.main([old, new, "--fail"]) == 1
    text = capsys.readouterr().out
    assert "| training/slower | ampkit | 1.00 (0.99-1.01) | 1.30 (1.29-1.31) | 1.30 |" in text
    assert "| training/faster | ampkit |" in text
    assert "4 compared, 2 the same" in text
    (tmp_path / "old").write_text(json.dumps({"a": 1}))
    assert compare.main([old, new]) == compare.main([str(tmp_path / "absent"), new]) == 2


def test_gpu_script_goes_on_in_a_new_process_after_a_lost_device_only(tmp_path: Path) -> None:
    """With an interpreter that writes down what it was asked to run. The limits of a half's stages fit its deadline."""
    script = ROOT / "benchmarks" / "gpu.sh"
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(
        '#!/bin/sh\necho "$*" >> "$CALLS"\n'
        'case "$*" in *benchmarks*--resume*) exit 0 ;; *benchmarks*) exit "$MEASURED" ;; esac\n'
    )
    python.chmod(0o755)
    for status, runs in (("3", 2), ("1", 1)):
        calls.unlink(missing_ok=True)
        variables = {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "CALLS": str(calls), "MEASURED": status}
        subprocess.run([script, "kernels", "--dry-run"], env=os.environ | variables, capture_output=True, check=False)
        measured = [call for call in calls.read_text().splitlines() if "benchmarks" in call]
        assert measured == [measured[0], f"{measured[0]} --resume"][:runs]
    text = script.read_text()
    deadline = re.search(r"SECONDS \+ (\d+)", text)
    for half in ("kernels", "models"):
        body = re.search(rf"^{half}\(\) {{.*?^}}", text, re.DOTALL | re.MULTILINE)
        assert body is not None
        assert deadline is not None
        assert 400 < sum(map(int, re.findall(r"(?:stage|persistent) \w+ (\d+)", body[0]))) <= int(deadline[1])
