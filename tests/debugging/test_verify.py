"""The effect on the training decides: trial runs, the comparison of their losses, and the findings that follow."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ampkit import autocast, debugging
from ampkit.__main__ import main
from ampkit.debugging.changes import Change, LearningRate, LineChange
from ampkit.debugging.checks.divergence import growth
from ampkit.debugging.finding import Cause, Finding, Losses, Place, Report
from ampkit.debugging.observe.training_loop import TrainingLoop
from ampkit.debugging.trials import Trial
from ampkit.debugging.verify import verify

SITE = ("train.py", 9)
STEPS = 20


def losses(end: float, seed: int = 0, noise: float = 0.0) -> Losses:
    """A loss that falls from 1 to `end`, with a difference of `noise` for the seed."""
    return {SITE: {step: end + (1 - end) * 0.7**step + noise * seed * (-1) ** step for step in range(STEPS)}}


def call(line: int) -> Any:
    op = SimpleNamespace(name="aten::mul.Tensor")
    caller = SimpleNamespace(outside=False, line=lambda: ("train.py", line))
    return SimpleNamespace(phase="forward", module=None, op=op, caller=caller, index=line)


def examined(*findings: Finding, lines: Iterable[int] = range(1, 9)) -> tuple[Report, Any]:
    """A report, and an observed run with lines in 16 bits."""
    modules = SimpleNamespace(region="torch", model=None, policy=None)
    run = SimpleNamespace(modules=modules, low={line: call(line) for line in lines}, loop=TrainingLoop(), step=STEPS)
    run.place = lambda call: Place("train.py", call.index)
    return Report(findings=list(findings)), run


def overflow(grade: Any = "note", line: int = 3) -> Finding:
    place = Place("train.py", line, "aten::mul.Tensor", phase="forward", dtype="float16")
    return Finding(grade=grade, check="nonfinite", cause=Cause("overflow"), what="a result is inf", place=place)


def in_float32(end: float, end_in_float32: float, *needed: int, noise: float = 0.0) -> Any:
    """The attempts of a training whose `needed` lines must be in float32 for another loss at its end."""

    def attempt(change: Change | None, seed: int, skips: Iterable[int]) -> Losses | str:
        lines = change.lines if isinstance(change, LineChange) else ()
        helps = lines is None or (needed and {("train.py", line) for line in needed} <= set(lines))
        return losses(end_in_float32 if helps else end, seed, noise)

    return attempt


@pytest.mark.parametrize(
    ("ends", "needed", "noise", "expected", "line"),
    [
        ((0.1, 0.1), (), 0.01, "trains as well in float32: the loss differs by +0.0% +- 4", None),
        ((0.11, 0.1), (), 0.01, "trains as well in float32: the loss differs by +3", None),  # within the spread
        ((0.11, 0.1), (), 0.5, "not compared with float32: the losses of two runs in the same precision", None),
        ((0.9, 0.1), (3,), 0.01, "trains better in float32: loss in step 19: 0.9", 3),
        ((0.12, 0.1), (3,), 0.0, "trains better in float32: loss in step 19: 0.1", 3),
        ((0.1, 0.12), (3,), 0.0, "trains differently in float32: loss in step 19: 0.1", 3),
        ((0.9, 0.1), (6,), 0.01, "trains better in float32: loss in step 19: 0.9", 6),  # by bisection
        ((0.9, 0.1), (5, 6), 0.01, "trains better in float32: loss in step 19: 0.9", 5),
        ((0.9, 0.1), (), 0.01, "trains better in float32: loss in step 19: 0.9", 0),  # no lines explain it
        ((math.nan, 0.1), (3,), 0.01, "trains better in float32: loss in step 19: nan -> 0.1", 3),
        ((math.nan, math.nan), (3,), 0.01, "in float32 the loss is not finite", None),
    ],
)
def test_the_effect_on_the_loss_decides_the_grade(
    ends: tuple[float, float], needed: tuple[int, ...], noise: float, expected: str, line: int | None
) -> None:
    """A note becomes a finding with numbers, a finding is added, or there is none."""
    report, run = examined(overflow())
    verify(report, run, in_float32(*ends, *needed, noise=noise), losses(ends[0]), max_runs=40)
    assert report.comparison.startswith(expected)
    assert report.trains_as_well is expected.startswith("trains as well")
    assert bool(report) is (line is not None)
    if line is not None:
        first = report.ranked()[0]
        assert first.place.line == line
        assert first.grade == ("error" if math.isnan(ends[0]) else "precision loss")
        assert first.fix.verified is bool(needed)
        assert not needed or f"around {' and '.join(f'train.py:{each}' for each in needed)}," in first.fix.code
        assert not needed or first.fix.result.startswith("loss in step 19: ")


def test_a_second_pair_must_confirm_a_difference() -> None:
    """As of a training that is lucky with some weights."""

    def attempt(change: Change | None, seed: int, skips: Iterable[int]) -> Losses | str:
        return losses(0.1 if change is not None and seed == 0 else 0.12)

    report, run = examined()
    verify(report, run, attempt, losses(0.12), max_runs=40)
    assert (report.findings, report.trains_as_well) == ([], True)


@pytest.mark.parametrize(
    ("is_script", "end_in_float32", "grade"),
    [(True, 0.5, "note"), (True, 0.1, "precision loss"), (False, 0.5, "precision loss")],
)
def test_updates_that_are_rounded_away_are_a_note_if_float32_weights_train_no_better(
    is_script: bool, end_in_float32: float, grade: str
) -> None:
    """In a script, where they can be tried: a step has the weights that it has."""
    rounded = Finding(
        grade="precision loss", check="updates", cause=Cause("update rounded away"), what="", place=Place()
    )
    report, run = examined(rounded)
    attempt = in_float32(0.5, end_in_float32)
    verify(report, run, attempt, losses(0.5), max_runs=16, is_script=is_script)
    assert rounded.grade == grade


def test_a_training_that_diverges_gets_a_smaller_learning_rate() -> None:
    tried = list[float]()

    def attempt(change: Change | None, seed: int, skips: Iterable[int]) -> Losses | str:
        assert isinstance(change, LearningRate)
        tried.append(change.factor)
        return losses(0.1 if change.factor < 0.05 else math.nan)

    report, run = examined(Finding(grade="error", check="divergence", cause=Cause("divergence"), what="it"), lines=())
    verify(report, run, attempt, losses(math.nan), max_runs=40)
    assert report.comparison == "not compared with float32: nothing was computed in 16 bits"
    assert tried == [0.1, pytest.approx(0.01)]
    assert report.findings[0].fix.verified


@pytest.mark.parametrize(("limit", "says"), [(2, "further changes: 2 runs"), (0, "further changes: 0 runs")])
def test_a_limit_is_in_the_report(limit: int, says: str) -> None:
    report, run = examined(overflow())
    verify(report, run, in_float32(0.9, 0.1, 3), losses(0.9), max_runs=limit)
    assert report.not_checked[0].startswith(says)


def test_an_interrupt_keeps_the_results() -> None:
    def attempt(change: Change | None, seed: int, skips: Iterable[int]) -> Losses | str:
        raise KeyboardInterrupt

    report, run = examined(overflow("error"))
    verify(report, run, attempt, losses(math.nan), max_runs=40)
    assert report.not_checked == ["further changes: the runs were interrupted"]
    assert report.findings[0].grade == "error"


class Offset(nn.Module):
    """Loses small inputs in 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, torch.eye(16)) + 1000 - 1000


