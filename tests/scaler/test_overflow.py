"""Reports that name the parameters behind a skipped step and where they began, and `on_stuck` for a collapsed scale."""

import math

import pytest
import torch
from torch import nn

from ampkit import DynamicLossScale, GradScaler, LossScaleStuckError, StaticLossScale
from tests.helpers.faults import plant_nonfinite
from tests.helpers.scaler_tools import OPTIMIZERS, Operators, count_reads, iterate, one_parameter, started


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def train(scaler, model, optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).square().sum()).backward()
        iterate(scaler, optimizer)


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_the_offending_parameters_are_named_and_counted_as_backward_meets_them(which) -> None:
    model, scaler = small_model(), GradScaler("cpu")
    optimizer = OPTIMIZERS[which](model.named_parameters())
    plant_nonfinite(model[0].weight, 3, "nan", index=5)
    plant_nonfinite(model[2].weight, 3, "inf")
    with plant_nonfinite(model[2].weight, 3, "-inf", index=1):
        train(scaler, model, optimizer, 3)
    report = scaler.overflow_report()
    assert report == (("2.weight", 2, 0, 8, torch.float32), ("0.weight", 0, 1, 12, torch.float32))
    assert str(report).splitlines() == [
        "last finite: 2.bias; first non-finite: 2.weight",
        "  2.weight: 2 inf, 0 NaN of 8 (float32)",
        "  0.weight: 0 inf, 1 NaN of 12 (float32)",
        "parameters are in reverse registration order; debugging.examine locates the operator",
    ]


def test_the_report_stays_when_gradients_are_gone_and_training_goes_on() -> None:
    """Without names it says how to get them, and without a finite gradient before the first non-finite one that."""
    model, scaler = small_model(), GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(scaler, model, optimizer, 1)
    assert str(scaler.overflow_report(model)) == "no parameter held inf or NaN"
    plant_nonfinite(model[2].bias, 1)
    train(scaler, model, optimizer, 1)
    optimizer.zero_grad(set_to_none=True)
    with pytest.MonkeyPatch.context() as patch:  # no skip, no cost
        patch.delattr("ampkit.scaler.grad_scaler.count_nonfinite")
        train(scaler, model, optimizer, 2)
    assert [c.name for c in scaler.overflow_report(model, optimizer=optimizer)] == ["2.bias"]
    assert str(scaler.overflow_report()).splitlines()[:-1] == [
        "no gradient was finite before group 0, parameter 3: it began there, or in the loss",
        "  group 0, parameter 3: 1 inf, 0 NaN of 2 (float32)",
        "for names call overflow_report(model), or make the optimizer with model.named_parameters()",
    ]


def deep_model() -> nn.Sequential:
    blocks = (nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(3))
    return nn.Sequential(nn.Embedding(10, 6), *blocks, nn.Linear(6, 10))


@pytest.mark.parametrize(
    "path", [path for path, module in deep_model().named_modules() if [*module.parameters(recurse=False)]]
)
def test_the_origin_is_where_hooks_see_the_first_bad_gradient(path: str) -> None:
    """Beside what hooks see in backward, in a step that is skipped because a module's output has a gradient of inf."""
    model, seen = deep_model(), []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(
            lambda param, name=name: None if param.grad.isfinite().all() else seen.append(name)
        )
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu", 1.0)

    def explode(module, args, output) -> None:
        output.register_hook(lambda grad: torch.full_like(grad, math.inf))

    model.get_submodule(path).register_forward_hook(explode)
    scaler.scale(model(torch.arange(8).view(2, 4)).square().mean()).backward()
    iterate(scaler, optimizer)
    report = scaler.overflow_report(model)
    assert {each.name for each in report} == set(seen)
    assert {name.rpartition(".")[0] for name in (seen[0], report[0].name)} == {path}
    first, *lines = str(report).splitlines()
    assert first.endswith(
        (f"first non-finite: {path}", f"finite before {report[0].name}: it began there, or in the loss")
    )
    assert lines[:-1] == [f"  {each}" for each in report[:6]] + [f"  and {len(report) - 6} more"] * (len(report) > 6)


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_a_skipped_step_dispatches_two_operators_for_a_gradient_at_most(which, monkeypatch) -> None:
    """Counted in one pass over the list, or over parts of it that fit into memory; numbers are exact."""
    for chunk in (1 << 26, 100):
        monkeypatch.setattr("ampkit.scaler.overflow_report._CHUNK", chunk)
        n = 60
        params = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(n)]
        optimizer, scaler = OPTIMIZERS[which](params), started()
        iterate(scaler, optimizer, *[1.0] * n)
        for i, param in enumerate(params):
            param.grad = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64)
            param.grad[i % 3] = 1.0
        with Operators() as operators:
            scaler.step(optimizer)
        assert len(operators.names) <= (2 * n if chunk > 100 else 6 * n)
        wanted = [(2, 0), (1, 1), (1, 1)] * (n // 3)
        assert [(each.inf, each.nan) for each in scaler.overflow_report()] == wanted[::-1]


def overflow(scaler: GradScaler, times: int = 1) -> None:
    for _ in range(times):
        scaler.scale(torch.ones((), requires_grad=True))
        iterate(scaler, one_parameter()[1], math.inf)


def test_a_collapsed_scale_warns_once() -> None:
    scaler = GradScaler("cpu", 2.0**-13)
    overflow(scaler)
    with pytest.warns(UserWarning, match=r"fallen to 6.1e-05 and gradients still overflow"):
        overflow(scaler)
    overflow(scaler, 5)
    overflow(GradScaler("cpu", loss_scale=StaticLossScale(2.0**-20), on_stuck="raise"), 3)  # is not stuck


def test_a_collapsed_scale_can_raise_with_everything_in_order_or_call_the_user() -> None:
    scaler = GradScaler("cpu", loss_scale=DynamicLossScale(4.0, min_scale=2.0), on_stuck="raise")
    overflow(scaler)
    with pytest.raises(LossScaleStuckError, match="fallen to 2 and gradients still overflow"):
        overflow(scaler)
    scaler.update()
    assert (scaler.get_scale(), scaler.stats().skips) == (2.0, 2)
    seen = []
    overflow(GradScaler("cpu", loss_scale=DynamicLossScale(2.0, min_scale=2.0), on_stuck=seen.append), 3)
    assert [(stats.skips, stats.scale) for stats in seen] == [(1, 2.0), (2, 2.0), (3, 2.0)]


def test_where_only_the_device_knows_reports_and_a_collapse_wait_until_they_are_asked_for(monkeypatch) -> None:
    """A flag that the host cannot see for free, as on a GPU: the step reads nothing, the report and the stats do."""

    class Aware(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self) -> None:
            """It would skip on the device: there is nothing to update."""

    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
    param, _ = one_parameter(grad=math.inf)
    optimizer, scaler = Aware([("w", param)], lr=0.1), started(GradScaler, 2.0**-14)
    with count_reads() as reads:
        iterate(scaler, optimizer)
    assert reads == []
    assert [c.name for c in scaler.overflow_report()] == ["w"]
    assert not scaler.stepped(optimizer)
    with pytest.warns(UserWarning, match="gradients still overflow") as caught:
        scaler.stats()
    assert caught[0].filename == __file__
    scaler.stats()
    param.grad = None
    assert scaler.overflow_report() == ()
