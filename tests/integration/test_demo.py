"""The demo: what it trains on, that its three lanes are comparable, what it reports, and how it stops."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import ampkit
from ampkit import Policy
from ampkit.__main__ import COMMANDS
from ampkit.__main__ import main as ampkit_main
from ampkit.demo import cli, plot, table, tasks, training
from ampkit.demo.data import load_digits, load_text
from ampkit.demo.lanes import Lane, make_lanes
from ampkit.demo.progress import PlainProgress, Progress, RichProgress
from ampkit.demo.results import Results
from ampkit.demo.training import schedule, train

CPU = torch.device("cpu")


class LineTask(tasks.Task):
    """Fit a line in a few microseconds. The factor keeps scaled fp16 gradients from overflowing."""

    name, title, steps, peak_lr, cpu_dtype, metric = "line", "a line", 4, 0.1, "fp16", "error"

    def __init__(self, device: torch.device = CPU) -> None:
        self.seen: list[tuple[int, float]] = []

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def batch(self, generator: torch.Generator) -> tasks.Batch:
        x = torch.randn(8, 2, generator=generator)
        return x, x.sum(1, keepdim=True)

    def held_out(self, model: nn.Module) -> float:
        return model(torch.ones(1, 2)).item()

    def loss(self, model: nn.Module, batch: tasks.Batch) -> Tensor:
        self.seen.append((id(model), batch[0].sum().item()))
        return 0.01 * (model(batch[0]).float() - batch[1]).square().mean()


class OverflowTask(LineTask):
    """The loss of the second step is infinite in every lane."""

    def loss(self, model: nn.Module, batch: tasks.Batch) -> Tensor:
        loss = super().loss(model, batch)
        return loss * math.inf if 3 < len(self.seen) <= 6 else loss


class InterruptedTask(LineTask):
    """Ctrl-C arrives in the middle of the third step."""

    def loss(self, model: nn.Module, batch: tasks.Batch) -> Tensor:
        if len(self.seen) == 7:
            raise KeyboardInterrupt
        return super().loss(model, batch)


class InterruptedAtOnce(LineTask):
    """Ctrl-C arrives in the first step."""

    def loss(self, model: nn.Module, batch: tasks.Batch) -> Tensor:
        raise KeyboardInterrupt


class Silent(Progress):
    def update(self, done: int, lanes: object) -> None: ...
    def note(self, line: str) -> None: ...


def trained(task: tasks.Task, steps: int = 4, dtype: torch.dtype = torch.float16) -> list[Lane]:
    """The lanes of a task after training."""
    lanes = make_lanes(task, CPU, dtype, seed=0)
    train(task, lanes, steps, 0, Silent())
    return lanes


def run_demo(out: Path, *arguments: str) -> dict:
    """Run the command in this process; return what it wrote as JSON."""
    assert cli.main([*arguments, "--device", "cpu", "--out", str(out)]) == 0
    return json.loads((out / "results.json").read_text())


# --- data


def test_digits_are_scaled_and_split() -> None:
    """Every fifth of the 1,797 images is held out; pixels lie in 0..1."""
    digits = load_digits(CPU)
    assert digits.train_images.shape == (1437, 1, 8, 8)
    assert digits.held_out_images.shape == (360, 1, 8, 8)
    assert digits.train_images.amin() == 0
    assert digits.train_images.amax() == 1
    assert set(digits.held_out_labels.tolist()) == set(range(10))


def test_no_held_out_paragraph_was_seen_in_training() -> None:
    """The source repeats itself; the split does not."""
    text = load_text(CPU)
    train_text, held_out = ("".join(text.alphabet[code] for code in part) for part in text[:2])
    paragraphs = [part for part in held_out.split("\n\n") if part.strip()]
    assert len(paragraphs) > 100
    assert not set(paragraphs) & set(train_text.split("\n\n"))
    assert len(held_out) > 10_000
    assert "statement" in train_text


def test_text_targets_are_the_next_characters() -> None:
    """A window's targets are its inputs shifted by one, and held-out windows cover the text once."""
    task = tasks.TextTask(CPU, batch_size=3, context=16)
    inputs, targets = task.batch(torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (3, 16)
    assert inputs[:, 1:].equal(targets[:, :-1])


def test_bits_per_character_of_a_uniform_guess() -> None:
    """A model that knows nothing needs log2 of the alphabet's size."""
    task = tasks.TextTask(CPU)
    size = len(task.data.alphabet)
    bits = task.held_out(lambda codes: torch.zeros(*codes.shape, size))  # type: ignore[arg-type]
    assert bits == pytest.approx(math.log2(size), rel=1e-5)


# --- lanes and training


def test_lanes_start_alike_and_see_the_same_batches_in_turn() -> None:
    """Same weights, same batches; which lane goes first rotates, so that none always runs on a warm cache."""
    task = LineTask()
    lanes = make_lanes(task, CPU, torch.float16, seed=3)
    first = lanes[0].model.state_dict()
    assert all(lane.model.state_dict()[key].equal(first[key]) for lane in lanes for key in first)
    train(task, lanes, 3, 0, Silent())
    order = [model for model, _ in task.seen[:9]]
    a, b, c = (id(lane.model) for lane in lanes)
    assert order == [a, b, c, b, c, a, c, a, b]
    batches = [total for _, total in task.seen[:9]]
    assert [len(set(batches[i : i + 3])) for i in (0, 3, 6)] == [1, 1, 1]
    assert len(set(batches)) == 3


def test_the_same_seed_gives_the_same_run() -> None:
    """Losses repeat to the bit; another seed gives others."""
    first, again = trained(LineTask()), trained(LineTask())
    assert [lane.record.losses for lane in first] == [lane.record.losses for lane in again]
    other = make_lanes(LineTask(), CPU, torch.float16, seed=1)
    assert not other[0].model.weight.equal(make_lanes(LineTask(), CPU, torch.float16, 0)[0].model.weight)


def test_overflow_skips_the_step_and_is_recorded() -> None:
    """Both scalers skip the second step, halve their scale, and leave the weights as they were."""
    fp32, native, ours = trained(OverflowTask(), steps=3)
    assert native.record.skipped_steps == ours.record.skipped_steps == [2]
    assert native.record.scales == ours.record.scales == [65536.0, 32768.0, 32768.0]
    assert ours.model.weight.isfinite().all()
    assert fp32.record.scales == []
    assert not fp32.model.weight.isfinite().all()


def test_bf16_needs_no_loss_scale() -> None:
    """The scalers are off, and nothing is drawn for them."""
    assert all(lane.record.scales == [] for lane in trained(LineTask(), dtype=torch.bfloat16))


def test_memory_is_what_a_step_needed_beyond_what_was_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other lanes' weights do not count; the largest step does."""
    peaks = iter([1500, 1200, 1900, 1000] * 3)
    counter = SimpleNamespace(
        reset_peak_memory_stats=lambda device: None,
        memory_allocated=lambda device: 1000,
        max_memory_allocated=lambda device: next(peaks),
    )
    monkeypatch.setattr(training, "allocator_of", lambda device: counter)
    lanes = trained(LineTask(), steps=4)
    assert max(lane.record.step_bytes or 0 for lane in lanes) == 900
    assert training.allocator_of(CPU) is counter


def test_a_cpu_reports_no_memory() -> None:
    """There the column is a dash rather than a guess."""
    assert training.allocator_of(CPU) is None


def test_schedule_rises_then_falls() -> None:
    """A linear rise over a tenth of the steps, the peak once, a floor above zero."""
    rates = [schedule(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.05 < rates[-1] < 0.06
    assert schedule(0, 1) == 1


# --- what it reports


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """One whole run of the digits with the default settings."""
    out = tmp_path_factory.mktemp("digits")
    return run_demo(out, "--model", "digits"), out


def test_digits_reach_97_percent_in_every_lane(digits_run: tuple[dict, Path]) -> None:
    """The promise of the README, on data that no lane trained on."""
    lanes = digits_run[0]["tasks"][0]["lanes"]
    assert [lane["name"] for lane in lanes] == ["fp32", "torch.amp", "ampkit"]
    assert [lane["dtype"] for lane in lanes] == ["fp32", "fp16", "fp16"]
    assert all(lane["record"]["held_out"] >= 97 for lane in lanes)


def test_the_loss_scale_is_at_work_by_default(digits_run: tuple[dict, Path]) -> None:
    """It grows until a step overflows, in both mixed lanes."""
    for lane in digits_run[0]["tasks"][0]["lanes"][1:]:
        assert max(lane["record"]["scales"]) > 65536
        assert lane["record"]["skipped_steps"]


def test_the_record_is_complete(digits_run: tuple[dict, Path]) -> None:
    """A value per step and lane, the machine, and a picture."""
    results, out = digits_run
    task = results["tasks"][0]
    assert task["finished"] is True
    assert {len(lane["record"][key]) for lane in task["lanes"] for key in ("losses", "seconds")} == {300}
    assert results["machine"]["torch"] == torch.__version__
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_text_model_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In bf16 by default on a CPU; the mixed lanes stay close to fp32, and the closing table says so."""
    lanes = run_demo(tmp_path, "--model", "gpt", "--steps", "12")["tasks"][0]["lanes"]
    bits = [lane["record"]["held_out"] for lane in lanes]
    assert [lane["dtype"] for lane in lanes] == ["fp32", "bf16", "bf16"]
    assert all(3 < value < 5.5 for value in bits)
    assert max(bits) - min(bits) < 0.05
    printed = capsys.readouterr().out
    assert f"ampkit     bf16   {lanes[2]['record']['losses'][-1]:.4f}     {bits[2]:.2f} bits/char" in printed


def results_of(lanes: list[Lane]) -> Results:
    results = Results(0, "cpu")
    results.add(LineTask(), lanes, 4)
    return results


def test_table_says_what_is_missing() -> None:
    """A dash where a run was cut short or the device reports nothing; a ratio against torch.amp."""
    lanes = trained(LineTask())
    lanes[1].record.seconds[:] = [0.002] * 3
    lanes[2].record.seconds[:] = [0.001] * 3
    lanes[2].record.held_out = None
    rows = table.rows_of(results_of(lanes))
    assert rows[2][4:] == ("-", "1.0", "0.50x", "0/4", "-")
    assert rows[0][7] == "-"
    assert table.rows_of(results_of(make_lanes(LineTask(), CPU, torch.float16, 0))) == []


def test_table_with_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal the same cells are drawn in a frame."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    table.print_table(results_of(trained(LineTask())))
    printed = capsys.readouterr().out
    assert "torch.amp" in printed
    assert "┃" in printed


def test_progress_with_and_without_rich(capsys: pytest.CaptureFixture[str]) -> None:
    """Bars name each lane with its loss and scale; plain lines come at every tenth and at the end."""
    lanes = trained(LineTask(), steps=3)
    with RichProgress(3, lanes) as bars:
        bars.update(3, lanes)
    drawn = capsys.readouterr().out
    assert all(lane.name in drawn for lane in lanes)
    assert "3/3" in drawn
    with PlainProgress(25) as lines:
        for done in range(1, 26):
            lines.update(done, lanes)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [
        f"{done}/25" for done in (*range(2, 25, 2), 25)
    ]


def test_smoothing_starts_at_the_first_value() -> None:
    """Without the correction the curve would rise from zero."""
    assert plot.smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])


# --- how it stops


def test_interrupt_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 130, and both files with the finished steps."""
    monkeypatch.setitem(tasks.TASKS, "digits", InterruptedTask)
    assert cli.main(["--model", "digits", "--device", "cpu", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == f"\ninterrupted; what was measured until now is in {tmp_path}\n"
    task = json.loads((tmp_path / "results.json").read_text())["tasks"][0]
    assert task["finished"] is False
    assert sorted(len(lane["record"]["losses"]) for lane in task["lanes"]) == [2, 2, 3]
    assert (tmp_path / "curves.png").exists()


def test_interrupt_before_the_first_step_keeps_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was measured, so nothing is written, and no empty file is left where there was none."""
    monkeypatch.setitem(tasks.TASKS, "digits", InterruptedAtOnce)
    command = ["--model", "digits", "--device", "cpu", "--out", str(tmp_path)]
    assert cli.main(command) == 130
    assert capsys.readouterr().err == "\ninterrupted; nothing was measured yet\n"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "results.json").write_text("of an earlier run")
    assert cli.main(command) == 130
    assert (tmp_path / "results.json").read_text() == "of an earlier run"


def test_a_file_appears_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing that fails halfway leaves the earlier file, and nothing else."""
    (tmp_path / "results.json").write_text("of an earlier run")

    def halfway(self: Results, path: Path) -> None:
        path.write_text("{")
        raise OSError("disk full")

    monkeypatch.setitem(tasks.TASKS, "digits", LineTask)
    monkeypatch.setattr(Results, "write", halfway)
    with pytest.raises(OSError, match="disk full"):
        cli.main(["--model", "digits", "--device", "cpu", "--out", str(tmp_path)])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of an earlier run"]


@pytest.mark.skipif(os.name != "posix", reason="makes symbolic links")
def test_results_are_written_through_no_link_but_the_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may be a link; a link put where a result goes is replaced, and what it names left alone."""
    monkeypatch.setitem(tasks.TASKS, "digits", LineTask)
    folder, precious = tmp_path / "folder", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("of somebody else")
    for name in ("results.json", "curves.png", ".results.part.json", ".curves.part.png"):
        (folder / name).symlink_to(precious)
    (tmp_path / "link").symlink_to(folder)
    run_demo(tmp_path / "link", "--model", "digits")
    assert precious.read_text() == "of somebody else"
    assert not (folder / "results.json").is_symlink()
    assert len(list(folder.iterdir())) == 4


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT to a process")
def test_ctrl_c_in_a_real_process(tmp_path: Path) -> None:
    """The whole command ends with one line and no traceback."""
    root = Path(__file__).resolve().parents[2]
    search = os.pathsep.join((str(root), str(root / "kernels")))
    command = [sys.executable, "-m", "ampkit", "demo", "--model", "digits", "--device", "cpu"]
    with subprocess.Popen(
        [*command, "--steps", "100000", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        while "lanes use fp16" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    line, = errors.strip().splitlines()
    assert line.startswith("interrupted; ")     # whether a step was measured depends on the machine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: expected a whole number of at least 1, got '0'"),
        (["--steps", "many"], "--steps: expected a whole number of at least 1, got 'many'"),
        (["--model", "resnet"], "--model: invalid choice: 'resnet'"),
        (["--dtype", "fp8"], "--dtype: invalid choice: 'fp8'"),
        (["--seed", "x"], "--seed: expected a whole number of 64 bits, got 'x'"),
        (["--seed", "1" * 30], "--seed: expected a whole number of 64 bits"),
        (["--device", "warp"], "--device: cannot use 'warp' here"),
        (["--device", "meta"], "--device: cannot use 'meta' here"),
        (["--surprise"], "unrecognized arguments: --surprise"),
    ],
)
def test_bad_values_get_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, nothing trained, no usage text to scroll past."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments, "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("ampkit demo: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_unwritable_folder_is_said_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two minutes of training are not thrown away at the end."""
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        cli.main(["--out", str(tmp_path / "file" / "out")])
    assert "--out: cannot write into" in capsys.readouterr().err


def test_missing_extras_are_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that can be pasted; the text model needs no scikit-learn."""
    found = importlib.util.find_spec
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "sklearn" else found(name))
    with pytest.raises(SystemExit):
        cli.main(["--out", str(tmp_path)])
    expected = "ampkit demo: needs scikit-learn; install with: pip install scikit-learn\n"
    assert capsys.readouterr().err == expected
    cli._require_extras(cli._parser(), ["gpt"])


# --- the command


def test_commands_exist_and_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command of the table has a module with `main`; the help names them all."""
    with pytest.raises(SystemExit) as stopped:
        ampkit_main(["--help"])
    assert stopped.value.code == 0
    listed = capsys.readouterr().out
    for name, (module, what) in COMMANDS.items():
        assert f"  {name:14s}{what}" in listed
        assert callable(importlib.import_module(module).main)


def test_a_bare_command_shows_the_help_and_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert ampkit_main([]) == 0
    assert "usage: ampkit" in capsys.readouterr().out
    assert ampkit_main(["--version"]) == 0
    assert capsys.readouterr().out == f"ampkit {ampkit.__version__}, torch {torch.__version__}\n"


def test_the_rules_of_one_operator_or_device_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert ampkit_main(["policy-table", "--op", "softmax.int", "--device", "cuda"]) == 0
    assert capsys.readouterr().out.split() == ["cuda", "aten::softmax.int", "FLOAT32_DTYPE_ARG"]
    assert ampkit_main(["policy-table", "--plain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(len(Policy.default(device).rules()) for device in ("cpu", "cuda"))
    with pytest.raises(SystemExit) as stopped:
        ampkit_main(["policy-table", "--op", "sftmax"])
    assert stopped.value.code == 2
    assert "unknown operator 'sftmax'" in capsys.readouterr().err


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With the choices."""
    with pytest.raises(SystemExit):
        ampkit_main(["tune"])
    assert "invalid choice: 'tune'" in capsys.readouterr().err


def test_arguments_after_the_command_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """`ampkit demo --help` is the demo's help."""
    with pytest.raises(SystemExit):
        ampkit_main(["demo", "--help"])
    assert "--growth" not in (printed := capsys.readouterr().out)
    assert "usage: ampkit demo" in printed


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (BrokenPipeError, 141)])
def test_a_command_that_is_cut_off_ends_without_a_traceback(
    error: type[BaseException], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C, also while its module is imported, and a reader such as `head` that has seen enough."""
    def cut_off(name: str) -> None:
        raise error

    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(importlib, "import_module", cut_off)
        assert ampkit_main(["doctor"]) == code
