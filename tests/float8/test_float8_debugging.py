"""Debugging under an FP8 rule: the comparison goes through its products."""

import pytest
import torch
from torch import nn

from ampkit import autocast
from ampkit.debugging import compare_precision
from tests.helpers.float8 import BF16, RULES, policy


@pytest.mark.parametrize("rule", RULES)
def test_a_comparison_goes_through_the_products(rule):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(32, 64)

    def step():
        with autocast("cpu", BF16, policy=policy(rule)):
            loss = model(x).float().square().mean()
        loss.backward()
        return loss

    report = compare_precision(step, model)
    assert not report.opaque
    assert report.reference_loss == pytest.approx(model(x).square().mean().item(), rel=1e-5)
