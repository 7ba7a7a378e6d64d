"""Gradients that do not follow the gradient that comes in are found; a backward that is looked at stays the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ampkit.debugging import examine
from ampkit.debugging.checks.linearity import _norm
from ampkit.debugging.finding import Finding, Report
from tests.debugging.models import mlp
from tests.debugging.planted import line_in


class Ready(torch.autograd.Function):
    """A loss that computes its gradient in forward, as CTC and transducer losses in extensions do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.gradient = 2 * x
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Tensor:
        return ctx.gradient  # here


class Power(torch.autograd.Function):
    """A loss computed in forward, whose first arguments have no gradient."""

    @staticmethod
    def forward(ctx: Any, power: int, target: Tensor, x: Tensor) -> Tensor:
        ctx.gradient = power * (x - target)
        return (x - target).pow(power).sum()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.gradient  # here


class InPlace(torch.autograd.Function):
    """A fused loss: it multiplies its saved gradient in place, and frees what it does not need any more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(2 * x)
        ctx.needed_once = True
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Tensor:
        (gradient,) = ctx.saved_tensors
        del ctx.needed_once
        return gradient.mul_(incoming)


class Auxiliary(torch.autograd.Function):
    """Adds an auxiliary loss without changing the result, as mixtures of experts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, Tensor]:
        return incoming, torch.ones(())  # here


class Half(torch.autograd.Function):
    """Backward in float16, as a kernel may compute it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Tensor:
        return incoming.half().float().expand(8, 4)


def examined(loss: Callable[[Any, Tensor], Tensor], *, scaled: bool = True) -> Report:
    """The report of one step, with a scaler if it is `scaled`."""
    torch.manual_seed(0)
    model, x = mlp(4, 8, 4), torch.randn(8, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-9), torch.amp.GradScaler("cpu", 2.0**12, enabled=scaled)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(loss(model, x)).backward()
        scaler.step(optimizer)
        scaler.update()

    return examine(step, model, steps=1)


def found(loss: Callable[[Any, Tensor], Tensor], *, scaled: bool = True) -> list[Finding]:
    return [each for each in examined(loss, scaled=scaled).findings if each.check == "linearity"]


def is_at(finding: Finding, function: Callable[..., Any]) -> bool:
    return (Path(finding.place.file).name, finding.place.line) == (Path(__file__).name, line_in(function))


@pytest.mark.parametrize(
    ("scaled", "factor", "grade"), [(True, 1.0, "error"), (False, 1.0, "note"), (False, 2.0**-8, "error")]
)
def test_a_gradient_from_forward(scaled: bool, factor: float, grade: str) -> None:
    """With a factor other than 1 it is wrong without a scaler too."""
    [finding] = found(lambda model, x: Ready.apply(model(x)) * factor, scaled=scaled)
    assert (finding.grade, finding.kind, finding.place.op) == (grade, "not scaled", "Ready.backward")
    assert "returns all of its gradient" in finding.cause.text
    assert "2.weight and 3 more" in finding.what or " and 3 more" in finding.what
    assert is_at(finding, Ready.backward)


def test_arguments_without_a_gradient() -> None:
    """Before the one with a gradient: a number, which autograd has no edge for, and a tensor that needs none."""
    [finding] = found(lambda model, x: Power.apply(2, torch.ones(4), model(x)) * 2.0**-8, scaled=False)
    assert (finding.grade, finding.kind) == ("error", "not scaled")
    assert "returns all of its gradient" in finding.cause.text
    assert "and 3 more" in finding.what


def test_an_incoming_gradient_that_overflows() -> None:
    """As at the first loss scale: the function is tried with another gradient."""
    [finding] = found(lambda model, x: Ready.apply(model(x).half()).float() * 2.0**8)
    assert (finding.grade, finding.kind) == ("error", "not scaled")


def test_a_part_that_float32_cannot_see() -> None:
    """Next to a scaled loss an auxiliary loss that is not scaled is a ten-millionth of the gradient."""
    [finding] = found(lambda model, x: Auxiliary.apply(y := model(x), 1e-5 * y.mean()).sum() * 2.0**4)
    assert (finding.kind, finding.grade) == ("not scaled", "error")
    assert is_at(finding, Auxiliary.backward)


def test_float16s_smallest_number_is_rounding() -> None:
    """It is float16's nearest number to 3.5e-8 and to twice as much: a gradient that does not grow, and not clipped."""
    assert found(lambda model, x: Half.apply(model(x)) * (3.5e-8 / 4096)) == []


@pytest.mark.parametrize("checks", [False, True])
def test_a_backward_that_was_checked_is_the_same(checks: bool) -> None:
    def gradients(checks: bool) -> list[Any]:
        torch.manual_seed(0)
        model, x = nn.Sequential(mlp(4, 8, 4), nn.Dropout(0.5)), torch.randn(8, 4, requires_grad=True)
        x.grad = torch.ones_like(x)
        results: list[Any] = []

        def step() -> None:
            hidden = model(x)
            hidden.retain_grad()
            hidden.register_hook(lambda gradient: gradient * torch.rand(()))
            InPlace.apply(hidden).backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            results[:] = [hidden.grad, x.grad.clone(), torch.rand(2), *gradients]  # type: ignore[union-attr]

        if checks:
            assert not [each for each in examine(step, model, steps=1).findings if each.check == "linearity"]
        else:
            step()
        return results

    assert all(map(torch.equal, gradients(checks), gradients(False)))


def test_a_function_that_runs_a_backward_of_its_own() -> None:
    """As a user's own checkpoint does: trying it adds nothing to the gradients."""

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Tensor:
            ctx.layer = layer
            ctx.save_for_backward(x)
            with torch.no_grad():
                return layer(x)

        @staticmethod
        def backward(ctx: Any, incoming: Tensor) -> tuple[None, Tensor]:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                ctx.layer(x).backward(incoming)
            return None, x.grad

    def gradients(checks: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, x = mlp(4, 8, 4), torch.randn(8, 4, requires_grad=True)
        results: list[Tensor] = []

        def step() -> None:
            Recomputed.apply(model, x).square().sum().backward()
            results[:] = [p.grad.clone() for p in model.parameters() if p.grad is not None]

        if checks:
            assert examine(step, model, steps=1).status == "clean"
        else:
            step()
        return results

    assert all(map(torch.equal, gradients(True), gradients(False)))


def test_a_reentrant_checkpoint_is_seen_through() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return Ready.apply(checkpoint(model, x.clone().requires_grad_(), use_reentrant=True))

    [finding] = found(loss)
    assert is_at(finding, Ready.backward)


def test_a_dtensor_without_its_private_attribute_is_an_error() -> None:
    """The norm of its gradient would be read by another path, and be of other numbers."""
    with pytest.raises(AttributeError, match="_local_tensor"):
        _norm(torch.ones(2).as_subclass(DTensor))
