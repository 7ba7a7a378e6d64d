"""`benchmarks.faults`: faults are stored edits of programs, and reports of `ampkit debug` are scored by them."""

from __future__ import annotations

import ast
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import inject, run, score
from benchmarks.faults.__main__ import main
from benchmarks.faults.inject import HERE, Case, Program

PROGRAM = inject.programs()["supcon"]
FAULT = Case("x", PROGRAM, "float16", "cast before log", "losses.py", (7,), symptoms={"nonfinite": "the loss is nan"})


def finding(**fields: object) -> dict[str, Any]:
    """A right finding of `FAULT`, with some fields replaced."""
    place = {"file": "losses.py", "line": 7, "op": "aten::log", "backward_of": "", "called_from": ["", 0]}
    words = {"grade": "error", "what": "the loss is nan", "cause": "log of 0", "fix": "x.float() before it"}
    return {**place, **words, "producer": None, "verified": False, **fields}


def test_each_fault_in_a_script_of_ours_changes_its_lines_only() -> None:
    """The scripts of other repositories are not there without network; `lay_out` checks their lines."""
    checked = 0
    for case in inject.cases():
        path = HERE / "programs" / f"{case.program.name}.py"
        if case.file == "train.py" and path.is_file():
            text = path.read_text(encoding="utf-8")
            changed = case.edited(text)
            ast.parse(changed)
            lines = enumerate(zip(text.split("\n"), changed.split("\n"), strict=True), 1)
            assert {number for number, (old, new) in lines if old != new} == {edit[0] for edit in case.edits}
            checked += 1
    assert checked > 250


def test_the_cases_are_complete() -> None:
    cases = inject.cases()
    assert len({case.id for case in cases}) == len(cases)
    assert {case.kind for case in cases} - {""} == set(score.kinds())
    for case in cases:
        assert bool(case.kind) == bool(case.edits) == bool(case.lines) == bool(case.file)
        assert {number for number, _, _ in case.edits} <= set(case.lines)
        assert case.kind or not case.symptoms
    families = {kind.family for kind in score.kinds().values()}
    assert families == {"precision", "loop", "gradient", "data", "arithmetic"}


def test_a_fault_needs_the_line_that_it_was_made_for() -> None:
    fault = replace(FAULT, edits=[(2, "x", "x.half()")])
    assert fault.edited("a\ny = log(x)\nx") == "a\ny = log(x.half())\nx"
    for text in ("a\ny = log(z)", "a\ny = x + x"):
        with pytest.raises(ValueError, match=r"losses\.py:2 contains 'x' [02] times; x expects it once"):
            fault.edited(text)


