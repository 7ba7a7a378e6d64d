"""Reports as files; the command on scripts that end in every way."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampkit import autocast, debugging
from ampkit.__main__ import main
from ampkit.debugging.report import NonFiniteReport


def found() -> NonFiniteReport:
    """Findings of several kinds."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[1].weight.fill_(1e6)
    with debugging.detect_nonfinite(model, on_found="record") as report:
        with autocast("cpu", dtype=torch.float16):
            model(torch.full((2, 4), 100.0)).sum().backward()
        torch.full((1,), 800.0).exp().sum()
    assert len(report.findings) >= 2
    return report


def test_every_key_is_on_the_page() -> None:
    """A field that is added to a report without a word about it is found here."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "debugging.md").read_text()

    def keys(value: Any) -> set[str]:
        if isinstance(value, list):
            return {key for one in value for key in keys(one)}
        return set(value) | keys(list(value.values())) if isinstance(value, dict) else set()

    model = nn.Linear(4, 1).bfloat16()
    precision = debugging.compare_precision(lambda: model(torch.ones(2, 4).bfloat16()).sum().backward(), model)
    names = {*precision.opaque, *precision.given, *precision.gradients}
    for data in map(json.loads, (found().to_json(), precision.to_json())):
        assert not {key for key in keys(data) - names if f"`{key}`" not in page}


# --- the command


SCRIPT = """
import sys, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.ones(2, 4)).sum()
    if step == int(sys.argv[1]):
        loss = loss - loss.detach() + (0 * loss).log()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("the end", __name__, sys.argv)
"""


PRECISION_SCRIPT = """
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
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def test_debug_nonfinite(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The user's script, unchanged: found, clean, too short, absent."""
    file = tmp_path / "r{rank}.json"
    assert main(["debug", "nonfinite", "--json", str(file), script, "2"]) == 1
    printed = capsys.readouterr().out
    assert "the end" not in printed
    assert "the loss is -inf in step 2" in printed
    assert "aten::log, " in printed
    assert "train.py:8" in printed
    written = str(file).replace("{rank}", "0")
    assert f"{json.loads(Path(written).read_text())['text']}\n" == printed
    assert main(["debug", "nonfinite", script, "9", "--flag"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"the end __main__ {[script, '9', '--flag']}\n")
    assert "no inf or NaN reached a loss" in out
    assert "in 4 steps" in out
    assert main(["debug", "nonfinite", "--from-step", "2", script, "3"]) == 1
    assert "the loss is -inf in step 3" in capsys.readouterr().out
    assert main(["debug", "nonfinite", "--from-step", "3", script, "2"]) == 1   # the parameter is broken by then
    assert "look at what wrote" in capsys.readouterr().out
    assert main(["debug", "nonfinite", str(tmp_path / "no.py")]) == 2
    assert "no.py is no file; expected the training script" in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["nonfinite", "precision"])
@pytest.mark.parametrize(("body", "code", "says"), [
    ("import sys; sys.exit(4)", 3, "the script ended with exit code 4"),
    ("raise KeyError('mine')", 3, "the script failed with KeyError: 'mine'"),
    ("raise KeyboardInterrupt", 130, "the script was interrupted"),
])
def test_a_script_that_does_not_run_to_its_end_is_inconclusive(
    tool: str, body: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the text, the file and the exit code. It may go to another folder."""
    monkeypatch.chdir(tmp_path)
    script, file = tmp_path / "s.py", tmp_path / "r.json"
    script.write_text(f"import os, torch\nos.chdir('/')\ntorch.ones(1).exp()\n{body}\n")
    assert main(["debug", tool, "--json", "r.json", str(script)]) == code
    assert f"inconclusive: {says}" in capsys.readouterr().out
    assert json.loads(file.read_text())["status"] == "inconclusive"


def test_debug_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One step is compared, and the script ends, also where it catches everything; an overflow is a finding."""
    script, file = tmp_path / "train.py", tmp_path / "report.json"
    script.write_text(PRECISION_SCRIPT)
    assert main(["debug", "precision", "--at-step", "2", "--json", str(file), str(script), "9", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step 0\nstep 1\ngradients are ")    # the third one's optimizer has stepped, and that is all
    assert out.count("\nstep ") == 1
    assert "in step 2, against the same step in float32" in out
    assert f"{script}:10" in out
    assert set(json.loads(file.read_text())["gradients"]) == {"weight", "bias"}
    assert main(["debug", "precision", str(script), "2", "1e6"]) == 1


def test_a_script_that_ends_too_early_is_inconclusive(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Too few steps, or nothing but a loss that a loop prints after its last one."""
    for tool, option in (("nonfinite", "--from-step"), ("precision", "--at-step")):
        assert main(["debug", tool, option, "9", script, "9"]) == 3
        assert "inconclusive: the script ended before step 9" in capsys.readouterr().out
    Path(script).write_text(SCRIPT + "print(float(loss.detach()) + float(torch.ones(2).mean()))")
    assert main(["debug", "nonfinite", "--from-step", "4", script, "9"]) == 3
    assert "ended before step 4, and nothing was looked at. Steps that a scaler" in capsys.readouterr().out


def test_a_body_that_raises_leaves_an_inconclusive_report() -> None:
    """Also without the command."""
    with pytest.raises(KeyError), debugging.detect_nonfinite(nn.Linear(1, 1)) as report:
        raise KeyError
    assert (report.status, str(report).partition(":")[0]) == ("inconclusive", "inconclusive")


@pytest.mark.parametrize("arguments", [["nonfinite", "--json"], ["precision", "--json"], ["monitor", "--out"]])
def test_a_folder_that_is_not_there_is_told_before_the_script_runs(
    arguments: list[str], script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "none" / "f")
    assert main(["debug", *arguments, file, script, "9"]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"ampkit debug: {arguments[1]} is {file}; expected a file in a folder that is there\n"
    assert printed.out == ""


def test_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["debug", "nonfinite", "--from-step", "-1", "train.py"])
    assert "'-1' is no number of steps" in capsys.readouterr().err
