"""Numbers that carry the loss scale are found where they are used without it; programs that divide by it are silent.

Most programs are written as in public repositories: penalties of critics, learned weights of examples, noise for
differential privacy, gradients that are logged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampkit import GradScaler
from ampkit.debugging import Examination
from tests.debugging.models import mlp
from tests.debugging.planted import line_in


class Training:
    """A model, a batch, a scaler."""

    def __init__(self, cls: Any) -> None:
        torch.manual_seed(0)
        self.model = mlp(4, 16, 1)
        self.x = torch.randn(32, 4, requires_grad=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.scaler = cls("cpu", 2.0**12)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def scaled(self, loss: Tensor, of: Any = None) -> tuple[Tensor, ...]:
        """Gradients of a scaled loss, of the parameters unless given."""
        return torch.autograd.grad(self.scaler.scale(loss), of or self.parameters, create_graph=True)

    def slope(self) -> Tensor:
        """The scaled gradient of the inputs."""
        return self.scaled(self.model(self.x).sum(), [self.x])[0]

    def norm_of(self, loss: Tensor) -> Tensor:
        """The norm of the scaled gradient of the last layer's weight."""
        return self.scaled(loss, self.parameters[-2:-1])[0].norm()

    def hooked(self, hook: Callable[[Tensor], Any], *, on_result: bool = False) -> Tensor:
        """A loss with a hook on the first weight, or on the model's result."""
        y = self.model(self.x)
        (y if on_result else self.parameters[0]).register_hook(hook)
        return 64 * y.square().sum()

    def step(self, penalize: Callable[[Any, Tensor], Tensor], change: Callable[[Any, Tensor], Any]) -> None:
        self.optimizer.zero_grad()
        loss = self.scaler.scale(penalize(self, (self.model(self.x) - self.x[:, :1].sin()).square().mean()))
        loss.backward()
        change(self, loss)
        self.scaler.step(self.optimizer)
        self.scaler.update()


# --- functions that return another loss, and functions that use or change gradients before the step


def weights_of_examples(t: Training, loss: Tensor) -> Tensor:
    weights = torch.zeros(32, requires_grad=True)
    (gradient,) = t.scaled((t.model(t.x).squeeze(1).square() * weights).sum(), [weights])
    return loss + (torch.full((32,), 0.5) - 0.1 * gradient.detach()).clamp(min=1e-7).mean()  # here


def decaying_hook(t: Training, loss: Tensor) -> Tensor:
    weight = t.parameters[0].detach()
    return t.hooked(lambda g: g + 0.01 * weight)  # here


def clipping_by_hand(t: Training, loss: Tensor) -> None:
    norm = torch.stack([g.norm() for g in t.gradients]).norm()
    for gradient in t.gradients:
        gradient *= (0.1 / (norm + 1e-6)).clamp(max=1.0)  # here


def update_by_hand(t: Training, loss: Tensor) -> None:
    with torch.no_grad():
        for p, gradient in zip(t.parameters, t.gradients, strict=True):
            p -= 1e-9 * gradient  # here