def test_a_program_is_laid_out_from_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a mirror: a folder renamed, a file emptied, a line adapted, a fault put in."""
    origin = tmp_path / "mirror" / "owner+name" / "repo"
    (origin / "pkg").mkdir(parents=True)
    (origin / "pkg" / "__init__.py").write_text("import everything\n")
    (origin / "train.py").write_text("size = 1000\nloss = log(size)\n")
    git = ["git", "-C", str(origin), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    program = Program(
        *("small", "dev", "owner/name", commit, "MIT"),
        copy=["pkg -> other", "train.py"],
        script="train.py",
        blank=["other/__init__.py"],
        adapt=[["train.py", "1000", "10"]],
    )
    monkeypatch.setenv("AMPKIT_FAULTS", str(tmp_path / "cache"))
    case = replace(FAULT, program=program, file="train.py", edits=[(2, "size", "size.half()")])
    with pytest.raises(FileNotFoundError, match="fetch"):
        case.lay_out(tmp_path / "early")
    inject.fetch([program], tmp_path / "mirror")
    case.lay_out(tmp_path / "out")
    assert (tmp_path / "out" / "train.py").read_text() == "size = 10\nloss = log(size.half())\n"
    assert (tmp_path / "out" / "other" / "__init__.py").read_text() == ""
    assert (tmp_path / "out" / inject.HELPER).is_file()


@pytest.mark.parametrize("half", ["dev", "final"])
def test_each_half_of_the_programs_has_eight_repositories_or_more(half: str) -> None:
    chosen = [program for program in inject.programs().values() if program.half == half]
    assert len({program.repository for program in chosen}) >= 8
    for program in chosen:
        assert len(program.commit) == 40
        assert program.license
        assert program.script or (HERE / "programs" / f"{program.name}.py").is_file()
    others = {program.repository for program in inject.programs().values() if program.half != half}
    assert not others & {program.repository for program in chosen}


def test_a_report_that_names_line_operator_and_reverse_is_right() -> None:
    found = score.grade(FAULT, [finding()])
    assert (found.place, found.graded, found.cause, found.fix) == (True, True, True, True)
    assert (found.confidently_wrong, found.alarm, str(found)) == (False, False, "place, cause, fix")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"line": 8}, ""),
        ({"file": "model.py"}, ""),
        ({"file": "old_losses.py"}, ""),
        ({"file": "/runs/x/losses.py"}, "place, cause, fix"),
        ({"line": 9, "producer": {"file": "losses.py", "line": 7, "op": "aten::log"}}, "place, cause, fix"),
        ({"line": 9, "called_from": ["losses.py", 7]}, "place, cause, fix"),
        ({"op": "aten::mm"}, "place"),
        ({"op": "aten::mul", "backward_of": "aten::log"}, "place, cause, fix"),
        ({"fix": "a smaller learning rate"}, "place, cause"),
        ({"fix": ""}, "place, cause"),
    ],
)
def test_a_wrong_part_of_a_report_does_not_count(fields: dict[str, object], expected: str) -> None:
    assert str(score.grade(FAULT, [finding(**fields)])) == (expected or "missed")


def test_a_finding_without_an_operator_is_scored_by_its_words() -> None:
    fault = replace(FAULT, kind="weights in 16 bits", dtype="bfloat16")
    rounded = finding(op="", what="38% of the updates are rounded away", cause="", fix="float32 masters")
    assert score.grade(fault, [rounded]).fix
    assert not score.grade(fault, [{**rounded, "what": "the loss is nan", "fix": ".float()"}]).cause
    assert not score.grade(FAULT, [finding(op="")]).cause


def test_a_verified_fix_at_another_line_is_confidently_wrong() -> None:
    elsewhere = finding(line=30, verified=True)
    assert score.grade(FAULT, [elsewhere]).confidently_wrong
    assert not score.grade(FAULT, [{**elsewhere, "verified": False}]).confidently_wrong


def test_an_alarm_on_a_healthy_program_is_false_and_a_note_is_not_an_alarm() -> None:
    healthy = Case("x", PROGRAM, "float16")
    assert score.grade(healthy, [finding()]).alarm
    assert not score.grade(healthy, [finding(grade="note")]).alarm
    harmless = replace(FAULT, symptoms={})
    assert not score.grade(harmless, [finding()]).alarm  # true, although training does not suffer
    assert score.grade(harmless, [finding(line=30)]).alarm


def test_float32_does_not_fix_a_fault_whose_cause_is_not_precision() -> None:
    fault = replace(FAULT, kind="log of a true 0")
    assert not score.grade(fault, [finding()]).fix
    assert score.grade(fault, [finding(fix="clamp it above 0")]).fix


def test_runs_are_scored_side_by_side(tmp_path: Path) -> None:
    """Two right, then the same with a false alarm and a report missing."""
    cases = [replace(FAULT, id="fault"), Case("healthy", PROGRAM, "float16")]
    for name, reports in {"old": ([finding()], []), "new": (None, [finding()])}.items():
        folder = tmp_path / name
        folder.mkdir()
        for case, findings in zip(cases, reports, strict=True):
            if findings is not None:
                (folder / f"{case.id}.json").write_text(json.dumps({"findings": findings}))
            with (folder / run.RUNS).open("a") as file:
                print(json.dumps({"id": case.id, "exit": 3, "seconds": 1.5}), file=file)
    text = score.tables({name: score.scores(cases, tmp_path / name) for name in ("old", "new")})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    for row in (
        ["faults; healthy; without a symptom", "1; 1; 0", "1; 1; 0"],
        ["right place", "100.0%", "0.0%"],
        ["false alarms, healthy programs", "0", "1"],
        ["no report", "0", "1"],
        ["fault", "place, cause, fix", "no report, exit code 3"],
        ["healthy", "silent", "false alarm"],
    ):
        assert row in rows


def test_help_says_what_to_do_without_network(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--mirror" in capsys.readouterr().out
