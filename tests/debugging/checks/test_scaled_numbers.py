"""Numbers that carry the loss scale are found where they are used without it; programs that divide by it are silent.

Most programs are written as in public repositories: penalties of critics, learned weights of examples, noise for
differential privacy, gradients that are logged.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampkit import GradScaler
from ampkit.debugging import Examination
from ampkit.debugging.finding import Finding
from tests.debugging.models import mlp


class Training:
    """A model, a batch, a scaler; `penalize` changes the loss, `change` the gradients before the step."""

    def __init__(self, cls: Any, scale: float) -> None:
        torch.manual_seed(0)
        self.model = mlp(4, 16, 1)
        self.x = torch.randn(32, 4, requires_grad=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.scaler = cls("cpu", scale)
        self.weights = torch.ones(3)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def step(self, penalize: Callable[[Any, Tensor], Tensor], change: Callable[[Any, Tensor], Any]) -> None:
        self.optimizer.zero_grad()
        loss = self.scaler.scale(penalize(self, (self.model(self.x) - self.x[:, :1].sin()).square().mean()))
        loss.backward()
        change(self, loss)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def scaled_gradients(t: Training, loss: Tensor, of: Any = None) -> tuple[Tensor, ...]:
    return torch.autograd.grad(t.scaler.scale(loss), of or t.parameters, create_graph=True)


def penalty_of_norm(t: Training, loss: Tensor) -> Tensor:
    norm = sum(g.pow(2).sum() for g in scaled_gradients(t, loss)) ** 0.5
    return loss + norm  # here


def penalty_of_norm_unscaled(t: Training, loss: Tensor) -> Tensor:
    gradients = [g * (1.0 / t.scaler.get_scale()) for g in scaled_gradients(t, loss)]
    return loss + torch.stack([g.pow(2).sum() for g in gradients]).sum().sqrt()


def penalty_to_one(t: Training, loss: Tensor) -> Tensor:
    (gradient,) = scaled_gradients(t, t.model(t.x).sum(), [t.x])
    return loss + 10 * (gradient.norm(dim=1) - 1).square().mean()  # here


def penalty_to_one_divided(t: Training, loss: Tensor) -> Tensor:
    (gradient,) = scaled_gradients(t, t.model(t.x).sum(), [t.x])
    gradient = gradient / (t.scaler.get_scale() + 1e-8)
    return loss + 10 * (gradient.norm(dim=1) - 1).square().mean()


def penalty_alone(t: Training, loss: Tensor) -> Tensor:
    (gradient,) = scaled_gradients(t, t.model(t.x).sum(), [t.x])
    return gradient.square().sum(1).mean()  # here


def penalty_divided_by_a_tensor(t: Training, loss: Tensor) -> Tensor:
    (gradient,) = scaled_gradients(t, t.model(t.x).sum(), [t.x])
    return loss + (gradient / torch.tensor(t.scaler.get_scale())).square().sum(1).mean()


def weights_of_examples(t: Training, loss: Tensor) -> Tensor:
    weights = torch.zeros(32, requires_grad=True)
    (gradient,) = scaled_gradients(t, (t.model(t.x).squeeze(1).square() * weights).sum(), [weights])
    return loss + (torch.full((32,), 0.5) - 0.1 * gradient.detach()).clamp(min=1e-7).mean()  # here


def attack(t: Training, loss: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(t.scaler.scale(t.model(t.x).square().mean()), [t.x])
    return loss + t.model(t.x.detach() + 0.1 * gradient.sign() + gradient / gradient.norm()).square().mean()


def weight_of_another_loss(t: Training, loss: Tensor) -> Tensor:
    other = t.model(t.x).mean()
    one, two = (scaled_gradients(t, each, t.parameters[-2:-1])[0].norm() for each in (loss, other))
    return loss + (one / (two + 1e-4)).clamp(0, 1e4).detach() * other


def losses_written_to_slices(t: Training, loss: Tensor) -> Tensor:
    """Backward writes zeros to a slice of the gradient."""
    losses = t.model(t.x).squeeze(1).square()
    losses[:16] = t.model(t.x[:16]).squeeze(1).abs()
    return loss + losses.mean()


def manual_weight_of_another_loss(t: Training, loss: Tensor) -> Tensor:
    gradient = scaled_gradients(t, t.model(t.x).mean(), t.parameters[-2:-1])[0].norm()
    return loss + (1 / (gradient + 1)).detach() * t.model(t.x).mean()  # here


def noise(t: Training, loss: Tensor) -> None:
    for gradient in t.gradients:
        gradient += 1e-3 * torch.randn_like(gradient)  # here


def noise_after_unscaling(t: Training, loss: Tensor) -> None:
    t.scaler.unscale_(t.optimizer)
    noise(t, loss)


def threshold(t: Training, loss: Tensor) -> None:
    if sum(g.norm() for g in t.gradients) > 1e3:  # here
        t.optimizer.param_groups[0]["lr"] *= 0.5


def clamped(t: Training, loss: Tensor) -> None:
    for gradient in t.gradients:
        gradient.clamp_(-1, 1)  # here


def clipped_by_hand(t: Training, loss: Tensor) -> None:
    norm = torch.stack([g.norm() for g in t.gradients]).norm()
    for gradient in t.gradients:
        gradient *= (0.1 / (norm + 1e-6)).clamp(max=1.0)  # here


def divided_by_hand(t: Training, loss: Tensor) -> None:
    for gradient in t.gradients:
        gradient /= t.scaler.get_scale()  # here


def clipped(t: Training, loss: Tensor) -> None:
    t.scaler.unscale_(t.optimizer)
    assert float(nn.utils.clip_grad_norm_(t.parameters, 1.0)) < 1e3


def logged_loss(t: Training, loss: Tensor) -> None:
    t.total = loss.item()  # here


def logged_norm(t: Training, loss: Tensor) -> None:
    t.norms = {i: g.norm(2).item() for i, g in enumerate(t.gradients)}  # here


def logged_norm_divided(t: Training, loss: Tensor) -> None:
    t.norms = [g.norm(2).item() / t.scaler.get_scale() for g in t.gradients]


def finite(t: Training, loss: Tensor) -> None:
    assert math.isfinite(loss.item())
    assert all(bool(g.isfinite().all()) and not g.isnan().any() for g in t.gradients)


def gradients_of_two_losses(t: Training, loss: Tensor) -> None:
    t.model(t.x).mean().backward()  # here


def gradients_that_are_cleared(t: Training, loss: Tensor) -> None:
    t.scaler.step(t.optimizer)
    t.scaler.scale(t.model(t.x).mean()).backward()  # as of a critic's parameters in the step of the generator
    t.scaler.update()
    t.optimizer.zero_grad()
    t.scaler.scale(t.model(t.x).mean()).backward()


def micro_batches(t: Training, loss: Tensor) -> None:
    t.scaler.scale(t.model(t.x).mean() / 2).backward()


def cleared_to_zeros(t: Training, loss: Tensor) -> None:
    t.optimizer.zero_grad(set_to_none=False)
    t.scaler.scale(t.model(t.x).mean()).backward()


def update_by_hand(t: Training, loss: Tensor) -> None:
    with torch.no_grad():
        for p, gradient in zip(t.parameters, t.gradients, strict=True):
            p -= 1e-9 * gradient  # here


def unchanged(t: Training, loss: Tensor) -> Tensor:
    return loss


def with_hook(t: Training, hook: Callable[[Tensor], Any], *, on_result: bool = False) -> Tensor:
    y = t.model(t.x)
    (y if on_result else t.parameters[0]).register_hook(hook)
    return 64 * y.square().sum()


def hook_that_clips(t: Training, loss: Tensor) -> Tensor:
    return with_hook(t, lambda g: g.clamp(-0.1, 0.1))  # here


def hook_on_a_result_that_clips(t: Training, loss: Tensor) -> Tensor:
    return with_hook(t, lambda g: g.clamp(-0.1, 0.1), on_result=True)  # here


def hook_that_normalizes(t: Training, loss: Tensor) -> Tensor:
    return with_hook(t, lambda g: g / g.norm())  # here


def hook_that_normalizes_a_result(t: Training, loss: Tensor) -> Tensor:
    return with_hook(t, lambda g: g / g.norm(), on_result=True)  # here


def hook_that_decays(t: Training, loss: Tensor) -> Tensor:
    weight = t.parameters[0].detach()
    return with_hook(t, lambda g: g + 0.01 * weight)  # here


def hooks_in_proportion(t: Training, loss: Tensor) -> Tensor:
    """Reversed, masked, averaged with itself, and rounded, which is a finding of `zeros` if it underflows."""
    mean = with_hook(t, lambda g: -g.masked_fill(g > 0, 0) + g.mean() + g * (g.norm() / (g.norm() + 1e-6)))
    return mean + with_hook(t, lambda g: (g * 1e-7).half().float() / 1e-7, on_result=True)


PENALTIES = (penalty_of_norm, penalty_to_one, penalty_alone, weights_of_examples, manual_weight_of_another_loss)
HOOKS = (
    hook_that_clips,
    hook_on_a_result_that_clips,
    hook_that_normalizes,
    hook_that_normalizes_a_result,
    hook_that_decays,
)
CHANGES = (
    noise,
    threshold,
    clamped,
    clipped_by_hand,
    divided_by_hand,
    logged_loss,
    logged_norm,
    gradients_of_two_losses,
    update_by_hand,
)
RIGHT_PENALTIES = (
    penalty_of_norm_unscaled,
    penalty_to_one_divided,
    penalty_divided_by_a_tensor,
    attack,
    weight_of_another_loss,
    hooks_in_proportion,
    losses_written_to_slices,
)
RIGHT_CHANGES = (
    gradients_that_are_cleared,
    noise_after_unscaling,
    clipped,
    logged_norm_divided,
    finite,
    micro_batches,
    cleared_to_zeros,
)


def found(function: Callable[[Any, Tensor], Any], cls: Any, scale: float = 2.0**12) -> list[Finding]:
    t = Training(cls, scale)
    functions = (
        (unchanged, function) if inspect.signature(function).return_annotation == "None" else (function, unchanged)
    )
    with Examination(t.model) as report:
        for _ in range(3):
            t.step(*functions)
    return [each for each in report.findings if each.check == "scaled numbers" and each.grade != "note"]


@pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("function", [*PENALTIES, *HOOKS, *CHANGES], ids=lambda each: each.__name__)
def test_a_number_with_the_loss_scale_is_found_where_it_is_used(function: Any, cls: Any) -> None:
    lines, first = inspect.getsourcelines(function)
    line = first + next(i for i, text in enumerate(lines) if "# here" in text)
    assert [(each.kind, each.place.line) for each in found(function, cls)] == [("scaled", line)]


@pytest.mark.parametrize("cls", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("function", [*RIGHT_PENALTIES, *RIGHT_CHANGES], ids=lambda each: each.__name__)
def test_programs_that_divide_by_the_loss_scale_are_silent(function: Any, cls: Any) -> None:
    assert found(function, cls) == []
