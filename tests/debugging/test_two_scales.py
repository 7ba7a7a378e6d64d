"""Gradients that do not follow the gradient that comes in are found; a backward that is looked at stays the same."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampkit.debugging import examine
from ampkit.debugging.two_scales import ScaleFinding, compare_scales
from tests.debugging.models import MODELS, loss_of, make, mlp


class Ready(torch.autograd.Function):
    """A loss that computes its gradient in forward, as CTC and transducer losses in extensions do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.gradient = 2 * x
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Tensor:
        return ctx.gradient  # here


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


def clip(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.1, 0.1)  # here


def line_of(source: Any) -> str:
    lines, first = inspect.getsourcelines(source)
    return f"{Path(inspect.getfile(source)).name}:{first + next(i for i, text in enumerate(lines) if '# here' in text)}"


def found(loss: Callable[[nn.Module, Tensor], Tensor]) -> tuple[nn.Module, list[ScaleFinding]]:
    torch.manual_seed(0)
    model = mlp(4, 8, 4)
    return model, compare_scales([loss(model, torch.randn(8, 4))])


def hooked(loss: Tensor, tensor: Tensor) -> Tensor:
    tensor.register_hook(clip)
    return loss


@pytest.mark.parametrize("factor", [1.0, 2.0**-8])
def test_a_gradient_from_forward(factor: float) -> None:
    model, findings = found(lambda model, x: Ready.apply(model(x)) * factor)
    [finding] = findings
    assert (finding.kind, finding.function, finding.share, finding.whole) == ("constant", "Ready.backward", 1.0, True)
    assert finding.starts is (factor == 1)  # with a factor other than 1 the gradient is wrong also without a scaler
    assert set(finding.parameters) == set(model.parameters())
    assert f"{Path(finding.file).name}:{finding.line}" == line_of(Ready.backward)


def test_a_part_that_float32_cannot_see() -> None:
    """Beside a scaled loss an auxiliary loss that is not scaled is a ten-millionth of the gradient."""
    _, findings = found(lambda model, x: Auxiliary.apply(y := model(x), 1e-5 * y.mean()).sum() * 2.0**16)
    [finding] = findings
    assert (finding.kind, finding.whole) == ("constant", False)
    assert finding.share < 1e-4
    assert f"{Path(finding.file).name}:{finding.line}" == line_of(Auxiliary.backward)


@pytest.mark.parametrize("where", ["result", "parameter"])
def test_a_hook_that_clips(where: str) -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        y = model(x)
        return hooked(64 * y.square().sum(), y if where == "result" else model[0].weight)

    [finding] = found(loss)[1]
    assert finding.kind == "clipped"
    assert finding.function.startswith(f"a hook on the {where}")
    assert len(finding.parameters) == (4 if where == "result" else 1)
    assert f"{Path(finding.file).name}:{finding.line}" == line_of(clip)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_models_are_linear(name: str, dtype: torch.dtype) -> None:
    model, batch = make(name)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = loss_of(model(batch)).float().square().mean()
    assert compare_scales([loss], [torch.tensor(2.0**12)]) == []


def test_reversed_gradients_and_gradients_that_end_are_linear() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        y.register_hook(torch.neg)
        return (y.round() + y - y.detach()).square().sum()

    assert found(loss)[1] == []


def test_float16s_smallest_number_is_rounding() -> None:
    """It is float16's nearest number to 3.5e-8 and to twice as much: a gradient that does not grow, and not clipped."""
    model = mlp(4, 8, 4)
    assert compare_scales([Half.apply(model(torch.randn(8, 4)))], [torch.tensor(3.5e-8)]) == []


@pytest.mark.parametrize("with_look", [False, True])
def test_a_backward_that_was_looked_at_is_the_same(with_look: bool) -> None:
    def gradients(look: bool) -> list[Any]:
        torch.manual_seed(0)
        model, x = nn.Sequential(mlp(4, 8, 4), nn.Dropout(0.5)), torch.randn(8, 4, requires_grad=True)
        hidden = model(x)
        hidden.retain_grad()
        hidden.register_hook(lambda gradient: gradient * torch.rand(()))
        x.grad = torch.ones_like(x)
        loss = InPlace.apply(hidden)
        if look:
            assert compare_scales([loss]) == []
        loss.backward()
        return [hidden.grad, x.grad, torch.rand(2), *(p.grad for p in model.parameters())]

    assert all(map(torch.equal, gradients(with_look), gradients(False)))


def test_backward_that_cannot_run_twice_raises_and_leaves_the_graph() -> None:
    model, x = mlp(4, 8, 4), torch.randn(8, 4, requires_grad=True)
    expected = torch.autograd.grad(copy.deepcopy(model)(x).sum(), x)[0]
    loss = checkpoint(model, x, use_reentrant=True).sum()  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="use_reentrant"):
        compare_scales([loss])
    loss.backward()
    assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scaled", "weight", "grade"), [(True, 1.0, "wrong"), (False, 1.0, "note"), (False, 0.5, "wrong")]
)
def test_in_an_examination(scaled: bool, weight: float, grade: str) -> None:
    torch.manual_seed(0)
    model, x = mlp(4, 8, 4), torch.randn(8, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", 256.0, enabled=scaled)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(Ready.apply(model(x)) * weight).backward()
        scaler.step(optimizer)
        scaler.update()

    [problem] = [each for each in examine(step, model, steps=1).problems if each.look == "two scales"]
    assert (problem.grade, problem.kind, problem.op) == (grade, "not scaled", "Ready.backward")
    assert f"{Path(problem.file).name}:{problem.line}" == line_of(Ready.backward)
    assert "2.weight and 3 more" in problem.what


def test_an_examination_says_where_it_could_not_look() -> None:
    model, x = mlp(4, 8, 4), torch.randn(8, 4, requires_grad=True)
    report = examine(lambda: checkpoint(model, x, use_reentrant=True).sum().backward(), model, steps=1)  # type: ignore[union-attr]
    assert not report
    assert any("several scales" in text and "use_reentrant" in text for text in report.unseen)
