"""The scaler's examples run, and show what they say they show."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROOT = EXAMPLES.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_basic() -> None:
    assert load("scaler_basic").main() < 4.0


def test_two_losses() -> None:
    seen = load("scaler_two_losses").main()
    assert seen["steps"] == 40
    assert seen["score"] < 1.0


def test_accumulation() -> None:
    assert load("scaler_accumulation").main() < 4.0


def test_gradient_penalty() -> None:
    assert load("scaler_gradient_penalty").main() < 6.0


def test_clipping(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    scaler = load("scaler_clipping").main(picture=tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 5000
    assert scaler.stats().skips >= 1
    assert "step 6 was skipped:\n2.weight: 0 inf, 1 NaN of 32 (float32)" in capsys.readouterr().out


def test_gan() -> None:
    assert load("scaler_gan").main() == {"updates": 40, "steps": 40}


def test_resume_from_torch() -> None:
    ours, theirs = load("scaler_resume_from_torch").main()
    assert ours == theirs == 2.0**19


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("scaler_ddp", r"rank (\d): 1 skipped, scale 512, (weights -?[\d.]+)"),
        ("scaler_fsdp", r"rank (\d): 1 skipped, scale 512, (norm [\d.]+)"),
    ],
)
def test_on_two_ranks(name, pattern) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    for _ in range(2):
        ran = subprocess.run(
            [*command, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, env=environment, timeout=100
        )
        if "terminate called without an active exception" not in ran.stderr:
            break       # else torch has torn down a thread of gloo's that was running still, seen once in many runs
    assert ran.returncode == 0, ran.stderr[-3000:]
    seen = dict(re.findall(pattern, ran.stdout))
    assert set(seen) == {"0", "1"}, ran.stdout
    assert seen["0"] == seen["1"], "both ranks end alike"
