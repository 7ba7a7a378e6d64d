"""The order of the loop: nothing is found in correct loops; float16 that underflows is."""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampkit import GradGuard, GradScaler, autocast
from ampkit.debugging import Examination
from ampkit.debugging.checks import LoopOrder
from ampkit.debugging.finding import Report
from tests.debugging.models import mlp
from tests.debugging.planted import B16, findings, line_of, loss_of, only
from tests.helpers.paths import EXAMPLES

SCALERS = GradScaler, torch.amp.GradScaler


def parts(scale: float = 256.0, cls: Any = GradScaler) -> tuple[nn.Sequential, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = mlp(8, 8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), cls("cpu", init_scale=scale)


def scheduler_by_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """The last step of an epoch may be skipped."""
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**40})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in range(9):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, torch.randn(4, 8))).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 3 == 2:
            scheduler.step()


def keywords_and_sparse_gradients(_: Any, __: Any, scaler: Any) -> None:
    """Wrapped functions take what they took before."""
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


class Wrapper(torch.optim.Optimizer):
    """As those of Fabric and accelerate, which share what they wrap."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})


def wrapped_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """Gradients are cleared by the wrapper, unscaled and stepped by what it wraps."""
    wrapper = Wrapper(optimizer)
    for _ in range(3):
        wrapper.zero_grad()
        scaler.scale(loss_of(model, torch.randn(4, 8))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def critic_without_scaling(actor: nn.Module, actors: torch.optim.Optimizer, scaler: Any) -> None:
    critic, critics, _ = parts()
    for _ in range(2):
        critics.zero_grad()
        actors.zero_grad()
        critic(torch.randn(4, 8)).square().mean().backward()
        scaler.scale(loss_of(actor, torch.randn(4, 8))).backward()
        critics.step()
        scaler.step(actors)
        scaler.update()


def gradients_of_tasks(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """As in gradient surgery: gradients of each task are cleared after they are copied, and then combined."""
    for _ in range(4):
        tasks: list[list[Tensor]] = []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            tasks.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for p, *gradients in zip(model.parameters(), *tasks, strict=True):
            p.grad = torch.stack(gradients).mean(0)
        optimizer.step()


def adversarial_examples(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """The gradients of the input are used; the last ones train."""
    for _ in range(4):
        x = torch.randn(4, 8, requires_grad=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            assert x.grad is not None
            x = (x + 0.1 * x.grad.sign()).detach().requires_grad_()
        optimizer.step()


def layers_one_by_one(*_: Any) -> None:
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


def guarded(way: str, model: nn.Module, optimizer: torch.optim.Optimizer, _: Any) -> None:
    """In bfloat16, which has no scale: a loss may be passed to the guard or not."""
    guard = GradGuard("cpu")
    for _ in range(3):
        optimizer.zero_grad()
        with autocast("cpu", torch.bfloat16):
            loss = loss_of(model, torch.randn(4, 8))
        if way == "in one call":
            guard.backward_and_step(loss, optimizer, max_norm=1.0)
            continue
        (guard.scale(loss) if way == "scale" else loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        guard.step(optimizer)
        guard.update()


def example(name: str, *_: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()


WITH_A_SCALER = (scheduler_by_epoch, keywords_and_sparse_gradients, wrapped_optimizer, critic_without_scaling)
EXAMPLES_OF_LOOPS = ("scaler_two_losses", "scaler_gan", "scaler_gradient_penalty", "loops_accelerate")
LOOPS: list[tuple[Callable[..., None], Any]] = [
    *((loop, cls) for cls in SCALERS for loop in WITH_A_SCALER),
    *((loop, GradScaler) for loop in (gradients_of_tasks, adversarial_examples, layers_one_by_one)),
    *((functools.partial(guarded, way), GradScaler) for way in ("in one call", "scale", "no scale")),
    *((functools.partial(example, name), GradScaler) for name in EXAMPLES_OF_LOOPS),
]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("loop", "cls"), LOOPS)
def test_a_correct_loop(loop: Callable[..., None], cls: Any) -> None:
    with Examination(checks=[LoopOrder]) as report:
        loop(*parts(cls=cls))
    assert report.status == "clean", str(report)
    assert "no findings" in str(report)
    assert report.findings == []


def train_without_scaler(
    model: nn.Module, factor: float = 1, dtype: torch.dtype = torch.float16, region: Any = autocast, shift: float = 0
) -> Report:
    """Four steps in a region without a scaler."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    x = torch.randn(16, 8)
    with Examination(checks=[LoopOrder]) as report:
        for _ in range(4):
            optimizer.zero_grad()
            with region("cpu", dtype):
                loss = (model(x).float() + shift).relu().square().mean() * factor
            loss.backward()
            optimizer.step()
    return report


class Adapter(nn.Module):
    """A layer of low rank: in the first step the gradient of `down` is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x))


def dead(model: nn.Sequential) -> nn.Sequential:
    """No unit of the first layer is ever above 0."""
    nn.init.constant_(model[0].bias, -100.0)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("region", [autocast, torch.autocast])
@pytest.mark.parametrize("factor", [1e-6, 1e-8])
def test_float16_without_a_scaler_where_gradients_underflow(region: Any, factor: float) -> None:
    """With 1e-6 some of them underflow, with 1e-8 all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    report = train_without_scaler(model, factor, region=region, shift=1.0)
    (finding,) = report.findings
    assert finding.what == "gradients underflow in float16, and the loss is not scaled"
    assert (finding.step, finding.last) == (1, 3)  # of 0 to 3: the first shows that a gradient is 0, not why
    assert "loss.backward()" in linecache.getline(*finding.place.site)
    assert finding.fix.code.startswith("scaler = GradScaler(); scaler.scale(loss).backward()")


