"""`benchmarks.faults`: transforms of syntax trees put faults into programs, and reports are judged by them."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest
import torch

from benchmarks.faults import programs
from benchmarks.faults.__main__ import main
from benchmarks.faults.cases import CASES, Case, read
from benchmarks.faults.inject import KINDS, Injection, Kind, places
from benchmarks.faults.observe import Record, symptoms
from benchmarks.faults.score import Claim, grade, summary
from benchmarks.faults.source import Edit, Source, edited, reverse

PROGRAM = '''\
"""A program with a place for every kind of fault. Ünïcode moves bytes, not lines."""

import torch
from torch.nn import functional

features = torch.randn(32, 4)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", enabled=True)
average = [weight.detach().clone() for weight in model.parameters()]
saved = optimizer.state_dict()
optimizer.load_state_dict(saved)
accumulation = 2
total = torch.zeros(())
for _ in range(3):
    with torch.autocast("cpu", dtype=torch.float16):
        hidden = model(features)
        mask = (hidden - hidden.mean(0, keepdim=True)).float() > 0
        with torch.autocast("cpu", enabled=False):
            scores = functional.softmax(hidden.masked_fill(mask, -10.0), dim=-1)
        spread = hidden.var(dim=-1, keepdim=True) + hidden.cumsum(0).exp().norm()
        scaled = hidden / (spread + 1e-5).sqrt() ** 2
        entropy = torch.log(scores + 1e-6).sum() / spread
        loss = functional.cross_entropy(scaled, features.argmax(1)) + functional.mse_loss(scaled, hidden)
        loss = loss / accumulation
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    total += loss.detach()
    for mean, weight in zip(average, model.parameters()):
        mean.lerp_(weight.detach(), 0.1)
'''


def all_places(kind: Kind) -> list[Injection]:
    return [place for dtype in kind.dtypes for place in places(Source(PROGRAM), kind, dtype)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_a_fault_changes_one_place_and_its_reverse_restores_the_source(kind: Kind) -> None:
    found = all_places(kind)
    assert found
    for injection in found:
        changed = edited(PROGRAM, injection.edits)
        ast.parse(changed)
        assert changed != PROGRAM
        assert changed.count("\n") == PROGRAM.count("\n")
        lines = zip(PROGRAM.splitlines(), changed.splitlines(), strict=True)
        assert {number for number, (one, two) in enumerate(lines, 1) if one != two} <= set(injection.lines)
        assert edited(changed, reverse(PROGRAM, injection.edits)) == PROGRAM
        assert len(injection.edits) <= 2


def test_there_are_at_least_twenty_kinds_in_every_family() -> None:
    assert len(KINDS) >= 20
    assert {kind.family for kind in KINDS.values()} == {"precision", "loop", "gradient", "data", "arithmetic"}


def test_edits_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="overlaps"):
        edited("abcdef", [Edit(0, 3, "x"), Edit(2, 4, "y")])


def test_a_place_in_an_expression_of_several_lines_keeps_its_lines() -> None:
    source = "y = torch.log(\n    x\n) + sum(\n    1 for _ in z\n)\n"
    (injection,) = places(Source(source), KINDS["cast before log"], "float16")
    assert injection.lines == (1, 2, 3, 4, 5)
    assert edited(source, injection.edits) == "y = torch.log(\n    (x).half()\n) + sum(\n    1 for _ in z\n)\n"


@pytest.mark.parametrize("half", ["dev", "final"])
def test_each_half_of_the_programs_has_eight_repositories_or_more(half: str) -> None:
    chosen = programs.load(half)
    assert len({program.repository for program in chosen}) >= 8
    for program in chosen:
        assert len(program.commit) == 40
        assert program.license
        assert program.script or (programs.HERE / "programs" / f"{program.name}.py").is_file()


def test_the_halves_share_no_repository() -> None:
    """What was learned from a repository's programs says nothing of the final ones."""
    halves = {half: {program.repository for program in programs.load(half)} for half in ("dev", "final")}
    assert all(halves.values())
    assert not halves["dev"] & halves["final"]
    assert {case.half for case in read()} == set(halves)


