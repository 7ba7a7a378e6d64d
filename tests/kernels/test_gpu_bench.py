"""The GPU benchmark's own logic, on the CPU: lists, pairs, rows, aims, and a report from whatever is there."""

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import checks, lists, measure, report, timing
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.device import DeviceLostError


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


def test_device_time_starts_when_the_host_has_queued_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches emptied, the device put to sleep for longer than the host takes, then the clock, then the job."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def elapsed_time(self, end: "Event") -> float:
            return 1.0

    class Cache:
        def zero_(self) -> None:
            done.append("flush")

    slept: list[int] = []
    monkeypatch.setattr(timing, "_flushed", lambda device: Cache())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: (slept.append(cycles), done.append("sleep")))
    jobs = {"it": lambda: (done.append("job"), time.sleep(0.01))}
    samples = timing.interleaved(jobs, torch.device("cuda"), repeats=1, warmup=1, seconds=1.0)
    assert done == ["wait", "flush", "sleep", "event", "job", "event", "wait"] * 2
    assert slept[0] == 0
    assert slept[1] > 10 * timing.CYCLES_PER_MS
    assert [sample.device_ms for sample in samples["it"]] == [1.0]
    assert samples["it"][0].host_ms >= 10.0


def test_a_check_that_ends_the_process_leaves_the_others_results(tmp_path: Path) -> None:
    def ends(_: torch.device) -> None:
        raise KeyboardInterrupt

    def fails(_: torch.device) -> None:
        raise AssertionError("3 differ")

    path = tmp_path / "checks.json"
    registry: dict[str, checks.Check] = {"good": lambda _: None, "bad": fails, "deadly": ends, "after": lambda _: None}
    with pytest.raises(KeyboardInterrupt):
        checks.run(torch.device("cpu"), registry, path)
    found = {"good": None, "bad": "AssertionError: 3 differ", "deadly": "did not finish", "after": "not run"}
    assert json.loads(path.read_text()) == found
    # A fresh process goes on behind it, and repeats nothing.
    registry["good"] = ends
    assert checks.run(torch.device("cpu"), registry, path, resume=True) == {**found, "after": None}
    assert checks.run(torch.device("cpu"), {"good": lambda _: None}, path) == {"good": None}


def test_a_device_that_is_lost_ends_the_run_with_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever runs after an illegal access in the same process fails as well, and says nothing."""
    alive = True

    def breaks(_: torch.device) -> None:
        nonlocal alive
        alive = False
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def must_answer(device: torch.device) -> None:
        if not alive:
            raise DeviceLostError("cuda:0 answers no more")

    monkeypatch.setattr(checks, "must_answer", must_answer)
    monkeypatch.setattr(checks, "CHECKS", {"good": lambda _: None, "bad": breaks, "after": lambda _: None})
    arguments = ["checks", "--dry-run", "--out", str(tmp_path)]
    assert main(arguments) == 3
    assert "answers no more" in capsys.readouterr().err
    found = json.loads((tmp_path / "checks.json").read_text())
    assert "illegal memory access" in found.pop("bad")
    assert found == {"good": None, "after": "not run"}
    alive = True
    assert main([*arguments, "--resume"]) == 1
    assert json.loads((tmp_path / "checks.json").read_text())["after"] is None


def test_measuring_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    measure.measure(tmp_path, cpu, True, 0.0)  # no time at all: the environment only
    environment = (tmp_path / "environment.json").read_text()
    died = {**json.loads(environment), "died_at": ["20 tiny", "float16"]}  # without a row to show for it
    (tmp_path / "environment.json").write_text(json.dumps(died))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"list": "small GPT", "dtype": "float32", "error": "gone"}) + "\n")
    measure.measure(tmp_path, cpu, True, 60.0, resume=True)
    assert json.loads((tmp_path / "environment.json").read_text()) == died
    rows = report.load(tmp_path / "rows.jsonl")
    assert [row.get("error") for row in rows if (row["list"], row["dtype"]) == ("small GPT", "float32")] == ["gone"]
    found = {(row["list"], row["dtype"]) for row in rows}
    assert ("small GPT", "float16") in found
    assert ("20 tiny", "float16") not in found


def test_measuring_does_not_need_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert measure.environment(torch.device("cpu"))["commit"] is None
