"""The GPU benchmark's own logic, on the CPU: lists, pairs, rows, aims, and a report from whatever is there."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import checks, lists, measure, report, timing
from benchmarks.gpu.__main__ import main


def test_lists_are_the_models_they_name() -> None:
    def elements(name: str) -> tuple[int, int]:
        shapes = lists.LISTS[name]()
        return len(shapes), sum(torch.Size(shape).numel() for shape in shapes)

    assert elements("GPT-2 124M") == (148, 124_439_808)
    assert elements("GPT-2 1.5B") == (580, 1_557_611_200)
    assert elements("ResNet-50") == (161, 25_557_032)
    assert elements("5000 tiny")[0] == 5000


def test_ratios_are_taken_pair_by_pair() -> None:
    ours = [timing.Sample(1.0, 0.1), timing.Sample(4.0, 0.1), timing.Sample(9.0, 0.1)]
    theirs = [timing.Sample(2.0, 0.1), timing.Sample(8.0, 0.1), timing.Sample(3.0, 0.1)]
    assert timing.ratio(ours, theirs) == (0.5, 0.5, 3.0)  # of the medians it would be 4 / 3


def test_interleaving_gives_every_side_a_turn_and_stops_in_time() -> None:
    order: list[str] = []
    jobs = {name: lambda name=name: order.append(name) for name in ("a", "b")}
    samples = timing.interleaved(jobs, torch.device("cpu"), repeats=4, warmup=1, seconds=10.0)
    assert order == ["a", "b"] * 5
    assert {len(taken) for taken in samples.values()} == {4}
    stopped = timing.interleaved(jobs, torch.device("cpu"), repeats=50, warmup=0, seconds=0.0)
    assert {len(taken) for taken in stopped.values()} == {3}


def test_rehearsal_from_measurement_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "--dry-run", "--out", str(tmp_path)]) == 0
    rows = report.load(tmp_path / "rows.jsonl")
    assert not [row for row in rows if "error" in row]
    assert {row["job"] for row in rows} == {
        "unscale", "unscale + clip", "cast to half", "SGD step", "AdamW step", "clip + AdamW",
    }  # fmt: skip
    # A run that was cut off in the middle of a line, and a list that failed, still make a report.
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(
            json.dumps({"list": "GPT-2 1.5B", "dtype": "torch.float32", "error": "out of memory"}) + '\n{"li'
        )
    (tmp_path / "checks.json").write_text(json.dumps({"first": None, "second": "AssertionError: 3 differ"}))
    capsys.readouterr()
    assert main(["report", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("|")  # the table comes last
    text = (tmp_path / "report.md").read_text()
    assert "1 of 2 passed" in text
    assert "- second: AssertionError: 3 differ" in text
    assert "failed: out of memory" in text


def test_aims_are_judged() -> None:
    sides = {"ampkit": {"of_copy_rate": 0.93}, "torch": {"ratio": 0.99}}
    rows = [{"list": "GPT-2 1.5B", "job": "unscale", "dtype": "float32", "sides": sides}]
    lines = report.aims(rows)
    assert "- GPT-2 1.5B, unscale <= 1.0 x torch: 0.99, reached" in lines
    assert lines[-1] == "- GPT-2 1.5B, unscale at >= 90% of the copy rate: 93%, reached"
    sides["torch"]["ratio"], sides["ampkit"]["of_copy_rate"] = 1.2, 0.5
    assert sum("MISSED" in line for line in report.aims(rows)) == 2


def test_nothing_measured_is_said_and_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--out", str(tmp_path)]) == 1
    assert "not measured" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_measuring_needs_a_gpu_or_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "--out", str(tmp_path)]) == 2
    assert "--dry-run rehearses on the CPU" in capsys.readouterr().err


def test_a_check_that_ends_the_process_leaves_the_others_results(tmp_path: Path) -> None:
    def ends(_: torch.device) -> None:
        raise KeyboardInterrupt

    def fails(_: torch.device) -> None:
        raise AssertionError("3 differ")

    path = tmp_path / "checks.json"
    registry = {"good": lambda _: None, "bad": fails, "deadly": ends, "after": ends}
    with pytest.raises(KeyboardInterrupt):
        checks.run(torch.device("cpu"), registry, path)
    assert json.loads(path.read_text()) == {
        "good": None, "bad": "AssertionError: 3 differ", "deadly": "not run", "after": "not run"
    }  # fmt: skip


def test_measuring_does_not_need_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert measure.environment(torch.device("cpu"))["commit"] is None
