"""Debugging under an FP8 rule: what made the error, and which modules leave FP8 for LOWER."""

import pytest
import torch
from torch import nn

from ampkit import Rule, autocast
from ampkit.debugging import compare_precision, search_policy
from tests.helpers.float8 import BF16, RULES, TENSORWISE, policy


def error(model, x, region):
    with torch.no_grad():
        want = model(x)
        with region:
            return ((model(x).float() - want).norm() / want.norm()).item()


def test_the_search_proposes_lower_for_the_module_with_outliers():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(32, 64)
    x[:, 3], model[0].weight.data[:, 3] = 1e5 * x[:, 3], 0
    given = policy(TENSORWISE)

    def evaluate(policy):
        return error(model, x, autocast("cpu", BF16, policy=policy))

    found = search_policy(evaluate, model, lambda value: value < 0.1, policy=given)
    assert (found.status, found.kept) == ("found", ("0",))
    assert found.policy == given.for_modules(model, {"0": given.with_rules({"aten::linear": Rule.LOWER})})
    names = {"policy": given, "model": model, "Rule": Rule}
    exec(found.code, names)
    assert names["policy"] == found.policy
    assert "; LOWER gives " in str(found)
    found = search_policy(evaluate, model, lambda value: value < 1e-5, policy=given)
    assert found.policy == given.for_modules(model, {"0": torch.float32, "2": torch.float32})


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