def test_the_modules_that_change_a_training_are_found() -> None:
    """By bisection of the model's modules, next to one that it does not contain."""
    torch.manual_seed(0)
    model, outside = nn.Sequential(nn.Linear(16, 16, bias=False), Offset()), nn.ReLU()
    nn.init.eye_(model.get_parameter("0.weight"))
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    x = torch.randn(32, 16)

    def step() -> None:
        optimizer.zero_grad()
        with autocast("cpu", torch.bfloat16):
            loss = (outside(model(x)).float() - x.relu() - 0.1).square().mean()
        loss.backward()
        optimizer.step()

    report = debugging.examine(step, model)
    (found,) = (each for each in report.findings if each.fix.verified)
    assert found.fix.code == 'policy = Policy.default("cpu").for_modules(model, {"1": torch.float32})'


# --- trials


def train(trial: Trial, *, lr: float = 0.1, scaler: Any = None, broken: int = -1) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    with trial:
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            if step == broken:
                model.bias.grad.fill_(math.inf)  # type: ignore[union-attr]
            optimizer.step()
    return model


def test_a_trial_moves_the_weights_and_skips_steps() -> None:
    """Skipped steps leave weights and moments as they were."""
    trials = [Trial(seed, skips) for seed, skips in ((0, ()), (1, ()), (0, (0, 2)))]
    plain, moved, skipped = (train(trial) for trial in trials)
    (first, other, third) = (list(next(iter(trial.losses.values())).values()) for trial in trials)
    assert first[0] == other[0]
    assert 0 < abs(first[1] - other[1]) < 0.1 * first[0]
    assert not torch.equal(plain.weight, moved.weight)
    assert third[0] == third[1] == first[0]
    assert third[2] == third[3] == first[1]
    assert not torch.equal(plain.weight, skipped.weight)


