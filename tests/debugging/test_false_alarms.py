"""Healthy programs in which an examination once found problems, or which it changed or ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampkit import GradScaler, autocast
from ampkit.__main__ import main
from ampkit.debugging import Examination
from ampkit.debugging.finding import Report


def examined(run: Callable[[], Any]) -> Report:
    torch.manual_seed(0)
    with Examination() as report:
        run()
    return report


def test_sparse_gradients_and_a_mask() -> None:
    def run() -> None:
        model = nn.Embedding(10, 4, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            mask = torch.tensor([False, False, True, False])
            logits = model(torch.tensor([1, 2])).masked_fill(mask, float("-inf"))
            F.cross_entropy(logits, torch.tensor([0, 3])).backward()
            optimizer.step()

    assert examined(run).findings == []


@pytest.mark.parametrize("function", [F.silu, F.gelu, F.mish, F.hardswish, F.softplus, F.elu, F.logsigmoid])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operators_that_are_written_in_terms_of_others_keep_their_bits(function: Any, dtype: torch.dtype) -> None:
    """Those with a kernel of their own are not decomposed: `silu_backward` in bfloat16 would round more often."""

    def run() -> list[Tensor]:
        x = torch.linspace(-4, 4, 257).to(dtype).requires_grad_()
        y = function(x)
        (gradient,) = torch.autograd.grad(y.float().sin().sum(), x)
        return [y.detach(), gradient]

    results: list[Tensor] = []
    examined(lambda: results.extend(run()))
    assert all(map(torch.equal, results, run()))


@pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler])
def test_skipped_steps_are_counted_once(cls: Any) -> None:
    skipped = 0

    def run() -> None:
        nonlocal skipped
        model, scaler = nn.Linear(8, 8), cls("cpu", init_scale=2.0**24)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(20):
            with autocast("cpu", torch.float16):
                loss = model(torch.randn(16, 8)).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before

    report = examined(run)
    assert (report.skips, report.last_skip, report.steps) == (skipped, skipped - 1, 20)
    assert f"the scaler skipped {skipped} of 20 steps, the last in step {skipped - 1}" in str(report)


def test_iterations_are_counted_and_not_steps() -> None:
    """Of two optimizers, each with a layer that the loss never uses."""

    def run() -> None:
        models = [nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)}) for _ in range(2)]
        optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
        for _ in range(12):
            x = torch.randn(32, 8)
            loss = (models[1]["used"](models[0]["used"](x).tanh()) - x).square().mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()

    report = examined(run)
    assert report.steps == 12
    assert [(each.grade, each.last) for each in report.findings] == [("note", 11)]


def test_a_scale_that_has_fallen_as_far_as_it_can_is_a_note() -> None:
    """The inverse of a subnormal scale is inf in float32."""

    def run() -> None:
        model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=2.0**-140)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    (found,) = [each for each in examined(run).findings if each.place.phase == "scaler"]
    assert found.grade == "note"
    assert found.cause.text == f"the loss scale has fallen to {2.0**-140:.3g}, and its inverse is not finite"


@pytest.mark.parametrize("optimizes", [False, True])
def test_a_loop_without_an_optimizer_says_what_is_not_checked(optimizes: bool) -> None:
    def run() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            if optimizes:
                optimizer.step()
            model.zero_grad()

    report = examined(run)
    assert report.steps == (3 if optimizes else 1)
    assert any(each.startswith("changes between steps: no optimizer") for each in report.not_checked) != optimizes


# --- the command


def test_a_module_as_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "trainings"
    package.mkdir()
    (package / "__init__.py").write_text("NAME = 'helper'")
    (package / "first.py").write_text(
        "import sys, torch\nfrom . import NAME\ntorch.ones(1).log()\nprint(NAME, sys.argv[1:])"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["debug", "-m", "trainings.first", "--lr", "1"]) == 0
    assert capsys.readouterr().out.startswith("helper ['--lr', '1']\nchecked ")
