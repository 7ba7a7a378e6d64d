"""The demo: it trains what it says, its three runs are comparable, and it stops as it should."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples import demo

CPU = torch.device("cpu")


class Line:
    """Classify by the sign of a sum, in a few microseconds. Notes which model saw which batch."""

    title, unit, cpu_dtype, steps, peak_lr = "a line", "right", "fp16", 4, 0.1
    interrupt_at = 0        # which call of a model raises KeyboardInterrupt, counted from 1
    overflow_at = 0         # which step has an infinite loss in every run

    def __init__(self, device: torch.device = CPU) -> None:
        self.seen: list[tuple[int, float]] = []

    def model(self) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_forward_hook(self._note)
        return model

    def _note(self, model: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        self.seen.append((id(model), args[0].sum().item()))
        if len(self.seen) == self.interrupt_at:
            raise KeyboardInterrupt
        return 0.01 * output * (math.inf if (len(self.seen) - 1) // 3 + 1 == self.overflow_at else 1)

    def __deepcopy__(self, memo: object) -> "Line":
        return self         # the copies of the model keep one list

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 2, generator=generator)
        return x, (x.sum(1) > 0).long()

    def evaluate(self, model: nn.Module) -> float:
        return model(torch.ones(1, 2)).sum().item()


def trained(task: Any, steps: int = 3, dtype: str = "fp16", seed: int = 3) -> list[demo.Run]:
    runs = demo.make_runs(task, CPU, dtype, seed)
    demo.train(task, runs, steps, seed)
    return runs


def run_demo(out: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run the script's `main` in this process; return what it wrote as JSON."""
    assert demo.main([*arguments, "--device", "cpu", "--out", str(out)]) == code
    return json.loads((out / "results.json").read_text())


def test_no_held_out_text_was_seen_in_training() -> None:
    """The source repeats itself; the split does not. Targets are the inputs shifted by one."""
    task = demo.Characters(CPU, batch_size=3, context=16)
    train, test = ("".join(task.alphabet[code] for code in part) for part in (task.train, task.test))
    paragraphs = [part for part in test.split("\n\n") if part.strip()]
    assert len(paragraphs) > 100
    assert not set(paragraphs) & set(train.split("\n\n"))
    inputs, targets = task.batch(torch.Generator().manual_seed(0))
    assert inputs[:, 1:].equal(targets[:, :-1])


def test_runs_start_alike_and_see_the_same_batches_in_turn() -> None:
    """Which goes first rotates, so that none always runs on a warm cache. The same seed repeats losses to the bit."""
    task = Line()
    runs = trained(task)
    a, b, c = (id(run.model) for run in runs)
    assert [model for model, _ in task.seen[:9]] == [a, b, c, b, c, a, c, a, b]
    batches = [total for _, total in task.seen[:9]]
    assert [len(set(batches[i : i + 3])) for i in (0, 3, 6)] == [1, 1, 1]
    again, other = trained(Line()), trained(Line(), seed=4)
    assert runs[0].record.losses[0] == pytest.approx(runs[1].record.losses[0], rel=1e-3)
    assert [run.record.losses for run in runs] == [run.record.losses for run in again]
    assert runs[0].record.losses != other[0].record.losses


def test_an_overflow_is_skipped_and_recorded() -> None:
    """Both scalers skip the second step and halve their scale. In bf16 they are off."""
    task = Line()
    task.overflow_at = 2
    _, native, ours = trained(task)
    assert native.record.skipped_steps == ours.record.skipped_steps == [2]
    assert native.record.scales == ours.record.scales == [65536.0, 32768.0, 32768.0]
    assert all(run.record.scales == [] for run in trained(Line(), dtype="bf16"))
    assert [run.record.dtype for run in trained(Line(), dtype="fp8")] == ["fp32", "bf16", "fp8"]


def test_the_digits_are_learned_and_the_fault_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In an eighth of its steps: every run learns, the loss scale is at work, the record is complete."""
    results = run_demo(tmp_path, "--model", "digits", "--steps", "40")
    runs = results["tasks"]["digits"]["runs"]
    assert [run["name"] for run in runs] == ["fp32", "torch.amp", "ampkit"]
    assert [run["dtype"] for run in runs] == ["fp32", "fp16", "fp16"]
    assert all(run["held_out"] >= 94 for run in runs)
    assert all(max(run["scales"]) > 65536 for run in runs[1:])
    assert {len(run[key]) for run in runs for key in ("losses", "seconds")} == {40}
    assert results["machine"]["torch"] == torch.__version__
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "in step 2 of 3 the gradient of the output of 3 (Conv2d) overflows" in printed
    assert results["fault"]["module"] == "3"
    assert "first bad: 3" in results["fault"]["report"]
    steps = [line.split()[-1] for line in printed.splitlines() if line.startswith("  step ") and "scale" in line]
    assert steps == ["taken", "skipped", "taken"]


class Short(demo.Characters):
    """Small batches, a small model, and a page of held-out text."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, batch_size=4)
        self.test = self.test[:2000]

    def model(self) -> nn.Module:
        return demo.CharGPT(len(self.alphabet), width=32, depth=1, heads=2)


def test_the_text_model_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In bf16 by default on a CPU; all three stay close, and the table says so."""
    monkeypatch.setitem(demo.TASKS, "gpt", Short)
    runs = run_demo(tmp_path, "--model", "gpt", "--steps", "12")["tasks"]["gpt"]["runs"]
    bits = [run["held_out"] for run in runs]
    assert all(3 < value < 6 for value in bits)
    assert max(bits) - min(bits) < 0.05
    row = f"ampkit     bf16   {runs[2]['losses'][-1]:.4f}     {bits[2]:.2f} bits/char"
    assert row in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and exit code 130. Before the first step nothing is written over an earlier run."""
    monkeypatch.setitem(demo.TASKS, "digits", Line)
    (tmp_path / "results.json").write_text('"of an earlier run"')
    for at, words in ((1, "no step was taken"), (8, "what was measured is in")):
        monkeypatch.setattr(Line, "interrupt_at", at)
        results = run_demo(tmp_path, "--model", "digits", code=130)
        assert f"\ninterrupted; {words}" in (printed := capsys.readouterr().err)
        assert printed.count("\n") == 2
        assert (results == "of an earlier run") is (at == 1)
    assert sorted(len(run["losses"]) for run in results["tasks"]["digits"]["runs"]) == [2, 2, 3]


def test_bad_options_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for arguments, message in (
        (["--steps", "0"], "--steps: expected 1 or more, got 0"),
        (["--seed", "1" * 30], "with seed 1111"),
        (["--device", "warp"], "cannot use device 'warp'"),
        (["--out", str(tmp_path / "file" / "out")], "--out: cannot write into"),
    ):
        with pytest.raises(SystemExit) as stopped:
            demo.main(["--out", str(tmp_path / "out"), *arguments])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "results.json").exists()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(SystemExit):
        demo.main(["--out", str(tmp_path)])
    assert "needs sklearn; install both with: pip install matplotlib scikit-learn" in capsys.readouterr().err
