"""Parameters that are not trained, steps that change nothing, and clipping of nothing; healthy neighbors are silent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, StepLR

from ampkit import GradScaler, autocast
from ampkit.debugging import Examination
from ampkit.debugging.finding import Finding
from tests.debugging.models import mlp

CHECKS = ("trained", "unchanged", "clipping", "loop order")
Program = Callable[[], Any]


def train(
    model: Callable[[Tensor], Tensor],
    *optimizers: torch.optim.Optimizer,
    steps: int = 12,
    clip: Callable[[], Any] = lambda: None,
    then: Callable[[], Any] = lambda: None,
) -> None:
    x = torch.randn(8, 4)
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        clip()
        for optimizer in optimizers:
            optimizer.step()
        then()


def found(program: Program) -> list[Finding]:
    torch.manual_seed(0)
    with Examination() as report:
        program()
    return [each for each in report.ranked() if each.check in CHECKS]


def line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {text}"))


# --- programs with a fault: the grade, the kind, and a part of the text


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = {"a": [nn.Linear(4, 4)]}  # hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["a"][0](self.first(x))


class InForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        head = nn.Linear(4, 4)  # in forward
        return head(self.first(x))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)  # pair

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Idle(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def replaced() -> None:
    model = mlp(4, 4, 4)
    optimizer = SGD(model.parameters(), 0.1)  # replaced
    model[2] = nn.Linear(4, 4)
    train(model, optimizer)
    model.eval()


def copied() -> None:
    model = mlp(4, 4)
    train(model, SGD(copy.deepcopy(model).parameters(), 0.1))  # copied


def not_held() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = SGD([*model[0].parameters(), *model[2].parameters()], 0.1)  # not held
    train(lambda x: model[2](model[1](model[0](x))), optimizer)


def part(last: bool) -> None:
    model = Pair()
    train(model, SGD((model.second if last else model.first).parameters(), 0.1))  # part


def hidden() -> None:
    model = Hidden()
    train(model, SGD(model.parameters(), 0.1))


def in_forward() -> None:
    model = InForward()
    train(model, SGD(model.parameters(), 0.1))


class Cut(nn.Module):
    def __init__(self, data: bool) -> None:
        super().__init__()
        self.layers, self.data = mlp(4, 4, 4), data

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.layers[0]
        last = self.layers[2]
        if self.data:
            return last(nn.functional.linear(x, first.weight.data, first.bias.data))  # data
        with torch.no_grad():  # no grad
            x = first(x)
        return last(x)


def without_autograd(data: bool) -> None:
    model = Cut(data)
    train(model, SGD(model.parameters(), 0.1))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class OnTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Tower(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # tower


def decorated() -> None:
    model = OnTower()
    train(model, SGD(model.parameters(), 0.1))


def without_gradients() -> None:
    model, other = mlp(4, 4), mlp(4, 3)
    train(model, SGD(model.parameters(), 0.1), SGD(other.parameters(), 0.1))  # without gradients


def unused_layers() -> None:
    models = [nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 3)}) for _ in range(2)]
    optimizers = [Adam(model.parameters()) for model in models]  # unused layers
    train(lambda x: models[1]["used"](models[0]["used"](x)), *optimizers)


def never_steps() -> None:
    model = mlp(4, 4)
    optimizer = SGD(model.parameters(), 0.1)  # never steps
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    train(model, optimizer)


def restored() -> None:
    """The state that is kept is the model itself."""
    model = mlp(4, 4)
    best = model.state_dict()
    train(model, SGD(model.parameters(), 0.1))
    model.load_state_dict(best)  # restored


def rate_too_small() -> None:
    model = mlp(4, 4)
    train(model, SGD(model.parameters(), 1e-12))  # too small


def rate_zero() -> None:
    model = mlp(4, 4)
    train(model, SGD(model.parameters(), 0.0))  # zero


def scheduled_zero() -> None:
    model = mlp(4, 4)
    optimizer = SGD(model.parameters(), 0.1)
    scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 4))
    train(model, optimizer, then=lambda: scheduler.step())  # scheduled zero


def scheduled_small() -> None:
    model = mlp(4, 4)
    optimizer = SGD(model.parameters(), 0.1)
    scheduler = StepLR(optimizer, 1, 1e-3)
    train(model, optimizer, steps=30, then=lambda: scheduler.step())  # scheduled small


def not_written() -> None:
    model = mlp(4, 4)
    train(model, Idle(model.parameters(), 0.1))  # not written


def exhausted() -> None:
    model = mlp(4, 4)
    parameters = model.parameters()
    with pytest.warns(UserWarning, match="empty generator"):
        train(model, SGD(model.parameters(), 0.1), clip=lambda: clip_grad_norm_(parameters, 1.0))  # exhausted


def read_twice() -> None:
    """As `clip_grad_norm_` of torchtitan: the norm is computed, and then nothing is clipped."""
    model = mlp(4, 4)

    def clip() -> None:
        parameters = model.parameters()
        norm = nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)
        nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)  # read twice

    train(model, SGD(model.parameters(), 0.1), clip=clip)


def clips_another() -> None:
    model, other = mlp(4, 4), mlp(4, 4)
    train(model, SGD(model.parameters(), 0.1), clip=lambda: clip_grad_norm_(other.parameters(), 1.0))  # another


def clips_by_scaler() -> None:
    model, scaler = mlp(4, 4), GradScaler("cpu", init_scale=4.0)
    optimizer, other = SGD(model.parameters(), 0.1), SGD(mlp(4, 4).parameters(), 0.1)
    for _ in range(8):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(8, 4)).square().mean()).backward()
        scaler.clip_grad_norm_(other, 1.0)  # scaler
        scaler.step(optimizer)
        scaler.update()


FAULTS: dict[str, tuple[Program, str, str]] = {
    "replaced": (replaced, "error made later", "2.weight, 2.bias, and no optimizer uses them"),
    "copied": (copied, "error not held", "0.weight, 0.bias, and no optimizer uses them"),
    "not held": (not_held, "error not held", "weight, bias, and no optimizer"),
    "part": (lambda: part(False), "error not held", "second.weight, second.bias, and no optimizer"),
    "hidden": (hidden, "error hidden", "of float32[4, 4], float32[4], and no optimizer uses them"),
    "in forward": (in_forward, "error made in forward", "a parameter, float32[4, 4], is made in each forward"),
    "no grad": (lambda: without_autograd(False), "note no autograd", "of layers.0.weight, layers.0.bias is missing"),
    "tower": (decorated, "error no autograd", "of first.layer.weight, first.layer.bias is missing"),
    "data": (lambda: without_autograd(True), "error no autograd", "of layers.0.weight, layers.0.bias is missing"),
    "without gradients": (without_gradients, "error no gradients", "float32[3, 4], float32[3]"),
    "unused layers": (unused_layers, "note no gradient", "float32[3, 4], float32[3], float32[3, 4] and 1 more"),
    "never steps": (never_steps, "error no step", "never steps: 12 backward passes"),
    "restored": (restored, "error copied to itself", "a copy changes nothing"),
    "too small": (rate_too_small, "error update rounded away", "last 12 steps do not change 0.weight, 0.bias"),
    "zero": (rate_zero, "error learning rate 0", "in the last 12 steps"),
    "scheduled zero": (scheduled_zero, "error learning rate 0", "in the last 8 steps"),
    "scheduled small": (scheduled_small, "error update rounded away", "do not change 0.weight, 0.bias"),
    "not written": (not_written, "error not written", "last 12 steps do not change 0.weight, 0.bias"),
    "exhausted": (exhausted, "error empty", "the last 11 calls clip nothing"),
    "read twice": (read_twice, "error empty", "the last 12 calls clip nothing"),
    "another": (clips_another, "error no gradients", "the last 12 calls clip nothing"),
    "scaler": (clips_by_scaler, "error no gradients", "the last 8 calls clip nothing"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_its_line(name: str) -> None:
    program, kind, text = FAULTS[name]
    first, *others = found(program)
    assert (f"{first.grade} {first.kind}", first.place.line) == (kind, line_of(name))
    assert text in first.what
    assert others == []


def test_a_head_that_no_loss_uses_is_a_note() -> None:
    """Autograd records it, although the loop also evaluates it without."""
    model = Pair()

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                model.second(x)
            model.second(x)
            return model.first(x)

    (only,) = found(lambda: train(Model(), SGD(model.parameters(), 0.1)))
    assert (only.grade, only.kind) == ("note", "no gradient")


def test_training_the_last_layers_alone_is_a_note() -> None:
    (only,) = found(lambda: part(True))
    assert (only.grade, only.kind, only.place.line) == ("note", "not held", line_of("part"))
    assert "first.weight, first.bias" in only.what


# --- healthy programs


def frozen() -> None:
    model = Pair()
    model.first.requires_grad_(False)
    train(model, SGD([p for p in model.parameters() if p.requires_grad], 0.1))


def frozen_in_the_optimizer() -> None:
    model = Pair()
    model.first.requires_grad_(False)
    train(model, SGD(model.parameters(), 0.1), clip=lambda: clip_grad_norm_(model.first.parameters(), 1.0))


def frozen_by_group() -> None:
    model = Pair()
    groups = [{"params": model.first.parameters(), "lr": 0.0}, {"params": model.second.parameters()}]
    train(model, SGD(groups, 0.1))


def adversarial() -> None:
    model = mlp(4, 4)
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(6):
        x = torch.randn(8, 4, requires_grad=True)
        model(x).square().mean().backward()
        assert x.grad is not None
        optimizer.zero_grad()
        model((x + 0.1 * x.grad.sign()).detach()).square().mean().backward()
        optimizer.step()


def collocation() -> None:
    """As in physics-informed networks: the loss has a derivative by inputs that are always the same."""

    class Physics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = mlp(1, 8, 1)
            self.x = torch.linspace(0, 1, 16)[:, None].requires_grad_()

        def forward(self) -> Tensor:
            u = self.network(self.x)
            (slope,) = torch.autograd.grad(u.sum(), self.x, create_graph=True)
            return (slope - u).square().mean()

    model = Physics()
    optimizer = Adam(model.parameters())
    for _ in range(6):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


def penalty() -> None:
    """A GAN with a gradient penalty, whose generator steps less often, each with its own clipping."""
    generator, critic = mlp(2, 4), mlp(4, 1)
    slow, fast = Adam(generator.parameters()), Adam(critic.parameters())
    for step in range(12):
        fast.zero_grad()
        mixed = (torch.rand(8, 1) * generator(torch.randn(8, 2)).detach()).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        (critic(mixed).mean() + (slope.norm(2, 1) - 1).square().mean()).backward()
        clip_grad_norm_(critic.parameters(), 1.0)
        fast.step()
        slow.zero_grad()
        if step % 6 == 0:
            (-critic(generator(torch.randn(8, 2))).mean()).backward()
            slow.step()
        clip_grad_norm_(generator.parameters(), 1.0)
        clip_grad_norm_([p for p in generator.parameters() if p.grad is not None], 1.0)


def once() -> None:
    """A network that trains in the first step only."""
    model, other, first = mlp(4, 4), mlp(4, 4), iter([1.0])
    optimizers = SGD(model.parameters(), 0.1), SGD(other.parameters(), 0.1)
    train(
        lambda x: model(x) + other(x) if next(first, 0.0) else model(x),
        *optimizers,
        clip=lambda: clip_grad_norm_(other.parameters(), 1.0),
    )


def generators() -> None:
    """A check does not use them up."""
    model = mlp(4, 4)

    def clip() -> None:
        norm = nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
        assert nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]) < 0.011

    train(model, SGD(model.parameters(), 0.1), clip=clip)


def perceptual() -> None:
    model, judge = mlp(4, 4), mlp(4, 3).eval()
    train(lambda x: judge(model(x))[:, :1], SGD(model.parameters(), 0.1))


class Average(nn.Module):
    """As in self-supervised learning: a part of the model is an average of another."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.average = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.average.parameters(), self.model.parameters(), strict=True):
                p.lerp_(q, 0.1)
            target = self.average(x)
        return self.model(x) - target


