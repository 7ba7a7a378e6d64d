"""Parameters that are not trained, steps that change nothing, and clipping of nothing; healthy neighbors are silent."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
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
from tests.debugging.models import Middle, mlp
from tests.debugging.planted import by_name, lines_of

CHECKS = ("trained", "unchanged", "clipping", "loop order")
Program = Callable[[Any], Any]  # of a model with two layers


def train(
    model: Callable[[Tensor], Tensor],
    *optimizers: torch.optim.Optimizer,
    steps: int = 12,
    clip: Callable[[], Any] = lambda: None,
    then: Callable[[], Any] = lambda: None,
    scheduler: Any = None,
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
        if scheduler:
            scheduler.step()  # scheduled


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), 0.1)


def found(program: Program) -> list[Finding]:
    torch.manual_seed(0)
    with Examination() as report:
        program(mlp(4, 4, 4))
    return [each for each in report.ranked() if each.check in CHECKS]


# --- programs with a fault: grade and kind, and a part of the text; the line is the lambda's, or ends with the name


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = {"a": [nn.Linear(4, 4)]}  # hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["a"][0](self.first(x))


def in_forward(x: Tensor, first: nn.Module) -> Tensor:
    head = nn.Linear(4, 4)  # in forward
    return head(first(x))


def without_grad(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
    with torch.no_grad():  # no grad
        x = first(x)
    return last(x)


class Tower(nn.Linear):
    forward = torch.no_grad()(nn.Linear.forward)


def on_tower(x: Tensor, tower: nn.Module, last: nn.Module) -> Tensor:
    return last(tower(x))  # tower


def of_data(x: Tensor, first: Any, last: nn.Module) -> Tensor:
    return last(nn.functional.linear(x, first.weight.data, first.bias.data))  # data


class Idle(SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def replaced(m: Any) -> None:
    optimizer = SGD(m.parameters(), 0.1)  # replaced
    m[2] = nn.Linear(4, 4)
    train(m, optimizer)
    m.eval()


def unused_layers(m: Any) -> None:
    models = [nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 3)}) for _ in range(2)]
    optimizers = [Adam(model.parameters()) for model in models]  # unused layers
    train(lambda x: models[1]["used"](models[0]["used"](x)), *optimizers)


def never_steps(m: Any) -> None:
    optimizer = SGD(m.parameters(), 0.1)  # never steps
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    train(m, optimizer)


def restored(m: Any) -> None:
    """The state that is kept is the model itself."""
    best = m.state_dict()
    train(m, sgd(m))
    m.load_state_dict(best)  # restored


def exhausted(m: Any) -> None:
    parameters = m.parameters()
    with pytest.warns(UserWarning, match="empty generator"):
        train(m, sgd(m), clip=lambda: clip_grad_norm_(parameters, 1.0))  # exhausted


def read_twice(m: Any) -> None:
    """As `clip_grad_norm_` of torchtitan: the norm is computed, and then nothing is clipped."""

    def clip() -> None:
        parameters = m.parameters()
        norm = nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)
        nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)  # read twice

    train(m, sgd(m), clip=clip)


def unused_head(m: Any) -> None:
    """Autograd records it, although the loop also evaluates it without."""

    def first(x: Tensor) -> Tensor:
        with torch.no_grad():
            m[2](x)
        m[2](x)
        return m[0](x)

    train(first, SGD(m.parameters(), 0.1))  # unused head


def clips_by_scaler(m: Any) -> None:
    scaler, optimizer, other = GradScaler("cpu", init_scale=4.0), sgd(m), sgd(mlp(4, 4))
    for _ in range(8):
        optimizer.zero_grad()
        scaler.scale(m(torch.randn(8, 4)).square().mean()).backward()
        scaler.clip_grad_norm_(other, 1.0)  # scaler
        scaler.step(optimizer)
        scaler.update()


ALL = "0.weight, 0.bias, 2.weight and 1 more"
# fmt: off
FAULTS: dict[str, tuple[Program, str, str]] = {
    "replaced": (replaced, "error made later", "2.weight, 2.bias, and no optimizer uses them"),
    "copied": (lambda m: train(m, SGD(copy.deepcopy(m).parameters(), 0.1)), "error not held", ALL),
    "not held": (lambda m: train((n := mlp(4, 4).extend(m)), SGD([*n[0].parameters(), *n[3].parameters()], 0.1)),
               "error not held", "1.weight, 1.bias, and no optimizer"),
    "last": (lambda m: train(m, SGD(m[0].parameters(), 0.1)), "error not held", "2.weight, 2.bias, and no optimizer"),
    "first": (lambda m: train(m, SGD(m[2].parameters(), 0.1)), "note not held", "0.weight, 0.bias"),
    "hidden": (lambda m: train(m := Hidden(), sgd(m)),
               "error hidden", "of float32[4, 4], float32[4], and no optimizer uses them"),
    "in forward": (lambda m: train(m := Middle(in_forward, m), sgd(m)),
                   "error made in forward", "a parameter, float32[4, 4], is made in each forward"),
    "no grad": (lambda m: train(m := Middle(without_grad, *m[::2]), sgd(m)),
                "note no autograd", "of layers.0.weight, layers.0.bias is missing"),
    "tower": (lambda m: train(m := Middle(on_tower, Tower(4, 4), m[2]), sgd(m)),
              "error no autograd", "of layers.0.weight, layers.0.bias is missing"),
    "data": (lambda m: train(m := Middle(of_data, *m[::2]), sgd(m)),
             "error no autograd", "of layers.0.weight, layers.0.bias is missing"),
    "without gradients": (lambda m: train(m, sgd(m), SGD(mlp(4, 3).parameters(), 0.1)),
                          "error no gradients", "float32[3, 4], float32[3]"),
    "unused layers": (unused_layers, "note no gradient", "float32[3, 4], float32[3], float32[3, 4] and 1 more"),
    "unused head": (unused_head, "note no gradient", "the gradient of weight, bias is missing"),
    "never steps": (never_steps, "error no step", "never steps: 12 backward passes"),
    "restored": (restored, "error copied to itself", "a copy changes nothing"),
    "too small": (lambda m: train(m, SGD(m.parameters(), 1e-12)),
                  "error update rounded away", f"last 12 steps do not change {ALL}"),
    "zero": (lambda m: train(m, SGD(m.parameters(), 0.0)), "error learning rate 0", "in the last 12 steps"),
    "scheduled: zero": (lambda m: train(m, o := sgd(m), scheduler=LambdaLR(o, lambda i: max(0.0, 1 - i / 4))),
                        "error learning rate 0", "in the last 8 steps"),
    "scheduled: small": (lambda m: train(m, o := sgd(m), steps=30, scheduler=StepLR(o, 1, 1e-3)),
                         "error update rounded away", f"do not change {ALL}"),
    "not written": (lambda m: train(m, Idle(m.parameters(), 0.1)),
                    "error not written", f"last 12 steps do not change {ALL}"),
    "exhausted": (exhausted, "error empty", "the last 11 calls clip nothing"),
    "read twice": (read_twice, "error empty", "the last 12 calls clip nothing"),
    "another": (lambda m: (o := mlp(4, 4), train(m, sgd(m), clip=lambda: clip_grad_norm_(o.parameters(), 1.0))),
                "error no gradients", "the last 12 calls clip nothing"),
    "scaler": (clips_by_scaler, "error no gradients", "the last 8 calls clip nothing"),
}
# fmt: on


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_its_line(name: str) -> None:
    program, kind, text = FAULTS[name]
    first, *others = found(program)
    line = lines_of(__file__).get(name.partition(":")[0], program.__code__.co_firstlineno)
    assert (f"{first.grade} {first.kind}", first.place.line) == (kind, line)
    assert text in first.what
    assert others == []


# --- healthy programs


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


def adapted(x: Tensor, layers: nn.Module) -> Tensor:
    """As in test-time training: the forward trains parameters of its own."""
    fast = nn.Parameter(torch.ones(4))
    optimizer = SGD([fast], 0.1)
    (x * fast).square().mean().backward()
    optimizer.step()
    return layers(x * fast)


def adversarial(m: Any) -> None:
    optimizer = sgd(m)
    for _ in range(6):
        x = torch.randn(8, 4, requires_grad=True)
        m(x).square().mean().backward()
        assert x.grad is not None
        optimizer.zero_grad()
        m((x + 0.1 * x.grad.sign()).detach()).square().mean().backward()
        optimizer.step()


def collocation(m: Any) -> None:
    """As in physics-informed networks: the loss has a derivative by inputs that are always the same."""
    m.x = torch.linspace(0, 1, 16)[:, None].requires_grad_()
    m[0] = nn.Linear(1, 4)

    def residual(_: Tensor) -> Tensor:
        u = m(m.x)
        (slope,) = torch.autograd.grad(u.sum(), m.x, create_graph=True)
        return (slope - u)[:8]

    train(residual, Adam(m.parameters()), steps=6)


def penalty(m: Any) -> None:
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


def once(m: Any) -> None:
    """A network that trains in the first step only."""
    other, first = mlp(4, 4), iter([1.0])
    train(
        lambda x: m(x) + other(x) if next(first, 0.0) else m(x),
        *(sgd(m), sgd(other)),
        clip=lambda: clip_grad_norm_(other.parameters(), 1.0),
    )


def generators(m: Any) -> None:
    """A check does not use them up."""

    def clip() -> None:
        norm = nn.utils.get_total_norm(p.grad for p in m.parameters() if p.grad is not None)
        nn.utils.clip_grads_with_norm_(m.parameters(), 0.01, norm)
        assert nn.utils.get_total_norm([p.grad for p in m.parameters() if p.grad is not None]) < 0.011

    train(m, sgd(m), clip=clip)


def shared(m: Any) -> None:
    """A target network that shares a layer with the network whose state it loads."""
    target = mlp(4, 4, 4)
    target[0] = m[0]
    train(m, sgd(m), then=lambda: target.load_state_dict(m.state_dict()))


def by_hand(m: Any) -> None:
    noise, scale = torch.zeros(4, requires_grad=True), nn.Parameter(torch.ones(4))

    def update() -> None:
        for tensor in (noise, scale):
            assert tensor.grad is not None
            tensor.data -= 0.1 * tensor.grad
            tensor.grad = None

    train(lambda x: m(x) * scale + noise, sgd(m), then=update)


def unused_module(m: Any) -> None:
    """Of a model whose head is used in some steps only."""
    used: Iterator[int] = iter([0] * 11 + [2])
    train(lambda x: m[next(used)](x), sgd(m))


def converged(m: Any) -> None:
    """The last updates are rounded away, since the gradient is nearly 0."""
    mean = nn.Parameter(torch.zeros(4))
    train(lambda x: mean - 0.3 + x, SGD([mean], 0.1), steps=200)


def clamped(m: Any) -> None:
    """As the temperature of CLIP, at its bound."""
    scale = nn.Parameter(torch.tensor(4.0))
    train(lambda x: x - m(x) * scale, SGD([*m.parameters(), scale], 0.1), then=lambda: scale.data.clamp_(4, 4))


def lbfgs(m: Any) -> None:
    m, x = m[0], torch.randn(8, 4)
    optimizer = torch.optim.LBFGS(m.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (m(x) - x).square().mean()
        loss.backward()
        return loss

    for _ in range(20):
        optimizer.step(closure)
        optimizer.zero_grad()


def skipped(fused: bool, m: Any) -> None:
    """A scaler skips the steps, on the device too."""
    optimizer, scaler = Adam(m.parameters(), fused=fused), torch.amp.GradScaler("cpu", init_scale=2.0**100)
    for _ in range(6):
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            loss = m(torch.randn(8, 4)).float().square().mean() * 1e38
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def skipped_for_one_element(m: Any) -> None:
    """A fused optimizer skips the whole step, although most gradients are finite."""
    p, factor = nn.Parameter(torch.zeros(2048)), torch.ones(2048)
    factor[1] = 1e38
    optimizer, scaler = SGD([p], 0.1, fused=True), torch.amp.GradScaler("cpu", init_scale=2.0**20)
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def masters(m: Any) -> None:
    """The optimizer holds copies in float32, which are copied back."""
    m.bfloat16()
    copies = [p.detach().float().requires_grad_() for p in m.parameters()]
    optimizer = SGD(copies, 0.1)
    for _ in range(6):
        m.zero_grad()
        m(torch.randn(8, 4).bfloat16()).float().square().mean().backward()
        for p, master in zip(m.parameters(), copies, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        for p, master in zip(m.parameters(), copies, strict=True):
            p.data.copy_(master)


def inner_loop(m: Any) -> None:
    """Meta-learning: a copy of the model learns in each step, and gives its gradients to the model."""
    optimizer = sgd(m)
    for _ in range(6):
        learner = copy.deepcopy(m)
        train(learner, SGD(learner.parameters(), 0.01), steps=2)
        learner(torch.randn(8, 4)).square().mean().backward()
        for p, q in zip(m.parameters(), learner.parameters(), strict=True):
            p.grad = q.grad
        optimizer.step()


def evolution(m: Any) -> None:
    """An optimizer without gradients."""

    class Evolution(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.add_(torch.randn_like(p), alpha=0.1)

    optimizer = Evolution(m.parameters(), {})
    for _ in range(6):
        optimizer.step()


# fmt: off
HEALTHY: dict[str, Program] = {
    **by_name(adversarial, by_hand, clamped, collocation, converged, evolution, generators, inner_loop, lbfgs, masters),
    **by_name(once, penalty, shared, skipped_for_one_element, unused_module),
    "accumulated in a run that ends before the first step": lambda m: (
        o := sgd(m), o.zero_grad(), [m(torch.randn(8, 4)).square().mean().backward() for _ in range(16)]),
    "adapted": lambda m: train(m := Middle(adapted, m), sgd(m)),
    "average": lambda m: train(m := Average(), sgd(m)),
    # its gradient is rounding, and so are its updates
    "bias before a norm": lambda m: train(m.insert(1, nn.BatchNorm1d(4)), SGD(m.parameters(), 0.01), steps=30),
    "evaluated for its gradients": lambda m: [m(torch.randn(8, 4)).square().mean().backward() for _ in range(12)],
    "frozen": lambda m: train(m, SGD(m[0].requires_grad_(False) and m[2].parameters(), 0.1)),
    "frozen in the optimizer": lambda m: train(
        m, sgd(m), clip=functools.partial(clip_grad_norm_, [*m[0].requires_grad_(False).parameters()], 1.0)),
    "frozen by group": lambda m: train(
        m, SGD([{"params": m[0].parameters(), "lr": 0.0}, {"params": m[2].parameters()}], 0.1)),
    "perceptual": lambda m: (judge := mlp(4, 3).eval(), train(lambda x: judge(m(x))[:, :1], sgd(m))),
    "skipped": functools.partial(skipped, False),
    "skipped on the device": functools.partial(skipped, True),
    "warm up": lambda m: train(m, o := sgd(m), scheduler=LambdaLR(o, lambda i: min(i, 12 - i) / 12)),
}
# fmt: on


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_program_is_silent(name: str) -> None:
    assert found(HEALTHY[name]) == []
