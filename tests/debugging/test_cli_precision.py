"""`ampkit debug precision` on a script that knows nothing of it."""

import json
from pathlib import Path

import pytest

from ampkit.__main__ import main

SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scale = float(sys.argv[2])
try:
    for step in range(int(sys.argv[1])):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.full((2, 4), 1.1 + step)).float().mean()
        optimizer.zero_grad()
        (loss * scale).backward()
        optimizer.step()
        print("step", step)
except Exception:
    print("swallowed")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return str(file)


def test_one_step_is_compared_and_the_script_ends(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert main(["debug", "precision", "--at-step", "2", "--json", str(file), script, "9", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("\nstep ") == 1
    assert out.startswith("step 0\nstep 1\ngradients")    # the third one's optimizer has stepped, and that is all
    assert "gradients are" in out
    assert "in step 2, against the same step in float32" in out
    assert "rounded" in out
    assert f"{script}:10" in out
    report = json.loads(file.read_text())
    assert (report["kind"], report["version"]) == ("ampkit.debugging.precision", 1)
    assert set(report["gradients"]) == {"weight", "bias"}


def test_an_overflow_is_a_finding(script: str) -> None:
    assert main(["debug", "precision", script, "2", "1e6"]) == 1


def test_a_script_that_ends_before(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "precision", "--at-step", "5", script, "2", "1"]) == 3
    assert "the script ended before step 5, and nothing was looked at" in capsys.readouterr().out


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["debug", "precision", str(tmp_path / "no.py")]) == 2
    assert "is no file; expected the training script" in capsys.readouterr().err