def shared() -> None:
    """A target network that shares a layer with the network whose state it loads."""
    model, target = mlp(4, 4, 4), mlp(4, 4, 4)
    target[0] = model[0]
    train(model, SGD(model.parameters(), 0.1), then=lambda: target.load_state_dict(model.state_dict()))


def average() -> None:
    model = Average()
    train(model, SGD(model.parameters(), 0.1))


class Adapted(nn.Module):
    """As in test-time training: the forward trains parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        fast = nn.Parameter(torch.ones(4))
        optimizer = SGD([fast], 0.1)
        (x * fast).square().mean().backward()
        optimizer.step()
        return self.first(x * fast)


def adapted() -> None:
    model = Adapted()
    train(model, SGD(model.parameters(), 0.1))


def evaluated() -> None:
    model = mlp(4, 4)
    for _ in range(12):
        model(torch.randn(8, 4)).square().mean().backward()  # for its gradients


def by_hand() -> None:
    model, noise = mlp(4, 4), torch.zeros(4, requires_grad=True)
    scale = nn.Parameter(torch.ones(4))
    optimizer = SGD(model.parameters(), 0.1)

    def update() -> None:
        for tensor in (noise, scale):
            assert tensor.grad is not None
            tensor.data -= 0.1 * tensor.grad
            tensor.grad = None

    train(lambda x: model(x) * scale + noise, optimizer, then=update)


def unused_module() -> None:
    """Of a model whose head is used in some steps only."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    used: Iterator[str] = iter("aaaaaaaaaaab")
    train(lambda x: model[next(used)](x), SGD(model.parameters(), 0.1))


