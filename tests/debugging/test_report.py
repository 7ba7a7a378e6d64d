"""Reports as files; the command on scripts that end in every way."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampkit import autocast
from ampkit.__main__ import main
from ampkit.debugging import Examination
from ampkit.debugging.finding import Cause, Finding, Fix, Operand, Place, Report
from ampkit.debugging.rehearsal import RehearsalReport
from tests.debugging.models import filled


def found() -> Report:
    """Findings of several kinds."""
    model = filled(nn.Sequential(nn.Linear(4, 1)), 1e6)
    with Examination(model) as report:
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

    for data in (json.loads(report.to_json()) for report in (found(), RehearsalReport())):
        assert {key for key in keys(data) if f"`{key}`" not in page} == set()


def test_lines_fit_the_terminal() -> None:
    """Details are indented below their text; without a terminal lines are as long as they are."""
    cause = Cause("overflow", "overflow: the exact result is 2.352e+06; the float16 maximum is 6.55e+04")
    finding = Finding(grade="error", check="nonfinite", cause=cause, what="the loss is NaN", last=39)
    finding.place = Place("train.py", 11, "aten::mm", "1")
    finding.inputs = (Operand("float16", "float16[8, 32] up to 823"),) * 2
    finding.fix = Fix("compute train.py:11 in float32", verified=True, result="loss in step 3: nan -> 0.2")
    report = Report([finding], steps=40, operators=4170)
    assert report.text(60).splitlines() == [
        'error: train.py:11 (aten::mm, module "1"): the loss is NaN',
        "  in steps 0-39",
        "  cause     overflow: the exact result is 2.352e+06; the",
        "            float16 maximum is 6.55e+04",
        "  inputs    float16[8, 32] up to 823, float16[8, 32] up to",
        "            823",
        "  fix       compute train.py:11 in float32",
        "  verified  loss in step 3: nan -> 0.2",
        "checked 4170 operators in 40 steps: 1 error",
    ]
    assert len(report.text().splitlines()) == 6


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

    def __call__(self, *arguments: str) -> int:
        """The exit code; options, then the script's arguments: how many steps, and which has inf."""
        *options, steps, broken = arguments
        self.capsys.readouterr()
        code = main(["debug", *options, self.script, steps, broken])
        self.out, self.err = self.capsys.readouterr()
        return code


@pytest.fixture
def debug(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, in_process: None
) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(tmp_path, capsys)


def test_the_command(debug: Command) -> None:
    """The user's script, unchanged: found, clean, too short, absent."""
    assert debug("--no-verify", "--json", "r{rank}.json", "4", "2") == 1
    assert f"the end __main__ {[debug.script, '4', '2']}\n" in debug.out
    assert "train.py:11 (aten::log): the loss is -inf in step" in debug.out
    assert debug.out.endswith(f"\n{json.loads(Path('r0.json').read_text())['text']}\n")
    assert debug("4", "9") == 0
    assert "in 4 steps: no problems found\ntrains as well in float32: the loss differs by " in debug.out
    assert debug("--no-verify", "--from-step", "2", "4", "3") == 1
    assert "the loss is -inf in step 3" in debug.out
    assert debug("--no-verify", "--from-step", "3", "4", "2") == 1  # the parameter is broken by then
    assert "check the code that wrote" in debug.out
    assert debug("--from-step", "9", "4", "9") == 3
    assert "the script ended before step 9, and no operator was checked" in debug.out
    assert debug("--no-verify", "--from-step", "1", "--steps", "2", "9", "9") == 0
    assert "the end" not in debug.out
    assert "in 2 steps" in debug.out
    Path(debug.script).unlink()
    assert debug("4", "2") == 2
    assert "train.py is not a file; expected the training script" in debug.err


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("import sys; sys.exit(4)", 3, "the script ended with exit code 4"),
        ("import sys; sys.exit('no data')", 3, "the script ended with sys.exit('no data')"),
        ("import os; os._exit(3)", 3, "the script called os._exit(3)"),
        ("raise KeyError('mine')", 3, "the script failed with KeyError: 'mine'"),
        ("raise KeyboardInterrupt", 130, "the script was interrupted"),
    ],
)
def test_a_script_that_does_not_run_to_its_end_is_inconclusive(debug: Command, body: str, code: int, says: str) -> None:
    """In the text, the file and the exit code. It may go to another folder."""
    debug.write(f"import os, torch\nos.chdir('/')\ntorch.ones(1).exp()\n{body}\n")
    assert debug("--json", "r.json", "4", "9") == code
    assert f"the run did not reach its end: {says}\nchecked " in debug.out
    assert json.loads((debug.folder / "r.json").read_text())["status"] == "inconclusive"


def test_a_missing_folder_is_reported_before_the_script_runs(debug: Command) -> None:
    file = str(debug.folder / "none" / "f")
    assert debug("--json", file, "4", "9") == 2
    assert debug.err == f"ampkit debug: --json is {file}; expected a file in an existing folder\n"
    assert debug.out == ""


def test_bad_input(debug: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        debug("--from-step", "-1", "4", "9")
    assert "'-1' is not a number of steps" in capsys.readouterr().err


def test_a_cast_is_one_finding_for_all_checks() -> None:
    """State that is rounded in place also becomes 0 in the cast; in backward the same line is another fault."""
    report = Report()
    each = ("zeros", "_to_copy", "forward"), ("state in place", "copy_", "forward"), ("zeros", "_to_copy", "backward")
    for check, op, phase in each:
        place = Place("train.py", 3, f"aten::{op}", phase=phase)
        report.add(Finding(grade="error", check=check, cause=Cause("rounded"), what=check, place=place))
    assert [each.place.phase for each in report.findings] == ["forward", "backward"]
