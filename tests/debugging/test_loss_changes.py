"""What the rounding of each module is expected to change of the loss, and the changes that are tried."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampkit import GradScaler, Policy, Rule, autocast
from ampkit.debugging import compare_precision
from ampkit.debugging.loss_changes import _n_terms
from benchmarks.fragile_models import DifferenceNorm, Phases
from tests.debugging.models import Middle
from tests.helpers.float8 import policy as float8_policy

B16 = torch.bfloat16


def stepped(model: nn.Module, batch: Tensor, scale: float = 1.0, **region: Any) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        with autocast("cpu", **{"dtype": B16, **region}):
            loss = model(batch).float().square().mean()
        (loss * scale).backward()

    return step


def normed() -> nn.Sequential:
    """A norm that loses its bits, behind a layer with a large bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), DifferenceNorm(), nn.Linear(32, 4))
    nn.init.constant_(model[0].bias, 100.0)  # type: ignore[arg-type]
    return model


def expected(gradient: Tensor, error: Tensor, n_terms: int, loss: float) -> float:
    """n/2 sum over rows (sum(g d))^2, as a share of the loss."""
    return (gradient.float() * error).sum(-1).square().sum().item() * n_terms / 2 / loss**2


def test_the_change_is_the_sum_over_a_modules_own_errors() -> None:
    """The second layer's error is taken with the rounded result of the first."""
    torch.manual_seed(0)
    model, x, classes = (
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)),
        torch.randn(5, 8),
        torch.tensor([0, 2, -1, 1, 2]),
    )
    with autocast("cpu", B16):
        h = model[0](x)
        y = model[1](h)
    exact_y = model[1](h.float())
    h = h.detach().requires_grad_()
    logits = model[1](h.float())
    loss = F.cross_entropy(logits, classes, ignore_index=-1)
    of_h, of_y = torch.autograd.grad(loss, (h, logits))

    def step() -> None:
        with autocast("cpu", B16):
            loss = F.cross_entropy(model(x), classes, ignore_index=-1)
        loss.backward()

    report = compare_precision(step, model)
    reference = report.reference_loss or 0.0
    assert report.loss_changes["0"] == pytest.approx(expected(of_h, h.float() - model[0](x), 4, reference), rel=0.1)
    assert report.loss_changes["1"] == pytest.approx(expected(of_y, y.float() - exact_y, 4, reference), rel=0.02)
    assert list(report.loss_changes) == sorted(report.loss_changes, key=lambda name: -report.loss_changes[name])


def test_the_change_depends_on_neither_the_batch_nor_the_unit_nor_micro_batches() -> None:
    model, batch = normed(), torch.randn(64, 16)

    def changes(batches: list[Tensor], unit: float = 1.0) -> float:
        def step() -> None:
            model.zero_grad()
            for each in batches:
                with autocast("cpu", B16):
                    loss = unit * model(each).float().square().mean()
                (loss / len(batches)).backward()

        return compare_precision(step, model).loss_changes["1"]

    assert changes([batch.repeat(2, 1)]) == pytest.approx(changes([batch]), rel=0.01)
    assert changes([batch], 100.0) == pytest.approx(changes([batch]), rel=0.01)
    assert changes([batch, batch]) == pytest.approx(changes([batch]), rel=0.01)


def test_an_input_by_keyword_leaves_the_module_that_made_it() -> None:
    """What the caller computes itself is its own rounding, wherever it goes."""

    class Caller(nn.Module):
        def __init__(self, keyword: bool) -> None:
            super().__init__()
            self.inner, self.keyword = nn.Bilinear(16, 16, 4), keyword

        def forward(self, x: Tensor) -> Tensor:
            phases = x @ x.T @ x
            return self.inner(x, input2=phases) if self.keyword else self.inner(x, phases)

    batch, found = torch.randn(8, 16), []
    for keyword in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Caller(keyword))
        found.append(compare_precision(stepped(model, batch), model).loss_changes["0"])
    assert found[0] == found[1] > 0


CLASSES = torch.tensor([0, 2, -100, 1, 2])
HALF = torch.full((5, 3), 0.5)
LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "cross entropy with a target that is ignored": (lambda y: F.cross_entropy(y, CLASSES), 4),
    "with label smoothing, scaled, beside a penalty": (
        lambda y: 8 * (F.cross_entropy(y, CLASSES, label_smoothing=0.1) + 0.1 * (y * y).sum()),
        4,
    ),
    "summed by hand": (lambda y: F.cross_entropy(y, CLASSES, reduction="none").sum() / 4, 5),
    "squares": (lambda y: F.mse_loss(y, HALF), 15),
    "a mean": (lambda y: (y - HALF).square().mean(), 15),
    "a mean of means": (lambda y: (y - HALF).square().mean(1).mean(), 5),
    "binary": (lambda y: F.binary_cross_entropy_with_logits(y, HALF), 15),
    "not known": (lambda y: y.square().sum() / 7, 0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_number_of_terms_of_a_loss(name: str) -> None:
    loss, expected = LOSSES[name]
    assert _n_terms(loss(torch.randn(5, 3, requires_grad=True))) == expected


def test_results_without_a_gradient_count_and_the_step_stays_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Phases(torch.tensor([1.0, 0.1])), nn.Linear(4, 1))
    positions = torch.arange(512, 520)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        step()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    step = stepped(model, positions)
    plain = gradients()
    reports = []

    def compared() -> None:
        reports.append(compare_precision(step))

    model.zero_grad()
    compared()
    assert all(map(torch.equal, plain, [p.grad for p in model.parameters() if p.grad is not None]))
    report = reports[0]
    assert next(iter(report.fragile)) == "0"
    assert abs(report.loss - report.reference_loss) > 0.01  # the whole step's reference follows the replaced tensor


