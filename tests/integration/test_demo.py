"""The demo: models learn, the three runs are comparable, interrupts and bad options end it cleanly."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampkit import doctor
from ampkit.doctor import FormatTime
from examples import demo

CPU = torch.device("cpu")


def run_demo(out: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run the script's `main` in this process; return what it wrote as JSON."""
    assert demo.main([*arguments, "--device", "cpu", "--out", str(out)]) == code
    return json.loads((out / "results.json").read_text())


def test_no_held_out_text_was_seen_in_training() -> None:
    """The source repeats paragraphs, the split does not. Targets are the inputs shifted by one."""
    task = demo.Characters(CPU, batch_size=3, context=16)
    train, test = ("".join(task.alphabet[code] for code in part) for part in (task.train, task.test))
    paragraphs = [part for part in test.split("\n\n") if part.strip()]
    assert len(paragraphs) > 100
    assert not set(paragraphs) & set(train.split("\n\n"))
    inputs, targets = task.batch(torch.Generator().manual_seed(0))
    assert inputs[:, 1:].equal(targets[:, :-1])


def test_runs_start_alike_and_see_the_same_batches_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run rotates, so that none always runs on a warm cache. The same seed repeats losses to the bit."""
    seen: list[tuple[str, float]] = []
    step = demo.Run.step

    def noted(run: demo.Run, batch: Any) -> Any:
        seen.append((run.record.name, batch[0].double().sum().item()))
        return step(run, batch)

    def trained(seed: int, dtype: str = "fp16") -> list[demo.Run]:
        task = demo.Digits(CPU, batch_size=4)
        runs = demo.make_runs(task, CPU, dtype, seed)
        first = runs[0].model.state_dict()
        for run in runs:
            torch.testing.assert_close(run.model.state_dict(), first, rtol=0, atol=0)
        demo.train(task, runs, 3, seed)
        return runs

    monkeypatch.setattr(demo.Run, "step", noted)
    losses = [run.record.losses for run in trained(3)]
    names, batches = zip(*seen, strict=True)
    a, b, c = "fp32", "torch.amp", "ampkit"
    assert names == (a, b, c, b, c, a, c, a, b)
    assert [len(set(batches[i : i + 3])) for i in (0, 3, 6)] == [1, 1, 1]
    assert losses == [run.record.losses for run in trained(3)] != [run.record.losses for run in trained(4)]
    assert [run.record.dtype for run in trained(3, "fp8")] == ["fp32", "bf16", "fp8"]


def test_the_digits_are_learned_and_the_overflow_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an eighth of its steps: every run learns, the loss scale grows until steps are skipped, all is recorded."""
    monkeypatch.setattr(demo, "GROWTH_INTERVAL", 4)
    monkeypatch.setattr(doctor, "measure", lambda device: measured(float16=40.0, native=False))
    results = run_demo(tmp_path, "--model", "digits", "--steps", "40", "--dtype", "fp16")
    runs = results["tasks"]["digits"]["runs"]
    assert [run["dtype"] for run in runs] == ["fp32", "fp16", "fp16"]
    assert min(run["held_out"] for run in runs) >= 94
    for run in runs[1:]:
        falls = [n + 2 for n, (before, after) in enumerate(itertools.pairwise(run["scales"])) if after < before]
        assert run["skipped_steps"] == falls != []
    assert {len(run[key]) for run in runs for key in ("losses", "seconds")} == {40}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "step 2 of 3: in fp16, the gradient of the output of 3 (Conv2d) overflows" in printed
    assert "first non-finite: 3" in results["overflow"]["report"]
    steps = [line.split()[-1] for line in printed.splitlines() if line.startswith("  step ") and "scale" in line]
    assert steps == ["executed", "skipped", "executed"]
    assert re.search(r"^  about \d+ s$", printed, re.MULTILINE), "before minutes of training"
    assert "float16 is emulated and takes 80x as long as bfloat16.\n" in printed
    assert re.search(r"x for digits; this device emulates fp16, so other devices can be faster", printed)


def measured(bfloat16: float = 0.5, float16: float = 0.5, native: bool = True) -> dict[str, FormatTime]:
    """Times beside float32's 1 ms; `native` is float16's."""
    took = {"float32": (True, 1.0), "bfloat16": (True, bfloat16), "float16": (native, float16)}
    return {name: FormatTime(known, milliseconds, milliseconds) for name, (known, milliseconds) in took.items()}


def test_the_dtype_is_the_faster_one() -> None:
    """fp16 if they are alike, since it shows the loss scale; bf16 on a CPU that emulates float16."""
    assert demo.sixteen_bit(measured()) == "fp16"
    assert demo.sixteen_bit(measured(float16=30.0, native=False)) == "bf16"
    assert demo.sixteen_bit(measured(bfloat16=8.0)) == "fp16"


def test_the_text_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one on small batches, in bf16 where float16 is slower; all three stay close."""

    class Short(demo.Characters):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device, batch_size=4)
            self.test = self.test[:2000]

        def model(self) -> nn.Module:
            return demo.CharGPT(len(self.alphabet), width=32, depth=1, heads=2)

    monkeypatch.setitem(demo.TASKS, "gpt", Short)
    monkeypatch.setattr(doctor, "measure", lambda device: measured(float16=40.0, native=False))
    runs = run_demo(tmp_path, "--model", "gpt", "--steps", "12")["tasks"]["gpt"]["runs"]
    assert [run["dtype"] for run in runs] == ["fp32", "bf16", "bf16"]
    bits = [run["held_out"] for run in runs]
    assert 3 < min(bits) <= max(bits) < 6
    assert max(bits) - min(bits) < 0.05


def test_an_interrupt_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and exit code 130. Before the first step nothing is written over an earlier run."""
    step, left = demo.Run.step, [0]

    def interrupted(run: demo.Run, batch: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return step(run, batch)

    monkeypatch.setattr(demo.Run, "step", interrupted)
    (tmp_path / "results.json").write_text('"of an earlier run"')
    assert run_demo(tmp_path, "--model", "digits", code=130) == "of an earlier run"
    assert capsys.readouterr().err == "\ninterrupted; no step was run\n"
    left[0] = 7
    results = run_demo(tmp_path, "--model", "digits", code=130)
    assert "\ninterrupted; the measurements so far are in" in capsys.readouterr().err
    assert sorted(len(run["losses"]) for run in results["tasks"]["digits"]["runs"]) == [2, 2, 3]


def test_bad_options_are_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for arguments, message in (
        (["--steps", "0"], "--steps: expected 1 or more, got 0"),
        (["--device", "warp"], "cannot use device 'warp'"),
        (["--out", str(tmp_path / "file" / "out")], "--out: cannot write into"),
    ):
        with pytest.raises(SystemExit):
            demo.main(["--out", str(tmp_path / "out"), *arguments])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "results.json").exists()
