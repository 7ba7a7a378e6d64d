"""A step that is compared with the same step in float32: the error is the true one, and the place is its origin."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from ampkit import autocast
from ampkit.debugging import Examination, examine
from ampkit.debugging.finding import Finding
from benchmarks.fragile_models import DifferenceNorm


def model_of(bias: float) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), DifferenceNorm(), nn.Linear(16, 1))
    nn.init.constant_(model[0].bias, bias)  # type: ignore[arg-type]
    return model


def gradients(model: nn.Module, batch: Tensor, *, enabled: bool) -> Tensor:
    model.zero_grad()
    with autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        loss = model(batch).float().square().mean()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def found(model: nn.Module, batch: Tensor) -> list[Finding]:
    with Examination(model) as report:
        gradients(model, batch, enabled=True)
    return [each for each in report.findings if each.check == "precision"]


@pytest.mark.parametrize("bias", [4.0, 10.0])
def test_the_error_is_that_against_a_true_float32_step(bias: float) -> None:
    model, batch = model_of(bias), torch.randn(32, 16)
    low, reference = (gradients(model, batch, enabled=enabled).clone() for enabled in (True, False))
    (finding,) = found(model, batch)
    number = re.search(r"gradients are ([\d.e+-]+) off", finding.what)
    assert number is not None
    assert float(number[1]) == pytest.approx(float((low - reference).norm() / reference.norm()), rel=0.05)
    assert finding.grade == "note"
    assert finding.place.module in ("0", "1")
    assert finding.place.file.endswith("fragile_models.py") or "test_precision" in finding.place.file


def test_a_step_that_is_close_to_float32_is_no_finding() -> None:
    model, batch = model_of(0.0), torch.randn(32, 16)
    low, reference = (gradients(model, batch, enabled=enabled).clone() for enabled in (True, False))
    assert float((low - reference).norm() / reference.norm()) < 0.05
    assert found(model, batch) == []


def test_the_fix_of_a_step_is_tried() -> None:
    model, batch = model_of(10.0), torch.randn(32, 16)
    report = examine(lambda: gradients(model, batch, enabled=True), model, steps=1)
    (finding,) = (each for each in report.findings if each.check == "precision")
    assert finding.fix.verified
    assert "autocast" in finding.fix.code
