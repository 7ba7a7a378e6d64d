"""The examples run and show what their docstrings say. tests/debugging and tests/integration have those for debugging,
the demo and pretraining; tests/docs/test_docs.py has those behind pictures."""

import json
import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ampkit import GradScaler, autocast
from tests.helpers.one_page import trainings
from tests.helpers.paths import EXAMPLES, ROOT
from tests.helpers.processes import fresh_python
from tests.helpers.ranks import on_ranks, run_script


def run(name: str, *arguments: Any, **options: Any) -> Any:
    """What an example's `main` returns."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](*arguments, **options)


def test_every_example_is_run_by_a_test() -> None:
    """By its name in this file; the demo, the debugging tools' and the pictures' elsewhere."""
    text = Path(__file__).read_text(encoding="utf-8")
    assert [
        path.stem
        for path in EXAMPLES.glob("*.py")
        if not path.stem.startswith(("debug_", "demo", "why_")) and path.stem not in text
    ] == []


def test_the_gallery_lists_every_example_once() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\w+)\]\(\.\./examples/(\w+)\.py\) \|", page, re.MULTILINE)
    assert [pair for pair in listed if pair[0] != pair[1]] == []
    assert sorted(name for name, _ in listed) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


def test_the_tutorial_learns_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every step; the last one, stopped after 60 steps, ends as if it had not been, and logs the scale."""
    monkeypatch.chdir(tmp_path)

    def train(path: Path, steps: int) -> str:
        monkeypatch.setattr("sys.argv", [str(path), str(steps)])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    *others, last = sorted((EXAMPLES / "tutorial").glob("step*.py"))
    assert len(others) == 5
    for path in others:
        (tmp_path / "digits.pt").unlink(missing_ok=True)
        assert float(train(path, 60).partition("%")[0]) > 80
    (tmp_path / "digits.pt").unlink()
    whole = train(last, 100)
    weights = torch.load(tmp_path / "digits.pt")["model"]
    (tmp_path / "digits.pt").unlink()
    (tmp_path / "digits.jsonl").unlink()
    train(last, 60)  # saved in step 50
    assert train(last, 100) == whole
    torch.testing.assert_close(torch.load(tmp_path / "digits.pt")["model"], weights, rtol=0, atol=0)
    with pytest.raises(SystemExit, match=r"digits\.pt has 100 steps, and this run ends at 100"):
        train(last, 100)
    rows = [json.loads(line) for line in (tmp_path / "digits.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(0, 60, 10), *range(50, 100, 10)]
    assert rows[-1]["loss_scale"] > 1


def test_adapters_learn_and_frozen_weights_are_cast_once() -> None:
    pytest.importorskip("peft", reason="it is in ampkit[dev]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers' own, of its names
        losses = run("lora_peft", 12)
    assert losses[-1] < losses[0]


def test_products_with_a_float32_result_round_less(capsys: pytest.CaptureFixture[str]) -> None:
    """The programs of docs/recipes.md, which shows what they print."""
    bfloat16, float32_logits, float16 = map(sum, run("rl_logprob_gap", 10).values())
    assert 4 * float16 < float32_logits < bfloat16
    picked = run("moe_router", 30)
    assert picked["float32 scores"] < 0.5 * picked["bfloat16 scores"]
    number = re.compile(r"\d+\.\d+(e[+-]\d+)?")
    page = number.sub("#", (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")).splitlines()
    printed = number.sub("#", capsys.readouterr().out).splitlines()
    assert [line for line in printed if line.startswith(("step", "bfloat16", "float32")) and line not in page] == []


def test_offloaded_activations_give_the_same_gradients() -> None:
    plain, offloaded = run("activation_offload")
    assert len(plain) == 4
    assert all(map(torch.equal, plain, offloaded))


@pytest.mark.slow
@pytest.mark.timeout(600)  # a C++ compiler reads torch's headers, some 15 s of an idle core
@pytest.mark.filterwarnings("ignore")  # of the exporters
def test_exports(tmp_path: Path) -> None:
    """ONNX where its packages are installed; AOTInductor compiles C++, here as fast as it can."""
    from torch._inductor import config

    with config.patch({"aot_inductor.compile_wrapper_opt_level": "O0"}):
        assert run("export_aotinductor", str(tmp_path / "model.pt2")) < 0.02
    pytest.importorskip("onnxscript", reason="it is no dependency of the suite")
    program = run("export_onnx", str(tmp_path / "model.onnx"))
    assert [node.op_type for node in program.model.graph] == ["Cast", "Gemm", "Gelu", "Cast", "Gemm"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torchao
def test_torchaos_optimizer_skips() -> None:
    pytest.importorskip("torchao", reason="it is no dependency of the suite")
    losses = run("optim_torchao")
    assert losses[4] == losses[3] > losses[-1]


def test_scaler_loops_reach_their_loss() -> None:
    assert run("scaler_basic") < 4.0
    assert run("scaler_accumulation") < 4.0
    assert run("scaler_gradient_penalty") < 6.0
    seen = run("scaler_two_losses")
    assert seen["steps"] == 40
    assert seen["score"] < 1.0
    assert run("scaler_gan") == {"updates": 40, "steps": 40}
    ours, theirs = run("scaler_resume_from_torch")
    assert ours == theirs == 2.0**19


ONE_PAGE = """
import json, runpy, torch
from tests.helpers.one_page import trainings

page = runpy.run_path("examples/autocast_in_one_page.py")
scaler_page = runpy.run_path("examples/scaler_in_one_page.py")
print(json.dumps(trainings(page["autocast"], scaler_page["GradScaler"])))
first, last = page["main"]()
assert last < 0.7 * first
scales, loss = scaler_page["main"]()
assert scales[0] < 2**24 and max(b / a for a, b in zip(scales, scales[1:])) == 2.0

weight = torch.ones(2, 2, requires_grad=True)
with page["autocast"]("cpu"):
    with page["autocast"]("cpu", enabled=False):
        assert (weight @ weight).dtype is torch.float32
    before = weight @ weight
    with torch.no_grad():
        weight.mul_(2)
    assert len(page["thread"].mode.casts) == 1
    assert torch.equal(4 * before, weight @ weight), "a write in an open region is seen"
assert (weight @ weight).dtype is torch.float32
"""


def test_one_page_programs_train_with_ampkits_bits() -> None:
    """Losses and weights of the demo's models, in a process of their own: they take the dispatch key."""
    scalers: list[GradScaler] = []

    def make_scaler(**options: float) -> GradScaler:
        scalers.append(GradScaler("cpu", **options))
        return scalers[-1]

    expected = trainings(autocast, make_scaler)
    assert json.loads(fresh_python(ONE_PAGE).splitlines()[0]) == expected
    assert {scaler.stats().skips > 0 for scaler in scalers} == {True, False}, "float16 overflows, bfloat16 does not"
    assert len({losses[0] for losses in expected.values()}) == len(expected)
    assert [value for losses in expected.values() for value in losses if "n" in value] == []  # inf, nan


def test_clipping_names_the_skipped_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("scaler_clipping").stats().skips >= 1
    said = (
        "step 6 was skipped:\nlast finite: 2.bias; first non-finite: 2.weight\n  2.weight: 0 inf, 1 NaN of 32 (float32)"
    )
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("name", "last"), [("scaler_ddp", r"weights -?[\d.]+"), ("scaler_fsdp", r"norm [\d.]+")])
def test_two_ranks_end_alike(name: str, last: str) -> None:
    printed = "".join(on_ranks(run_script, EXAMPLES / f"{name}.py"))
    seen = dict(re.findall(rf"rank (\d): 1 skipped, scale 512, ({last})", printed))
    assert set(seen) == {"0", "1"}, printed
    assert seen["0"] == seen["1"]


@pytest.mark.parametrize("name", ["pretrain", "ranks_resume", "scaler_ddp", "scaler_fsdp"])
def test_without_torchrun_the_command_is_printed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(EXAMPLES / f"{name}.py")
    monkeypatch.setattr("sys.argv", [path])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match=rf"start it with: torchrun --nproc-per-node 2 examples/{name}\.py$"):
        runpy.run_path(path, run_name="__main__")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    """Weights, optimizer, scale and counts: the second half ends where an uninterrupted run ends.

    It passes over a newer checkpoint that a kill has left without `.metadata`.
    """

    def loss(how: str, folder: str, ranks: int, steps: int) -> float:
        arguments = (EXAMPLES / "ranks_resume.py", how, tmp_path / folder, steps)
        printed = on_ranks(run_script, *arguments, world=ranks)[0]
        match = re.fullmatch(rf"{how} on {ranks}, step {steps}: loss ([\d.]+), 1 skipped, scale 512\n", printed)
        assert match, printed
        return float(match[1])

    whole = loss("ddp", "whole", 1, 12)
    for how, first, then in (("fsdp", 2, 1), ("tensor", 1, 2)):
        assert loss(how, how, first, 6) > 1.3 * whole, "half of the steps"
        (tmp_path / how / "step9").mkdir()
        (tmp_path / how / "step9" / "__0_0.distcp").write_bytes(b"half of the data")
        assert loss(how, how, then, 12) == pytest.approx(whole, rel=1e-3)


def test_bfloat16_weights_learn() -> None:
    (found,) = run("optim_bfloat16", ["--steps", "8", "--only", "stochastic moments"]).values()
    assert found[-1] < 5.8  # bits per character; 6.6 before training


def test_levels_reach_their_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("levels_resnet", "O2", epochs=3) > 0.8
    assert "checkpoint in torch.float32, weights in torch.bfloat16" in capsys.readouterr().out
    assert run("levels_accumulation", True, epochs=2) > 0.94
    assert run("levels_several", steps=200) < 0.9
    rows = run("levels_compare", "bf16", epochs=1)
    assert {level: row for level, row in rows.items() if row["accuracy"] <= 0.9 or row["ms"] <= 0} == {}
    held = {level: round(row["bytes"], 1) for level, row in rows.items()}
    assert held == {"O0": 12.0, "O1": 12.0, "O2": 14.0, "O3": 6.0}


def test_fp16_optimizer_bert(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((), ("--fp16", "--loss_scale", "128")):
        assert run("fp16_optimizer_bert", [*arguments, "--device", "cpu", "--num_train_epochs", "4"]) > 0.8
        assert ("torch.float16, loss scale 128" in capsys.readouterr().out) is bool(arguments)


def test_data_parallel() -> None:
    low = torch.float16 if torch.cuda.is_available() else torch.bfloat16
    assert run("data_parallel") == {"Plain": [torch.float32] * 2, "Decorated": [low] * 2, "DataParallel": [low]}


def test_half_models(capsys: pytest.CaptureFixture[str]) -> None:
    changed = run("half_deployment")
    assert changed["0 in float32"] <= 0.005 < 0.02 < changed["all half"]
    assert "\n0                  1  0.00e+00   2.03e-01          0\n" in capsys.readouterr().out
    errors = run("half_rnn")
    assert len(errors) == 4
    bounds = {name: 2e-3 if "float16" in name.split()[1:] else 2e-2 for name in errors}
    assert {name: error for name, error in errors.items() if not error < bounds[name]} == {}


def test_accelerate(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate", reason="it is in ampkit[dev]")
    assert run("loops_accelerate") == pytest.approx(0.01 * 0.99**7)  # eight steps, one of them skipped
    said = "step 5 was skipped:\nlast finite: 0.bias; first non-finite: 0.weight\n  0.weight: 0 inf, 1 NaN"
    assert said in capsys.readouterr().out


def test_transformers() -> None:
    pytest.importorskip("transformers", reason="it is in ampkit[dev]")
    pytest.importorskip("accelerate", reason="it is in ampkit[dev]")
    rows = [row for row in run("loops_transformers") if "grad_norm" in row]
    assert len(rows) == 8
    assert [row for row in rows if not (row["grad_norm"] < 2.0 and row["loss_scale"] > 1.0)] == []


@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::DeprecationWarning:lightning")
@pytest.mark.filterwarnings("ignore::FutureWarning:lightning")
def test_lightning() -> None:
    pytest.importorskip("lightning", reason="it is in ampkit[dev]")
    metrics, loss = run("loops_lightning")
    assert set(metrics) == {"loss_scale", "skipped_steps"}
    assert loss < 12.0
