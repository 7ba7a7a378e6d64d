"""Steps of several backward passes under a scaler: where they end, and what a scaler is left to skip."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from ampkit import GradScaler, autocast
from ampkit.debugging import Examination, examine
from tests.debugging.planted import loss_of


class Training:
    """A loop that accumulates gradients, and prints its loss as loops do."""

    def __init__(self, cls: Any, scale: float) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scaler = cls("cpu", init_scale=scale)
        self.batch = torch.randn(8, 16)

    def run(self, steps: int, micro: int = 1, unscale: bool = False) -> None:
        loss = torch.zeros(())
        for _ in range(steps):
            for _ in range(micro):
                loss = loss_of(self.model, self.batch) / micro
                self.scaler.scale(loss).backward()
            if unscale:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            float(loss.detach())


@pytest.mark.parametrize(
    ("cls", "micro", "unscale", "scale"),
    [  # every pair of values
        (GradScaler, 1, False, 2.0**24),
        (GradScaler, 2, True, 2.0**4),
        (GradScaler, 4, True, 2.0**24),
        (torch.amp.GradScaler, 1, True, 2.0**4),
        (torch.amp.GradScaler, 2, False, 2.0**24),
        (torch.amp.GradScaler, 4, False, 2.0**4),
    ],
)
def test_steps_are_counted_and_what_a_scaler_skips_is_no_finding(
    cls: Any, micro: int, unscale: bool, scale: float
) -> None:
    training = Training(cls, scale)
    with Examination(training.model, on_nonfinite="raise") as report:
        training.run(12, micro, unscale)
    skips = math.log2(scale / training.scaler.get_scale())
    assert (skips > 1) is (scale > 2.0**4)
    assert not report, str(report)
    assert report.steps == 12
    assert report.skips == skips
    if skips:
        assert report.skipped[0].step == 0
        assert report.skipped[0].scale == scale
        assert max(finding.last for finding in report.skipped) < skips


def test_examine_leaves_scaler_and_optimizer_as_they_were() -> None:
    training = Training(GradScaler, 2.0**24)
    report = examine(lambda: training.run(1), training.model, state=[training.scaler], steps=1)
    assert training.scaler.get_scale() == report.skipped[0].scale == 2.0**24
    assert not training.optimizer.state
    assert not report.findings


@pytest.mark.parametrize("factors", [(1.0, 3e4), (3e4, 1.0)])
@pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler])
def test_gradients_of_a_skipped_step_that_others_add_to(cls: Any, factors: tuple[float, float]) -> None:
    """A discriminator's step is skipped; the generator's backward adds to its gradients, which nobody takes."""
    torch.manual_seed(0)
    generator, judge = nn.Linear(8, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.Adam(network.parameters()) for network in (judge, generator)]
    scaler = cls("cpu", init_scale=2.0**20)

    def run(steps: int) -> None:
        for _ in range(steps):
            for optimizer, factor in zip(optimizers, factors, strict=True):
                with autocast("cpu", dtype=torch.float16):
                    loss = judge(generator(torch.randn(4, 8))).float().mean() * factor
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()

    with Examination() as report:
        run(14)
    assert report.skipped
    assert not [each for each in report.findings if each.grade == "error"], str(report)
    nn.init.constant_(judge.weight, math.nan)
    with Examination() as report:
        run(1)
    assert report
