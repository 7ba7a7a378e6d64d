"""Reports as files: by the schema, read back as they were, refused if they are not ours; hashes of two runs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ampkit import Policy, Rule, autocast, debugging
from ampkit.__main__ import main
from ampkit.debugging import report_file
from ampkit.debugging.policy_change import PolicyChange
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


def test_a_report_travels_as_json(tmp_path: Path) -> None:
    """To the last field, with inf as a string."""
    report = found()
    file = tmp_path / "r.json"
    file.write_text(report.to_json())
    assert '"inf"' in report.to_json()
    assert report_file.read(file) == report
    assert str(report_file.read(file)) == str(report)
    report_file.validate(report.to_dict(), report_file.schema(), "report")
    data = report.to_dict()
    data["findings"][0]["from a later minor version"] = 1
    assert report_file.from_dict(data) == report


@pytest.mark.parametrize(("change", "message"), [
    ({"version": "2.0"}, r"r has version '2\.0'; this ampkit reads 1\.x"),
    ({"kind": "recipe"}, "r is no report of ampkit debug"),
    ({"steps": "three"}, r"r\.steps is str; expected integer"),
    ({"steps": True}, r"r\.steps is bool; expected integer"),
    ({"findings": [{}]}, r"r\.findings\[0\] lacks 'symptom'"),
])
def test_a_file_that_is_none_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        report_file.from_dict({**found().to_dict(), **change}, "r")


def test_every_field_is_in_the_schema() -> None:
    """A field that is added to a report without its schema is found here."""
    def check(value: Any, rule: Any) -> None:
        if "$ref" in rule:
            rule = report_file.schema()["$defs"][rule["$ref"].rpartition("/")[2]]
        for option in rule.get("anyOf", ()):
            if value is not None:
                check(value, option)
        if isinstance(value, dict) and "properties" in rule:
            assert set(value) == set(rule["properties"])
            for key, item in value.items():
                check(item, rule["properties"][key])
        if isinstance(value, list) and "items" in rule:
            for item in value:
                check(item, rule["items"])

    check(found().to_dict(), report_file.schema())


def test_ranks_are_merged_with_the_one_to_blame_first() -> None:
    """A rank that only received comes after the one that made it, clean ones last."""
    made = found()
    received = report_file.from_dict(made.to_dict())
    received.findings = [
        type(one)(**{**one.__dict__, "cause": type(one.cause)("received", "received from another rank")})
        for one in made.findings
    ]
    clean = NonFiniteReport(rank=0)
    received.rank, made.rank = 1, 2
    assert [one.rank for one in report_file.merge([clean, received, made])] == [2, 1, 0]


def test_a_change_is_the_policy_that_its_line_says() -> None:
    change = PolicyChange("cpu", ("a.b", "c"), ("aten::mul.Tensor",))
    names: dict[str, Any] = {"Policy": Policy, "Rule": Rule, "torch": torch}
    exec(change.code, names)
    assert names["policy"] == change.policy()
    assert change.without("c").rules == ("a.b", "aten::mul.Tensor")


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


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


def test_debug_nonfinite(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The user's script, unchanged: found, clean, too short, absent, and files of ranks."""
    file = tmp_path / "r{rank}.json"
    assert main(["debug", "nonfinite", "--json", str(file), script, "2"]) == 1
    printed = capsys.readouterr()
    assert "the end" not in printed.out
    assert "the loss is -inf in step 2" in printed.err
    assert "aten::log, " in printed.err
    assert "train.py:8" in printed.err
    written = str(file).replace("{rank}", "0")
    assert main(["debug", "report", written]) == 1
    assert "the loss is -inf in step 2" in capsys.readouterr().out
    assert main(["debug", "merge", written, written]) == 1
    capsys.readouterr()
    assert main(["debug", "nonfinite", script, "9", "--flag"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"the end __main__ {[script, '9', '--flag']}\n"
    assert "no inf or NaN reached a loss" in printed.err
    assert "in 4 steps" in printed.err
    assert main(["debug", "nonfinite", "--from-step", "2", script, "3"]) == 1
    assert "the loss is -inf in step 3" in capsys.readouterr().err
    assert main(["debug", "nonfinite", "--from-step", "3", script, "2"]) == 1   # the parameter is broken by then
    assert "look at what wrote" in capsys.readouterr().err
    assert main(["debug", "nonfinite", "--from-step", "9", script, "9"]) == 3
    assert "the script ended before step 9" in capsys.readouterr().err
    assert main(["debug", "nonfinite", str(tmp_path / "no.py")]) == 2
    assert "no.py is no file; expected the training script" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [
    ["nonfinite", "--json"], ["nonfinite", "--html"], ["precision", "--json"], ["operators", "--html"],
    ["monitor", "--out"], ["hashes", "--json"],
])
def test_a_folder_that_is_not_there_is_told_before_the_script_runs(
    arguments: list[str], script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "none" / "f")
    assert main(["debug", *arguments, file, script, "9"]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"ampkit debug: {arguments[1]} is {file}; expected a file in a folder that is there\n"
    assert printed.out == ""


@pytest.mark.parametrize(("tool", "code"), [("nonfinite", 1), ("precision", 0), ("operators", 0)])
def test_a_report_as_a_page(tool: str, code: int, script: str, tmp_path: Path) -> None:
    assert main(["debug", tool, "--html", str(tmp_path / "r{rank}.html"), script, "2"]) == code
    page = (tmp_path / "r0.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "train.py" in page


def test_only_a_step_that_computes_was_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a loop prints after its last step is none."""
    file = tmp_path / "s.py"
    file.write_text(SCRIPT + "print(float(loss.detach()) + float(torch.ones(2).mean()))")
    assert main(["debug", "nonfinite", "--from-step", "4", str(file), "9"]) == 3
    assert "ended before step 4: nothing was looked at. Until then steps that a scaler" in capsys.readouterr().err


def test_a_script_that_ends_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An exit code, an error and Ctrl-C of the script's own."""
    for body, code, says in (
        ("import sys; sys.exit(4)", 3, "exit code 4"),
        ("raise KeyError('mine')", 3, "KeyError: 'mine'"),
        ("raise KeyboardInterrupt", 130, ""),
    ):
        file = tmp_path / "s.py"
        file.write_text(f"import torch\ntorch.ones(1).exp()\n{body}\n")
        assert main(["debug", "nonfinite", str(file)]) == code
        assert says in capsys.readouterr().err


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    file.write_text("{")
    assert main(["debug", "report", str(file)]) == 2
    assert "is no JSON" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["debug", "nonfinite", "--from-step", "-1", "train.py"])
    assert "'-1' is no number of steps" in capsys.readouterr().err


# --- hashes


def test_hashes_name_the_first_operator_that_differs() -> None:
    """Not the data that both have, and not what follows; a cast more shifts nothing."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))

    def log(change: bool = False, low: bool = False) -> debugging.HashLog:
        x = torch.linspace(-1, 1, 8).view(2, 4)
        model[1].approximate = "tanh" if change else "none"
        with debugging.record_hashes(model) as found, autocast("cpu", enabled=low):
            model(x).sum().backward()
        model.zero_grad()
        return found

    same = debugging.compare_hashes(log(), log())
    assert not same
    assert str(same).endswith("results are the same to the bit")
    differs = debugging.compare_hashes(log(), log(change=True))
    assert differs.first is not None
    assert (differs.first[0].op, differs.first[0].module) == ("aten::gelu", "1")
    assert "the first difference, after" in str(differs)
    casts = debugging.compare_hashes(log(), log(low=True))
    assert casts.first is not None
    assert casts.first[0].module == "0"
    assert any(call.op == "aten::_to_copy" for call in casts.only_in_b)
    with pytest.raises(TypeError, match="a is str; expected what"):
        debugging.compare_hashes("log", log())  # type: ignore[arg-type]


def test_hashes_tell_data_from_operators() -> None:
    """A parameter that differs is named, before the operator that reads it."""
    model = nn.Linear(4, 1)
    logs = []
    for value in (0.5, 0.25):
        with torch.no_grad():
            model.weight.fill_(value)
        with debugging.record_hashes(model) as log:
            model(torch.ones(1, 4))
        logs.append(log)
    first = debugging.compare_hashes(*logs).first
    assert first is not None
    assert (first[0].op, first[0].where) == ("", "weight")
    assert json.dumps(first[0]._asdict())
    assert math.isfinite(first[0].hash)