def test_a_step_with_gradients_that_are_not_finite_has_no_loss() -> None:
    trial = Trial()
    train(trial, broken=1)
    (of_line,) = trial.losses.values()
    assert [math.isfinite(loss) for loss in of_line.values()] == [True, False, False, False]


# --- scripts

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)

class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

model = nn.Sequential(nn.Linear(16, 64), Norm(), nn.Linear(64, 1)){half}
x = torch.randn(64, 16) * {size}
y = x[:, :1] / {size}
optimizer = torch.optim.{optimizer}
for step in range(40):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.{dtype}, enabled={enabled}):
        loss = (model(x).float() - y).square().mean()
    loss.backward()
    optimizer.step()
"""
ADAM = "AdamW(model.parameters(), lr=1e-2)"


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (
            {"size": 2000.0, "dtype": "float16"},
            1,
            r"precision loss: train\.py:8 \(.*\n(.*\n)*  fix  .* around train\.py:8, .*\n"
            r"  verified  loss in step 39: 0\.9\d* -> 0\.0",
        ),
        ({"size": 1.0}, 0, r"no problems found\ntrains as well in float32: the loss differs by [+-]0\.\d% \+- \d"),
        (
            {"size": 1.0, "optimizer": "SGD(model.parameters(), lr=1e3)", "enabled": False},
            1,
            r"error: train\.py:19: the training diverges in steps 0-39\n"
            r"  cause     the loss grows from .* learning rate of 1e\+03",
        ),
    ],
)
@pytest.mark.usefixtures("in_process")
def test_the_command(
    options: dict[str, Any],
    code: int,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"half": "", "optimizer": ADAM, "dtype": "bfloat16", "enabled": True, **options}
    Path("train.py").write_text(SCRIPT.format(**values), encoding="utf-8")
    assert main(["debug", "train.py"]) == code
    out, err = capsys.readouterr()
    assert re.search(expected, out), out
    assert err.startswith("ampkit debug: the script starts\n")


def test_everything_in_float32_covers_what_a_script_makes_in_16_bits() -> None:
    make: dict[str, Callable[[], Any]] = {
        "half": lambda: nn.Linear(2, 2).half().weight,
        "to": lambda: nn.Linear(2, 2).to(torch.bfloat16).weight,
        "dtype": lambda: nn.Linear(2, 2, dtype=torch.float16).weight,
        "factory": lambda: torch.zeros(2, dtype=torch.float16) + torch.tensor([1.0], dtype=torch.bfloat16),
        "region": lambda: _in_region(nn.Linear(2, 2)),
    }
    default = torch.set_default_dtype
    with LineChange("cpu", "torch").around():
        assert {name: made().dtype for name, made in make.items()} == dict.fromkeys(make, torch.float32)
        torch.set_default_dtype(torch.bfloat16)
        assert torch.get_default_dtype() is torch.float32
    assert torch.set_default_dtype is default


def _in_region(layer: nn.Module) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return layer(torch.ones(2, 2))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 0.9, 0.8, 0.7], None),
        ([1.0, 0.9, 30.0, 2e3, 4e6, math.inf], (1, 4)),
        ([1.0, 1.0, 1.0, 2e3, math.nan], (2, 3)),
        ([1.0, 5e2, math.inf], None),
    ],
)
def test_growth_begins_at_the_last_loss_before_it(values: list[float], expected: tuple[int, int] | None) -> None:
    assert growth(dict(enumerate(values)), len(values) - 1, 1e3) == expected