def test_a_loss_scale_is_taken_out() -> None:
    model, batch = normed(), torch.randn(64, 16)
    one = compare_precision(stepped(model, batch), model).loss_changes
    scaler = GradScaler("cpu", init_scale=256.0)

    def step() -> None:
        model.zero_grad()
        with autocast("cpu", B16):
            loss = model(batch).float().square().mean()
        scaler.scale(loss).backward()

    assert compare_precision(step, model).loss_changes["1"] == pytest.approx(one["1"], rel=0.05)


def test_large_tensors_are_sampled() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 1))
    x = torch.randn(1024, 64)
    report = compare_precision(stepped(model, x), model)
    with autocast("cpu", B16):
        h = model[0](x)
    leaf = h.float().detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model[1](leaf).square().mean(), leaf)
    whole = expected(gradient, h.float() - model[0](x), 1024, report.reference_loss or 0.0)
    assert report.loss_changes["0"] == pytest.approx(whole, rel=0.6)  # of 32 of the 1024 rows


def test_a_checkpoint_and_code_outside_of_modules() -> None:
    from torch.utils.checkpoint import checkpoint

    model, batch = normed(), torch.randn(64, 16)
    plain = compare_precision(stepped(model, batch), model).loss_changes
    for reentrant in (False, True):
        wrapped = Middle(lambda x, inner, r=reentrant: checkpoint(inner, x, use_reentrant=r), model)
        changes = compare_precision(stepped(wrapped, batch.clone().requires_grad_()), wrapped).loss_changes
        assert changes["layers.0.1"] == pytest.approx(plain["1"], rel=1e-3)
    weight = torch.randn(16, 4, requires_grad=True)

    def step() -> None:
        with autocast("cpu", B16):
            loss = (batch @ weight).float().square().mean()
        loss.backward()

    report = compare_precision(step)
    assert report.loss
    assert report.reference_loss
    assert report.loss_changes == {"": pytest.approx(abs(report.loss / report.reference_loss - 1), rel=1e-3)}


def test_what_rounds_harmlessly_is_no_finding_and_what_changes_the_loss_is() -> None:
    torch.manual_seed(0)
    healthy = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))
    for policy in (None, float8_policy(Rule.FLOAT8_TENSORWISE)):
        report = compare_precision(stepped(healthy, torch.randn(64, 16), policy=policy), healthy)
        assert (report.fragile, report.suggestion, report.status) == ({}, None, "clean"), str(report)
    assert report.error > 0.02  # which was a finding by itself
    model = normed()
    report = compare_precision(stepped(model, torch.randn(64, 16)), model)
    assert "1" in report.fragile
    assert report.status == "found"
    assert f"  loss      rises by about {100 * report.fragile['1']:.2g} % by the rounding in 1" in str(report)
    assert report.suggestion is not None
    assert report.suggestion.verified, str(report)
    assert report.suggestion.code == 'policy = Policy.default("cpu").for_modules(model, {"1": torch.float32})'


@pytest.mark.parametrize("kept", [False, True])
def test_a_change_keeps_a_policy_of_the_users_own(kept: bool) -> None:
    """Unless the policy has a rule for that module already."""
    model = normed()
    policy = Policy.default("cpu").with_rules({"aten::gelu": Rule.FLOAT32})
    policy = policy.for_modules(model, {"1": B16}) if kept else policy
    report = compare_precision(stepped(model, torch.randn(64, 16), policy=policy), model)
    assert report.suggestion is not None
    code = 'policy = policy.for_modules(model, {"1": torch.float32})'
    assert (report.suggestion.code == code and report.suggestion.verified) is not kept


@pytest.mark.parametrize("rule", [Rule.FLOAT8_TENSORWISE, Rule.FLOAT8_ROWWISE])
def test_a_module_in_fp8_gets_the_policy_without_fp8(rule: Rule) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))
    layer = model[1]
    layer.register_forward_pre_hook(lambda _, args: (torch.cat([args[0][:, 1:], args[0][:, :1] * 0 + 2e5], 1),))
    with torch.no_grad():
        layer.weight[:, -1] = 0  # type: ignore[index,operator]
    policy = float8_policy(rule).with_rules({"aten::gelu": "float32"})
    report = compare_precision(stepped(model, torch.randn(64, 32), 100.0, policy=policy), model)
    assert next(iter(report.fragile)) == "1", str(report)
    assert report.suggestion is not None
    assert report.suggestion.verified
    value = 'Policy.default("cpu").with_rules({"aten::gelu": Rule.FLOAT32})'
    assert report.suggestion.code == f'policy = policy.for_modules(model, {{"1": {value}}})'


def test_an_overflow_of_a_module_is_an_infinite_change() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    nn.init.constant_(model[0].bias, 1e5)  # type: ignore[arg-type]
    report = compare_precision(stepped(model, torch.randn(2, 4), dtype=torch.float16), model)
    assert math.isinf(report.loss_changes.get("0", math.inf))
