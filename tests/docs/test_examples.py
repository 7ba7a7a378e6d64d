"""The examples for levels, FP16Optimizer and half inference run, and show what they say they show."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MINE = (
    "data_parallel", "fp16_optimizer_bert", "half_deployment", "half_rnn", "levels_accumulation", "levels_compare",
    "levels_resnet", "levels_several",
)


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_by_a_test() -> None:
    """The demo, and those for the scaler, the debugging tools, other loops and several ranks, are tested elsewhere."""
    elsewhere = ("scaler_", "debug_", "loops_", "ranks_", "demo")
    found = {path.stem for path in EXAMPLES.glob("*.py") if not path.stem.startswith(elsewhere)}
    assert found == set(MINE)
    scaler = {path.stem for path in EXAMPLES.glob("scaler_*.py")}
    # autocast with a scaler, clipping after unscale_, gradient penalty, several losses and optimizers
    assert {"scaler_basic", "scaler_clipping", "scaler_gradient_penalty", "scaler_two_losses", "scaler_gan"} <= scaler


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_levels_resnet(opt_level: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load("levels_resnet").main(opt_level, epochs=3) > 0.8
    printed = capsys.readouterr().out
    assert printed.startswith(f"ampkit {opt_level} in bfloat16")
    weights = "torch.float32" if opt_level == "O1" else "torch.bfloat16"
    assert f"checkpoint in torch.float32, weights in {weights}" in printed


@pytest.mark.parametrize("delay", [False, True])
def test_levels_accumulation(delay: bool) -> None:
    assert load("levels_accumulation").main(delay, epochs=4) > 0.94


def test_levels_several() -> None:
    assert load("levels_several").main(steps=400) < 0.7


@pytest.mark.parametrize("dtype", ["bf16"])
def test_levels_compare(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = load("levels_compare").main(dtype, epochs=3)
    assert list(rows) == ["O0", "O1", "O2", "O3"]
    assert all(row["accuracy"] > 0.9 and row["ms"] > 0 for row in rows.values())
    held = {level: round(row["bytes"], 1) for level, row in rows.items()}
    assert held == {"O0": 12.0, "O1": 12.0, "O2": 14.0, "O3": 6.0}
    assert len(capsys.readouterr().out.splitlines()) == 5


@pytest.mark.parametrize(
    "arguments", [(), ("--fp16",), ("--fp16", "--loss_scale", "128")], ids=["fp32", "dynamic", "static"]
)
def test_fp16_optimizer_bert(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = load("fp16_optimizer_bert").main([*arguments, "--device", "cpu", "--num_train_epochs", "4"])
    assert accuracy > 0.8
    printed = capsys.readouterr().out
    assert ("torch.float16, loss scale" in printed) is bool(arguments)
    assert ("loss scale 128" in printed) is ("128" in arguments)


def test_data_parallel() -> None:
    found = load("data_parallel").main()
    low = torch.float16 if torch.cuda.is_available() else torch.bfloat16
    assert found == {"Plain": [torch.float32] * 2, "Decorated": [low] * 2, "DataParallel": [low]}


def test_half_deployment(capsys: pytest.CaptureFixture[str]) -> None:
    changed = load("half_deployment").main()
    assert changed["as advised"] <= 0.005 < 0.02 < changed["all half"]
    assert "worth keeping in float32: 0 (output error 1.89e-01 -> " in capsys.readouterr().out


def test_half_rnn() -> None:
    errors = load("half_rnn").main()
    assert len(errors) == 4
    assert all(error < (2e-3 if "float16" in name.split()[1:] else 2e-2) for name, error in errors.items())