def run(**fields: object) -> Record:
    start, end = torch.zeros(4), torch.ones(4)
    gradients = {1: [torch.ones(4)]}
    record = Record(
        losses=[3.0, 2.0, 1.0], metrics={"accuracy": 0.9}, gradients=gradients, before=[start], after=[end], steps=10
    )
    for name, value in fields.items():
        setattr(record, name, value)
    return record


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, set()),
        ({"losses": [3.0, 2.0, 1.01]}, set()),
        ({"losses": [3.0, float("nan"), 1.0]}, {"nonfinite"}),
        ({"steps": 5}, {"skipped"}),
        ({"gradients": {1: [torch.full((4,), 2.0)]}}, {"gradients"}),
        ({"after": [torch.full((4,), 0.2)]}, {"parameters"}),
        ({"losses": [3.0, 2.0, 2.9]}, {"loss"}),
        ({"metrics": {"accuracy": 0.5}}, {"metric"}),
    ],
)
def test_a_symptom_is_measured_against_healthy_runs(fields: dict[str, object], found: set[str]) -> None:
    assert set(symptoms(run(**fields), run(), run(), [run(losses=[3.0, 2.0, 1.05])])) == found


FAULT = Case("x", "supcon", "dev", "float16", "cast before log", "losses.py", 0, (7,), {"nonfinite": "the loss is nan"})
RIGHT = Claim(
    "wrong", [("cases/x/losses.py", 7)], ["aten::log"], "log of 0, which a cast rounded", "x.float() before it"
)


def test_a_report_that_names_line_operator_and_reverse_is_right() -> None:
    score = grade(FAULT, [[RIGHT]])
    assert (score.place, score.cause, score.cure, score.confident, score.alarm) == (True, True, True, False, False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"places": [("losses.py", 8)]}, (False, False, False)),
        ({"places": [("model.py", 7)]}, (False, False, False)),
        ({"places": [("losses.py", 9), ("losses.py", 7)]}, (True, True, True)),  # who computed it is on the line
        ({"operators": ["aten::mm"]}, (True, False, False)),
        ({"cure": "a smaller learning rate"}, (True, True, False)),
        ({"cure": ""}, (True, True, False)),
    ],
)
def test_what_is_wrong_of_a_report_does_not_count(change: dict[str, object], expected: tuple[bool, bool, bool]) -> None:
    score = grade(FAULT, [[replace(RIGHT, **change)]])  # type: ignore[arg-type]
    assert (score.place, score.cause, score.cure) == expected


def test_a_finding_without_an_operator_is_judged_by_its_words() -> None:
    fault = replace(FAULT, kind="weights in 16 bits", dtype="bfloat16")
    lost = replace(RIGHT, operators=[], text="38% of the updates are rounded away", cure="float32 masters")
    assert grade(fault, [[lost]]).cure
    assert not grade(fault, [[replace(lost, text="the loss is nan")]]).cause
    assert not grade(FAULT, [[replace(RIGHT, operators=[])]]).cause


def test_a_verified_claim_at_another_line_is_confidently_wrong() -> None:
    elsewhere = replace(RIGHT, places=[("losses.py", 30)], verified=True)
    assert grade(FAULT, [[elsewhere]]).confident
    assert not grade(FAULT, [[replace(elsewhere, verified=False)]]).confident


def test_an_alarm_on_a_healthy_program_is_false_and_a_note_is_none() -> None:
    healthy = Case("x", "supcon", "dev", "float16")
    assert grade(healthy, [[RIGHT]]).alarm
    assert not grade(healthy, [[replace(RIGHT, grade="note")]]).alarm
    harmless = replace(FAULT, symptoms={})
    assert not grade(harmless, [[RIGHT]]).alarm  # the line was changed, though nothing comes of it
    assert grade(harmless, [[replace(RIGHT, places=[("losses.py", 30)])]]).alarm
    figures = summary([grade(FAULT, [[RIGHT]]), grade(FAULT, [[]]), grade(healthy, [[RIGHT]])])
    assert (figures.faults, figures.place, figures.missed, figures.false_alarms) == (2, 0.5, 0.5, 1)


def test_float32_is_no_cure_where_precision_is_not_the_cause() -> None:
    fault = replace(FAULT, kind="log of a true 0")
    assert not grade(fault, [[RIGHT]]).cure
    assert grade(fault, [[replace(RIGHT, cure="clamp it above 0")]]).cure


def test_the_cases_name_kinds_and_programs_that_exist() -> None:
    cases = read(CASES)
    names = {program.name: program.half for program in programs.load()}
    assert all(names[case.program] == case.half and (not case.kind or case.kind in KINDS) for case in cases)
    assert len({case.id for case in cases}) == len(cases)


def test_help_says_what_to_do_without_network(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--mirror" in capsys.readouterr().out


def test_the_reverse_counts_bytes() -> None:
    edits = (Edit(0, 1, "é"), Edit(1, 3, "x"), Edit(3, 3, "ü"))
    assert edited("abcd", edits) == "éxüd"
    assert edited("éxüd", reverse("abcd", edits)) == "abcd"