class Normalized(nn.Linear):
    """Squares that add up to 1 whatever it computes: gradients are rounding."""

    def forward(self, input: Tensor) -> Tensor:
        return F.normalize(super().forward(input).float()).square().sum(-1)


@pytest.mark.parametrize("region", [autocast, torch.autocast])
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (lambda: mlp(8, 16, 1), {}),
        (lambda: mlp(8, 16, 1), {"factor": 1e-8, "dtype": torch.bfloat16}),
        (lambda: dead(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))), {"shift": 3.0}),
        (lambda: dead(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), {"shift": 3.0}),  # no gradient but 0
        (Adapter, {}),
        (lambda: Normalized(8, 8), {}),
        (lambda: mlp(8, 16, 1), {"factor": 0.0}),
        (lambda: mlp(8, 16, 1), {"shift": -100.0}),  # a hinge that no sample reaches
    ],
    ids=["fine", "bfloat16", "dead units", "all dead", "adapter", "norm", "no loss", "hinge"],
)
def test_gradients_that_float16_did_not_make_zero(model: Any, options: dict[str, Any], region: Any) -> None:
    torch.manual_seed(0)
    report = train_without_scaler(model(), **options, region=region)
    assert report.status == "clean", str(report)


def test_float16_beside_training_in_float32() -> None:
    """A teacher in a region, and a student whose gradients are small, and 0 for a dead unit."""
    torch.manual_seed(0)
    teacher, student = mlp(8, 8, 1), dead(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)
    with Examination(checks=[LoopOrder]) as report:
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 8)
            with torch.no_grad(), autocast("cpu", torch.float16):
                wanted = teacher(x)
            ((student(x) - wanted.float()).square().mean() * 1e-7).backward()
            optimizer.step()
    assert report.status == "clean", str(report)


def test_each_optimizer_and_scaler_counts_for_itself() -> None:
    (first, first_optimizer, first_scaler), (second, second_optimizer, second_scaler) = parts(), parts()
    with Examination(checks=[LoopOrder]) as report, contextlib.suppress(RuntimeError):
        for _ in range(2):
            first_optimizer.zero_grad()
            second_optimizer.zero_grad()
            first_scaler.scale(loss_of(first, torch.randn(4, 8))).backward()
            second_scaler.scale(loss_of(second, torch.randn(4, 8))).backward()
            first_scaler.step(first_optimizer)
            nn.utils.clip_grad_norm_(second.parameters(), 1.0)
            second_scaler.step(second_optimizer)
            first_scaler.update()  # and not the second
    assert ["clipped" in finding.what for finding in report.findings] == [True, False]
    assert report.findings[1].what.startswith("update is not called after step")
    assert report.steps == 1


@pytest.mark.parametrize("cls", SCALERS)
def test_a_step_past_the_scaler(cls: Any) -> None:
    """After `unscale_`, `optimizer.step()` is right until a gradient overflows. A disabled scaler checks nothing."""
    model, optimizer, used = parts(cls=cls)

    def step(factor: float, scaler: Any = used) -> Report:
        with Examination(checks=[LoopOrder]) as report:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, torch.randn(4, 8)) * factor).backward()
            scaler.unscale_(optimizer)
            optimizer.step()
            scaler.update()
        return report

    assert step(1.0).status == "clean"
    (finding,) = step(torch.inf).findings
    assert finding.what.startswith("the optimizer steps although unscale_ found inf")
    assert "optimizer.step()" in linecache.getline(*finding.place.site)
    assert finding.fix.code.startswith("scaler.step(optimizer)")
    assert step(torch.inf, cls("cpu", enabled=False)).status == "clean"


def zeroed_before_the_step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """The optimizer has no gradients, so that the scaler does not call it."""
    for _ in range(2):
        scaler.scale(loss_of(model, torch.randn(4, 8))).backward()
        optimizer.zero_grad()
        scaler.step(optimizer)
        scaler.update()


def never_zeroed_after_an_overflow(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """NaN stays in the gradients, and the scaler skips each step."""
    for _ in range(2):
        scaler.scale(loss_of(model, torch.full((4, 8), 1e38))).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(
    ("loop", "what"),
    [
        (zeroed_before_the_step, "zero_grad is called between backward and step: the step has no gradients"),
        (never_zeroed_after_an_overflow, "gradients of the step before are still there: zero_grad is missing"),
    ],
)
def test_gradients_are_checked_where_the_scaler_skips_the_step(loop: Callable[..., None], what: str) -> None:
    with Examination(checks=[LoopOrder]) as report, contextlib.suppress(AssertionError):
        loop(*parts(2.0**16))
    assert [finding.what for finding in report.findings] == [what]


def test_a_loss_in_16_bits_outside_of_the_region() -> None:
    model = nn.Linear(4, 3)

    def run(inside: bool) -> Callable[[], None]:
        def step() -> None:
            with torch.autocast("cpu", B16):
                output = model(torch.randn(5, 4)).log_softmax(1)
                loss = nn.functional.nll_loss(output, torch.arange(5) % 3)
            if not inside:
                loss = nn.functional.nll_loss(output, torch.arange(5) % 3)  # outside
            loss.backward()

        return step

    assert findings(run(inside=True)) == []
    found = only(run(inside=False))
    assert (found.grade, found.place.line) == ("note", line_of(__file__, "outside"))
    assert found.what == "the loss is computed in bfloat16, outside of the region"
