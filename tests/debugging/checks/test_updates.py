"""Gradients that are 0 or missing, and updates that are rounded away."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.debugging.models import mlp
from tests.debugging.planted import findings, line_of, trained


def test_a_gradient_that_rounding_makes_zero() -> None:
    """With the cast that does it; a gradient that is 0 in exact arithmetic, or missing, is no finding."""
    model, batch = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]), torch.randn(8, 4)

    def loss(scale: float) -> Tensor:
        y = model[0](batch)
        z = (y * scale).half()  # small
        return model[1](z.float() / scale).square().mean() + (y.detach() * 0 * model[2].bias).sum()

    found = findings(trained(model, lambda: loss(1.0)), model)
    assert [(each.grade, each.kind, each.what) for each in found] == [
        ("note", "no gradient", "the gradient of 2.weight is missing"),
    ]
    found = findings(trained(model, lambda: loss(1e-9)), model)
    assert ("zeros", "underflow", line_of(__file__, "small")) in [
        (each.check, each.kind, each.place.line) for each in found
    ]


def test_updates_that_are_rounded_away() -> None:
    model, batch = mlp(8, 16, 1).bfloat16(), torch.randn(8, 8).bfloat16()
    found = next(
        p for p in findings(trained(model, lambda: model(batch).square().mean()), model) if p.check == "updates"
    )
    assert (found.grade, found.kind, found.place.op) == ("precision loss", "update rounded away", "aten::add_.Tensor")
    assert "masters" in found.fix.code


@torch.no_grad()
def store_masters(parameter: Tensor, value: Tensor, state: dict[str, Tensor]) -> None:
    state.setdefault("master", parameter.float().clone()).add_(value)
    parameter.copy_(state["master"])


@torch.no_grad()
def store_stochastically(parameter: Tensor, value: Tensor, state: dict[str, Tensor]) -> None:
    exact = parameter.float() + value
    noise = torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32)
    parameter.copy_(((exact.view(torch.int32) + noise) & -65536).view(torch.float32))


@torch.no_grad()
def store_rounded(parameter: Tensor, value: Tensor, state: dict[str, Tensor]) -> None:
    parameter.add_(value.to(parameter.dtype))


class SGD(torch.optim.Optimizer):
    def __init__(self, parameters: Any, store: Callable[..., None]) -> None:
        super().__init__(parameters, {"lr": 0.002})
        self.store = store

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.store(p, -group["lr"] * p.grad.float(), self.state[p])


@pytest.mark.parametrize(
    ("store", "is_lost"), [(store_masters, False), (store_stochastically, False), (store_rounded, True)]
)
def test_updates_of_16_bit_weights(store: Callable[..., None], is_lost: bool) -> None:
    """Masters in the optimizer's state, and stochastic rounding, which is right in the mean, lose nothing."""

    def run() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).bfloat16()
        optimizer = SGD(model.parameters(), store)
        x = torch.randn(512, 16)
        y = x[:, :1].sin()
        for _ in range(30):
            optimizer.zero_grad()
            (model(x.bfloat16()).float() - y).square().mean().backward()
            optimizer.step()

    assert any(each.check == "updates" for each in findings(run)) == is_lost


class Decayed(torch.optim.Optimizer):
    """Two writes in each step: a decay that is too small for 16 bits, and an update of which some elements are."""

    def __init__(self, parameters: Any, updates: Tensor) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.updates = updates

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - 1e-6).add_(self.updates)


@pytest.mark.parametrize("small", [0, 20, 40])
def test_updates_of_which_some_are_rounded_away(small: int) -> None:
    """Elements that are rounded up do not make up for those that are rounded away, and each step is one update."""
    updates = torch.full((64,), 0.75 * 2.0**-7)  # rounded up to a unit in the last place of numbers from 1 to 2
    updates[:small] = 0.25 * 2.0**-7

    def run() -> None:
        torch.manual_seed(0)
        p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        optimizer = Decayed([p], updates.bfloat16())
        for _ in range(4):
            optimizer.zero_grad()
            p.sum().backward()
            with torch.no_grad():
                optimizer.step()

    found = [each for each in findings(run) if each.check == "updates"]
    expected = [] if not small else [(f"{small / 64:.0%}", "aten::add_.Tensor")]
    assert [(each.what.split()[0], each.place.op) for each in found] == expected
