"""Reports as files; the command on scripts that end in every way."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampkit import autocast, debugging
from ampkit.__main__ import main
from ampkit.debugging.examine import Examination
from ampkit.debugging.rehearsal import RehearsalReport
from ampkit.debugging.report import NonFiniteReport
from tests.debugging.models import filled


def found() -> NonFiniteReport:
    """Findings of several kinds."""
    model = filled(nn.Sequential(nn.Linear(4, 1)), 1e6)
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
            return {key for item in value for key in keys(item)}
        return set(value) | keys(list(value.values())) if isinstance(value, dict) else set()

    model = nn.Linear(4, 1).bfloat16()
    precision = debugging.compare_precision(lambda: model(torch.ones(2, 4).bfloat16()).sum().backward(), model)
    with Examination(model) as examined:
        model(torch.full((2, 4), 3e38).bfloat16() * 10).sum().backward()
    assert examined
    names = {*precision.opaque, *precision.given, *precision.gradients, *precision.loss_changes}
    reports = found(), precision, RehearsalReport(), examined
    for data in (json.loads(report.to_json()) for report in reports):
        assert {key for key in keys(data) - names if f"`{key}`" not in page} == set()


# --- the command


SCRIPT = """
import sys, torch
steps, broken = map(int, sys.argv[1:])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.full((2, 4), 1.1 + step)).float().mean()
    if step == broken:
        loss = loss - loss.detach() + (0 * loss).log()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step)
print("the end", __name__, sys.argv)
"""


class Command:
    """`ampkit debug` on a script, and what it printed."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys, self.script = folder, capsys, str(folder / "train.py")
        self.write(SCRIPT)

    def write(self, text: str) -> None:
        Path(self.script).write_text(text)

    def __call__(self, tool: str, *arguments: str) -> int:
        """The exit code of a tool; its options, then the script's: how many steps, and which is broken."""
        *options, steps, broken = arguments
        self.capsys.readouterr()
        code = main(["debug", tool, *options, self.script, steps, broken])
        self.out, self.err = self.capsys.readouterr()
        return code


@pytest.fixture
def debug(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(tmp_path, capsys)


def test_debug_nonfinite(debug: Command) -> None:
    """The user's script, unchanged: found, clean, too short, absent."""
    assert debug("nonfinite", "--json", "r{rank}.json", "4", "2") == 1
    assert "the end" not in debug.out
    assert "the loss is -inf in step 2" in debug.out
    assert "aten::log, " in debug.out
    assert "train.py:11" in debug.out
    assert debug.out.endswith(f"step 1\n{json.loads(Path('r0.json').read_text())['text']}\n")
    assert debug("nonfinite", "4", "9") == 0
    assert f"the end __main__ {[debug.script, '4', '9']}\n" in debug.out
    assert "no inf or NaN reached a loss" in debug.out
    assert "in 4 steps" in debug.out
    assert debug("nonfinite", "--from-step", "2", "4", "3") == 1
    assert "the loss is -inf in step 3" in debug.out
    assert debug("nonfinite", "--from-step", "3", "4", "2") == 1  # the parameter is broken by then
    assert "look at what wrote" in debug.out
    Path(debug.script).unlink()
    assert debug("nonfinite", "4", "2") == 2
    assert "train.py is not a file; expected the training script" in debug.err


@pytest.mark.parametrize("tool", ["nonfinite", "precision"])
@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("import sys; sys.exit(4)", 3, "the script ended with exit code 4"),
        ("raise KeyError('mine')", 3, "the script failed with KeyError: 'mine'"),
        ("raise KeyboardInterrupt", 130, "the script was interrupted"),
    ],
)
def test_a_script_that_does_not_run_to_its_end_is_inconclusive(
    debug: Command, tool: str, body: str, code: int, says: str
) -> None:
    """In the text, the file and the exit code. It may go to another folder."""
    debug.write(f"import os, torch\nos.chdir('/')\ntorch.ones(1).exp()\n{body}\n")
    assert debug(tool, "--json", "r.json", "4", "9") == code
    assert f"inconclusive: {says}" in debug.out
    assert json.loads((debug.folder / "r.json").read_text())["status"] == "inconclusive"


def test_debug_precision(debug: Command) -> None:
    """One step is compared, and the script ends, also where it catches everything; an overflow is a finding."""
    debug.write(f"try:{textwrap.indent(SCRIPT, '    ')}except Exception:\n    print('swallowed')\n")
    assert debug("precision", "--at-step", "2", "--json", "r.json", "9", "99") == 0
    assert debug.out.startswith("step 0\nstep 1\ngradients are ")  # step 2 ends before its print
    assert debug.out.count("\nstep ") == 1
    assert "in step 2, against the same step in float32" in debug.out
    assert "train.py:9" in debug.out
    assert set(json.loads(Path("r.json").read_text())["gradients"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    debug.write(SCRIPT.replace("loss.backward", "(loss * 1e6).backward"))
    assert debug("precision", "2", "9") == 1


def test_a_script_that_ends_too_early_is_inconclusive(debug: Command) -> None:
    """Too few steps, or nothing but a loss that a loop prints after its last one."""
    for tool, option in (("nonfinite", "--from-step"), ("precision", "--at-step")):
        assert debug(tool, option, "9", "4", "9") == 3
        assert "inconclusive: the script ended before step 9" in debug.out
    debug.write(SCRIPT + "print(float(loss.detach()) + float(torch.ones(2).mean()))")
    assert debug("nonfinite", "--from-step", "4", "4", "9") == 3
    assert "ended before step 4, and nothing was checked. Steps that a scaler" in debug.out


@pytest.mark.parametrize("tool", [["loop"], ["nonfinite", "--keep-going"], ["precision"]])
def test_every_tool_checks_the_loop(debug: Command, tool: list[str]) -> None:
    """Mistakes of the loop come first in the report."""
    scaled = "torch.amp.GradScaler('cpu').scale(loss).backward"
    float32 = SCRIPT.replace("dtype=torch.float16", "enabled=False")  # the tools have little else to say of it
    debug.write(float32.replace("loss.backward", scaled).replace("print", "str"))
    assert debug(*tool, "3", "9") == 1
    assert debug.out.startswith("the optimizer steps with scaled gradients")


@pytest.mark.parametrize(("tool", "option"), [("nonfinite", "--json"), ("precision", "--json")])
def test_a_missing_folder_is_reported_before_the_script_runs(debug: Command, tool: str, option: str) -> None:
    file = str(debug.folder / "none" / "f")
    assert debug(tool, option, file, "4", "9") == 2
    assert debug.err == f"ampkit debug: {option} is {file}; expected a file in an existing folder\n"
    assert debug.out == ""


def test_bad_input(debug: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        debug("nonfinite", "--from-step", "-1", "4", "9")
    assert "'-1' is not a number of steps" in capsys.readouterr().err
