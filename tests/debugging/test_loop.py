"""The check of the loop is silent on correct loops, of ampkit, of torch and of libraries; it leaves nothing behind."""

from __future__ import annotations

import contextlib
import functools
import io
import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ampkit import GradScaler
from ampkit.debugging import check_loop
from tests.debugging.models import mlp
from tests.debugging.planted import loss_of
from tests.helpers.paths import EXAMPLES


def parts(scale: float = 256.0, cls: Any = GradScaler) -> tuple[nn.Sequential, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = mlp(8, 8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), cls("cpu", init_scale=scale)


def scheduler_by_epoch(cls: Any) -> None:
    """The last step of an epoch may be skipped."""
    model, optimizer, scaler = parts(2.0**40, cls)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(3):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, torch.randn(4, 8))).backward()
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()


def keywords_and_sparse_gradients(cls: Any) -> None:
    """Wrapped functions take what they took before."""
    _, _, scaler = parts(cls=cls)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        loss = model(torch.arange(4)).mean()
        torch.autograd.backward(tensors=[scaler.scale(outputs=loss)])
        scaler.unscale_(optimizer=optimizer)
        nn.utils.clip_grad_norm_(parameters=model[1].parameters(), max_norm=1.0)
        nn.utils.clip_grad_value_(parameters=model[1].parameters(), clip_value=1.0)
        scaler.step(optimizer=optimizer)
        scaler.update(new_scale=None)


def critic_without_scaling(cls: Any) -> None:
    critic, critics, _ = parts()
    actor, actors, scaler = parts(cls=cls)
    for _ in range(2):
        critics.zero_grad()
        actors.zero_grad()
        critic(torch.randn(4, 8)).square().mean().backward()
        scaler.scale(loss_of(actor, torch.randn(4, 8))).backward()
        critics.step()
        scaler.step(actors)
        scaler.update()


def layers_one_by_one(cls: Any) -> None:
    """Each with an optimizer and a loss of its own."""
    layers = [nn.Linear(4, 4) for _ in range(3)]
    optimizers = [torch.optim.SGD(layer.parameters()) for layer in layers]
    for _ in range(2):
        values = torch.randn(2, 4)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for layer in layers:
            values = layer(values.detach())
            values.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def example(name: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()


LOOPS: list[Callable[[], None]] = [
    *(functools.partial(loop, cls) for cls in (GradScaler, torch.amp.GradScaler) for loop in (
        scheduler_by_epoch, keywords_and_sparse_gradients, critic_without_scaling, layers_one_by_one)),
    *(functools.partial(example, name) for name in (
        "scaler_two_losses", "scaler_gan", "scaler_gradient_penalty", "loops_accelerate")),
]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("loop", LOOPS)
def test_a_correct_loop(loop: Callable[[], None]) -> None:
    with check_loop() as report:
        loop()
    assert report.status == "clean", str(report)
    assert str(report).startswith("nothing found in ")


def test_each_optimizer_and_scaler_counts_for_itself() -> None:
    (first, one, scaler), (second, other, another) = parts(), parts()
    with check_loop() as report, contextlib.suppress(RuntimeError):
        for _ in range(2):
            one.zero_grad()
            other.zero_grad()
            scaler.scale(loss_of(first, torch.randn(4, 8))).backward()
            another.scale(loss_of(second, torch.randn(4, 8))).backward()
            scaler.step(one)
            nn.utils.clip_grad_norm_(second.parameters(), 1.0)
            another.step(other)
            scaler.update()         # and not another
    assert ["clipped" in finding.what for finding in report.loop] == [True, False]
    assert report.loop[1].what.startswith("update is not called after step")
    assert report.iterations == 3