def attack(t: Training, loss: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(t.scaler.scale(t.model(t.x).square().mean()), [t.x])
    return loss + t.model(t.x.detach() + 0.1 * gradient.sign() + gradient / gradient.norm()).square().mean()


def slices(t: Training, loss: Tensor) -> Tensor:
    """Backward writes zeros to a slice of the gradient."""
    losses = t.model(t.x).squeeze(1).square()
    losses[:16] = t.model(t.x[:16]).squeeze(1).abs()
    return loss + losses.mean()


def weight_of_another_loss(t: Training, loss: Tensor) -> Tensor:
    other = t.model(t.x).mean()
    return loss + (t.norm_of(loss) / (t.norm_of(other) + 1e-4)).clamp(0, 1e4).detach() * other


def hooks_in_proportion(t: Training, loss: Tensor) -> Tensor:
    """Reversed, masked, averaged with itself, and rounded, which is a finding of `zeros` if it underflows."""
    mean = t.hooked(lambda g: -g.masked_fill(g > 0, 0) + g.mean() + g * (g.norm() / (g.norm() + 1e-6)))
    return mean + t.hooked(lambda g: (g * 1e-7).half().float() / 1e-7, on_result=True)


def gradients_that_are_cleared(t: Training, loss: Tensor) -> None:
    """As of a critic's parameters in the step of the generator."""
    t.scaler.step(t.optimizer)
    t.scaler.scale(t.model(t.x).mean()).backward()
    t.scaler.update()
    t.optimizer.zero_grad()
    t.scaler.scale(t.model(t.x).mean()).backward()


def statistics(t: Training, loss: Tensor) -> None:
    """Backward of batch norm reads the statistics, and evaluation uses them."""
    norm = nn.BatchNorm1d(t.x.shape[1])
    t.scaler.scale(norm(t.x).square().mean()).backward()
    norm.eval()(t.x)


def clipped(t: Training, loss: Tensor) -> None:
    t.scaler.unscale_(t.optimizer)
    assert float(nn.utils.clip_grad_norm_(t.parameters, 1.0)) < 1e3


# fmt: off
# A fault is on the line of its lambda, or on the line with the comment.
LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "penalty of the norm": lambda t, loss: loss + sum(g.pow(2).sum() for g in t.scaled(loss)) ** 0.5,
    "penalty to one": lambda t, loss: loss + 10 * (t.slope().norm(dim=1) - 1).square().mean(),
    "penalty alone": lambda t, loss: t.slope().square().sum(1).mean(),
    "weights of examples": weights_of_examples,
    "weight of a loss": lambda t, loss: loss + (1 / (t.norm_of(t.model(t.x).mean()) + 1)).detach() * t.model(t.x).sum(),
    "hook that clips": lambda t, loss: t.hooked(lambda g: g.clamp(-0.1, 0.1)),
    "hook on a result that clips": lambda t, loss: t.hooked(lambda g: g.clamp(-0.1, 0.1), on_result=True),
    "hook that normalizes": lambda t, loss: t.hooked(lambda g: g / g.norm()),
    "hook that normalizes a result": lambda t, loss: t.hooked(lambda g: g / g.norm(), on_result=True),
    "hook that decays": decaying_hook,
}
USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "noise": lambda t, loss: [g.add_(1e-3 * torch.randn_like(g)) for g in t.gradients],
    "threshold": lambda t, loss: bool(sum(g.norm() for g in t.gradients) > 1e3),
    "clamped": lambda t, loss: [g.clamp_(-1, 1) for g in t.gradients],
    "clipped by hand": clipping_by_hand,
    "divided by hand": lambda t, loss: [g.div_(t.scale) for g in t.gradients],
    "logged loss": lambda t, loss: loss.item(),
    "logged norm": lambda t, loss: {i: g.norm(2).item() for i, g in enumerate(t.gradients)},
    "gradients of two losses": lambda t, loss: t.model(t.x).mean().backward(),
    "update by hand": update_by_hand,
}
RIGHT_LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "penalty of the unscaled norm":
        lambda t, loss: loss + torch.stack([(g * (1.0 / t.scale)).pow(2).sum() for g in t.scaled(loss)]).sum().sqrt(),
    "penalty to one": lambda t, loss: loss + 10 * ((t.slope() / (t.scale + 1e-8)).norm(dim=1) - 1).square().mean(),
    "divided by a tensor": lambda t, loss: loss + (t.slope() / torch.tensor(t.scale)).square().sum(1).mean(),
    "attack": attack,
    "weight of another loss": weight_of_another_loss,
    "hooks in proportion": hooks_in_proportion,
    "losses written to slices": slices,
}
RIGHT_USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "gradients that are cleared": gradients_that_are_cleared,
    "noise after unscaling": lambda t, loss: (t.scaler.unscale_(t.optimizer), USES["noise"](t, loss)),
    "statistics of batch norm": statistics,
    "clipped": clipped,
    "logged norm": lambda t, loss: [g.norm(2).item() / t.scale for g in t.gradients],
    "finite": lambda t, loss: [math.isfinite(loss.item()), *(bool(g.isfinite().all()) for g in t.gradients)],
    "no NaN": lambda t, loss: any(g.isnan().any() for g in t.gradients),
    "micro-batches": lambda t, loss: t.scaler.scale(t.model(t.x).mean() / 2).backward(),
    "cleared to zeros": lambda t, loss: (
        t.optimizer.zero_grad(set_to_none=False), t.scaler.scale(t.model(t.x).mean()).backward()),
}
# fmt: on


def found(cls: Any, penalize: Callable[[Any, Tensor], Tensor], use: Callable[[Any, Tensor], Any]) -> list[Any]:
    t = Training(cls)
    with Examination(t.model) as report:
        for _ in range(3):
            t.step(penalize, use)
    return [(f.kind, f.place.line) for f in report.findings if f.check == "scaled numbers" and f.grade != "note"]


both = pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler])


@both
@pytest.mark.parametrize("name", [*LOSSES, *USES])
def test_a_number_with_the_loss_scale_is_found_where_it_is_used(name: str, cls: Any) -> None:
    if name in LOSSES:
        found_at, function = found(cls, LOSSES[name], lambda t, loss: None), LOSSES[name]
    else:
        found_at, function = found(cls, lambda t, loss: loss, USES[name]), USES[name]
    assert found_at == [("scaled", line_in(function))]


@both
@pytest.mark.parametrize("name", [*RIGHT_LOSSES, *RIGHT_USES])
def test_programs_that_divide_by_the_loss_scale_are_silent(name: str, cls: Any) -> None:
    assert found(cls, RIGHT_LOSSES.get(name, lambda t, loss: loss), RIGHT_USES.get(name, lambda t, loss: None)) == []