def converged() -> None:
    """The last updates are rounded away, since the gradient is nearly 0."""
    mean = nn.Parameter(torch.zeros(4))
    optimizer = SGD([mean], 0.1)
    for _ in range(200):
        optimizer.zero_grad()
        (mean - 0.3).square().sum().backward()
        optimizer.step()


def bias_before_norm() -> None:
    """Its gradient is rounding, and so are its updates."""
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
    train(model, SGD(model.parameters(), 0.01), steps=30)


def clamped() -> None:
    """As the temperature of CLIP, at its bound."""
    model, scale = mlp(4, 4), nn.Parameter(torch.tensor(4.0))
    train(lambda x: x - model(x) * scale, SGD([*model.parameters(), scale], 0.1), then=lambda: scale.data.clamp_(4, 4))


def warm_up() -> None:
    model = mlp(4, 4)
    optimizer = SGD(model.parameters(), 0.1)
    scheduler = LambdaLR(optimizer, lambda step: min(step, 12 - step) / 12)
    train(model, optimizer, then=lambda: scheduler.step())


def lbfgs() -> None:
    model, x = mlp(4, 4), torch.randn(8, 4)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        return loss

    for _ in range(20):
        optimizer.step(closure)
        optimizer.zero_grad()


def skipped() -> None:
    """A scaler skips the steps, on the device too."""
    for fused in (False, True):
        model, scaler = mlp(4, 4), torch.amp.GradScaler("cpu", init_scale=2.0**100)
        optimizer = Adam(model.parameters(), fused=fused)
        for _ in range(6):
            optimizer.zero_grad()
            with autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(8, 4)).float().square().mean() * 1e38
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def skipped_for_one_element() -> None:
    """A fused optimizer skips the whole step, although most gradients are finite."""
    p, factor = nn.Parameter(torch.zeros(2048)), torch.ones(2048)
    factor[1] = 1e38
    optimizer, scaler = SGD([p], 0.1, fused=True), torch.amp.GradScaler("cpu", init_scale=2.0**20)
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def masters() -> None:
    """The optimizer holds copies in float32, which are copied back."""
    model = mlp(4, 4).bfloat16()
    copies = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = SGD(copies, 0.1)
    for _ in range(6):
        model.zero_grad()
        model(torch.randn(8, 4).bfloat16()).float().square().mean().backward()
        for p, master in zip(model.parameters(), copies, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        for p, master in zip(model.parameters(), copies, strict=True):
            p.data.copy_(master)


def accumulated() -> None:
    """In a run that ends before the optimizer's first step."""
    model = mlp(4, 4)
    optimizer = SGD(model.parameters(), 0.1)
    optimizer.zero_grad()
    for _ in range(16):
        model(torch.randn(8, 4)).square().mean().backward()


def inner_loop() -> None:
    """Meta-learning: a copy of the model learns in each step, and gives its gradients to the model."""
    model = mlp(4, 4)
    optimizer = SGD(model.parameters(), 0.1)
    for _ in range(6):
        learner = copy.deepcopy(model)
        train(learner, SGD(learner.parameters(), 0.01), steps=2)
        learner(torch.randn(8, 4)).square().mean().backward()
        for p, q in zip(model.parameters(), learner.parameters(), strict=True):
            p.grad = q.grad
        optimizer.step()


def evolution() -> None:
    """An optimizer without gradients."""

    class Evolution(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.add_(torch.randn_like(p), alpha=0.1)

    optimizer = Evolution(mlp(4, 4).parameters())
    for _ in range(6):
        optimizer.step()


HEALTHY: list[Program] = [
    frozen,
    frozen_in_the_optimizer,
    frozen_by_group,
    adversarial,
    collocation,
    penalty,
    once,
    generators,
    perceptual,
    shared,
    average,
    adapted,
    evaluated,
    by_hand,
    unused_module,
    converged,
    bias_before_norm,
    clamped,
    warm_up,
    lbfgs,
    skipped,
    skipped_for_one_element,
    masters,
    accumulated,
    inner_loop,
    evolution,
]


@pytest.mark.parametrize("program", HEALTHY, ids=lambda program: program.__name__)
def test_a_healthy_program_is_silent(program: Program) -> None:
    assert found(program) == []
