"""Schedules that advance only with their optimizers."""

import math

import pytest
import torch

import ampkit.optim
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.schedulers import scheduler_step
from tests.helpers.scaler_tools import count_reads, started, with_grads


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=1.0),
        lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
        lambda params: ampkit.optim.SGD(params, lr=1.0),
    ],
)
def test_a_schedule_waits_for_its_optimizer(make) -> None:
    (param,) = with_grads([torch.ones(1)])
    optimizer = make([param])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    scaler = started(GradScaler)
    rates = []
    for grad in (math.inf, 1.0, math.nan, 1.0, None):
        param.grad = None if grad is None else torch.tensor([grad])
        scaler.step(optimizer)
        scaler.update()
        advanced = scheduler_step(schedule, scaler)
        assert advanced == (grad == 1.0)
        rates.append(schedule.get_last_lr()[0])
    assert rates == [1.0, 0.5, 0.5, 0.25, 0.25]


def test_arguments_are_handed_on_and_nothing_is_read_when_the_host_knows() -> None:
    (param,) = with_grads([torch.ones(1)])
    optimizer = torch.optim.SGD([param], lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    scaler = started(GradScaler)
    scaler.step(optimizer)
    with count_reads() as reads:
        for loss in (1.0, 2.0):
            assert scheduler_step(schedule, scaler, loss)
    assert reads == []
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_unknown_optimizer_is_an_error() -> None:
    (param,) = with_grads([torch.ones(1)])
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([param], lr=1.0), 1)
    with pytest.raises(RuntimeError, match=r"scaler.step\(\) has not been called with this SGD yet"):
        scheduler_step(schedule, started(GradScaler))


def test_disabled_scalers_advance_everything() -> None:
    (param,) = with_grads([torch.ones(1)])
    optimizer = torch.optim.SGD([param], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    assert scheduler_step(schedule, GradScaler("cpu", enabled=False))
    assert schedule.get_last_lr() == [0.5]
