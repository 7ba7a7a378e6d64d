"""`examine` and `ampkit debug train.py`: one run, one ranked list."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from ampkit import Policy, Rule, autocast, debugging
from ampkit.__main__ import main
from ampkit.debugging.finding import Cause, Finding, Fix, Grade, Place, Report
from tests.debugging.planted import F16, line_of


def finding(grade: Grade, check: str, what: str, step: int = 0, fix: Fix | None = None) -> Finding:
    return Finding(grade=grade, check=check, cause=Cause(what), what=what, step=step, fix=fix or Fix())


def test_the_rank_of_findings() -> None:
    """Errors of the loop, then verified fixes, then by grade and step."""
    report = debugging.examine(lambda: None, nn.Linear(1, 1), steps=0)
    verified = Fix("x.float()", verified=True)
    report.findings = [
        finding("note", "loop order", "loop note"),
        finding("error", "nonfinite", "late", 5),
        finding("precision loss", "sums", "verified", 6, verified),
        finding("error", "nonfinite", "early", 2),
        finding("error", "loop order", "loop", 9),
    ]
    assert [each.what for each in report.ranked()] == ["loop", "verified", "early", "late", "loop note"]


def test_findings_of_one_place_are_one_whatever_their_numbers() -> None:
    """With the worse grade, and the words that belong to it."""
    report = Report()
    first, worse = finding("note", "zeros", "underflow"), finding("precision loss", "zeros", "underflow", 7)
    first.place = worse.place = Place("train.py", 3, "aten::mul.Tensor")
    worse.what = "all of a result becomes 0"
    assert report.add(first)
    assert not report.add(worse)
    (found,) = report.findings
    assert (found.grade, found.what, found.step, found.last, found.times) == (worse.grade, worse.what, 0, 7, 2)


# --- in code


@pytest.mark.parametrize(
    ("policy", "start"),
    [(None, 'Policy.default("cpu")'), (Policy.default("cpu").with_rules({"aten::gelu": Rule.FLOAT32}), "policy")],
)
def test_examine_tries_a_change_and_restores_everything(policy: Policy | None, start: str) -> None:
    """The change keeps a policy of the user's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    nn.init.constant_(model.get_parameter("0.weight"), 1e4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    before = [p.detach().clone() for p in model.parameters()]

    def step() -> None:
        optimizer.zero_grad()
        with autocast("cpu", dtype=F16, policy=policy):
            loss = model(torch.full((2, 4), 100.0)).float().mean()
        loss.backward()
        optimizer.step()

    report = debugging.examine(step, model, steps=2)
    first = report.ranked()[0]
    assert report.status == "found"
    assert (first.grade, first.place.module, first.kind) == ("error", "0", "overflow")
    assert first.fix.verified
    assert first.fix.code.startswith(f'policy = {start}.for_modules(model, {{"0": torch.float32')
    assert all(map(torch.equal, before, model.parameters()))


