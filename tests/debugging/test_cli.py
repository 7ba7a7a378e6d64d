"""The command `ampkit debug`: what it prints to a terminal, of a script that fails, and for wrong arguments."""

import os
import sys
from pathlib import Path

import pytest

from ampkit.__main__ import main

SCRIPT = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    file.with_name("a.ipynb").write_text("{}")
    return file


def test_progress_is_one_line_of_the_terminal(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A longer line would wrap, and stay."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "30")
    assert main(["debug", "train.py"]) == 0
    shown = capsys.readouterr().err.split("\r")
    assert any(text.startswith("the script starts") for text in shown)
    assert max(map(len, shown)) < 30


def test_a_traceback_begins_at_the_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(f"{SCRIPT}model(torch.ones(2, 5))\n")
    assert main(["debug", "train.py"]) == 3
    out, err = capsys.readouterr()
    assert err.splitlines()[2] == '  File "train.py", line 9, in <module>'
    assert "runpy" not in err
    assert "the run did not reach its end: the script failed with RuntimeError: " in out
    assert "mat1 and mat2 shapes" in out


def test_a_script_that_is_no_python_is_an_error_of_the_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("for x in\n")
    assert main(["debug", "train.py"]) == 3
    out, err = capsys.readouterr()
    assert 'train.py", line 1' in err
    assert "the script failed with SyntaxError" in out


@pytest.mark.usefixtures("in_process")
def test_a_script_that_changes_the_folder_runs_again(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(f"import os\nos.chdir('/')\n{SCRIPT.replace('.sum()', '.bfloat16().sum()')}")
    assert main(["debug", "train.py"]) == 0
    assert "trains as well in float32: the loss differs by " in capsys.readouterr().out


def test_a_script_that_trains_in_other_processes_is_inconclusive(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("print('its processes train')\n")
    assert main(["debug", "train.py"]) == 3
    assert "the script ended without a training step in this process, and no operator" in capsys.readouterr().out


@pytest.mark.parametrize("tool", [[], ["rehearse"]], ids=["examination", "rehearse"])
def test_only_the_script_is_required(tool: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["debug", *tool])
    assert capsys.readouterr().err.endswith("the following arguments are required: script\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["absent.py"], "absent.py is not a file; expected the training script, then its own arguments\n"),
        (["rehearse", "absent.py"], "absent.py is not a file; expected the training script, then its own arguments\n"),
        (
            ["a.ipynb"],
            "a.ipynb is a notebook; expected a script: use ampkit.debugging.Examination() in a cell\n",
        ),
        (["rehearse", "--steps", "0", "train.py"], "--steps is 0; expected 1 or more\n"),
    ],
)
@pytest.mark.usefixtures("script")
def test_bad_input_says_what_was_expected(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["debug", *arguments]) == 2
    assert capsys.readouterr() == ("", f"ampkit debug: {expected}")


def test_a_reader_that_has_ended_is_no_bad_input(
    script: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in `ampkit debug train.py | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1) as broken, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", broken)
        code = main(["debug", "train.py"])
    assert code == 141
    assert capfd.readouterr().err.startswith("ampkit debug: the script starts\n")