def test_losses_before_and_after_a_change_are_of_one_line_and_step() -> None:
    """Of two optimizers, each with a loss of its own, of which one overflows in float16."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    nn.init.constant_(model.get_parameter("1.weight"), 1e4)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1e-6) for layer in model]
    values: dict[str, list[float]] = {"small": [], "large": []}

    def step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        small = model[0](torch.ones(2, 4)).square().mean()
        small.backward()  # small loss
        with autocast("cpu", dtype=F16):
            large = model[1](torch.full((2, 4), 100.0)).float().mean()
        large.backward()  # large loss
        for optimizer in optimizers:
            optimizer.step()
        values["small"].append(small.item())
        values["large"].append(large.item())

    first = debugging.examine(step, model, steps=2).ranked()[0]
    assert (first.kind, first.fix.verified) == ("overflow", True)
    found = re.fullmatch(r"loss of .*test_examine.py:(\d+) in step (\d): (\S+) -> (\S+)", first.fix.result)
    assert found is not None
    line, number, before, after = found.groups()
    assert (int(line), before) == (line_of(__file__, "large loss"), f"{values['large'][2 + int(number)]:.4g}")
    assert math.isfinite(float(after))


# --- the command

SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
factor = float(sys.argv[1])
for step in range(6):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(torch.ones(2, 4)) * factor).float().square().mean()
    optimizer.zero_grad()
    (loss / factor).backward()
    optimizer.step()
print("the end")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None) -> Path:
    """A script, whose processes are calls in this one."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def test_the_command(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The place comes first; progress goes to stderr; the JSON has a version."""
    assert main(["debug", "--no-verify", "--json", "r.json", "train.py", "1e6"]) == 1
    out, err = capsys.readouterr()
    assert err == "ampkit debug: the script starts\n"
    assert out.startswith("the end\nerror: train.py:9 (aten::mul.Tensor): the loss is inf in steps 0-5")
    report = json.loads(Path("r.json").read_text())
    first = report["findings"][0]
    assert (report["kind"], report["version"], report["status"]) == ("ampkit.debugging.report", 3, "found")
    assert (first["rank"], first["grade"], first["file"], first["line"]) == (1, "error", "train.py", 9)
    assert first["kind"] == "overflow"
    assert main(["debug", "--no-verify", "train.py", "1"]) == 0
    out = capsys.readouterr().out
    assert " operators in 6 steps: no findings\nnot compared with float32: --no-verify\n" in out


@pytest.mark.parametrize(
    ("options", "steps"), [(["--steps", "2"], 2), (["--seconds", "0.0001"], 1)], ids=["steps", "seconds"]
)
def test_the_command_ends_early(
    script: Path, capsys: pytest.CaptureFixture[str], options: list[str], steps: int
) -> None:
    assert main(["debug", *options, "train.py", "1"]) == 0
    out = capsys.readouterr().out
    assert "the end" not in out
    assert f" operators in {steps} step" in out


def test_an_interrupt_prints_what_is_known(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(SCRIPT.replace('print("the end")', "raise KeyboardInterrupt"))
    assert main(["debug", "train.py", "1"]) == 130
    assert main(["debug", "train.py", "1e6"]) == 1
    out = capsys.readouterr().out
    assert "the run did not reach its end: the script was interrupted" in out
    assert "train.py:9" in out


def test_a_command_wins_over_a_script_with_its_name(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.rename(script.with_name("rehearse"))
    assert main(["debug", "./rehearse", "1"]) == 0
    assert "checked" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["debug", "rehearse"])  # the command, without a script


HELPER = """
def clip(parameters):
    import torch
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
"""
CLIPS = """
import torch
from helper import clip
model = torch.nn.Linear(4, 1)
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
for _ in range(3):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    clip(model.parameters())
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_call_in_a_helper_names_the_line_of_the_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.with_name("helper.py").write_text(HELPER)
    script.write_text(CLIPS)
    assert main(["debug", "--no-verify", "--json", "r.json", "train.py"]) == 1
    first = json.loads(Path("r.json").read_text())["findings"][0]
    assert (first["file"], first["line"], first["called_from"]) == ("helper.py", 4, ["train.py", 9])
    assert "error: helper.py:4 (called from train.py:9): gradients are clipped" in capsys.readouterr().out


def test_a_change_that_could_not_run_is_not_refuted(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(script.parent)
    monkeypatch.setattr("ampkit.debugging.trials.sys.executable", "/nonexistent/python")
    assert main(["debug", "--json", "r.json", "train.py", "1e6"]) == 1
    report = json.loads(Path("r.json").read_text())
    first = report["findings"][0]
    assert (first["verified"], first["tried"]) == (False, [])
    assert "around train.py:9" in first["fix"]
    assert report["not_checked"][-1].startswith("further changes: the script did not start")


def test_a_change_is_verified_in_a_fresh_process(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(script.parent)
    assert main(["debug", "--json", "r.json", "train.py", "1e6"]) == 1
    first = json.loads(Path("r.json").read_text())["findings"][0]
    assert first["verified"]
    assert 'torch.autocast("cpu", enabled=False): around train.py:9' in first["fix"]
    assert re.fullmatch(r"loss in step 5: (inf|nan) -> [\d.e+]+", first["result"])
