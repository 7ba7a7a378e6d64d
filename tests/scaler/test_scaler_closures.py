"""Optimizers that evaluate the loss themselves, under scaling."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ampkit.optim import AdamW
from ampkit.scaler.grad_scaler import GradScaler
from tests.helpers.scaler_tools import alike


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation in its usual two phases: climb, evaluate again, step from where it began."""

    @torch.no_grad()
    def step(self, closure):
        (p,) = self.param_groups[0]["params"]
        climb = p.grad * (0.05 / (p.grad.norm() + 1e-12))
        p.add_(climb)
        with torch.enable_grad():
            loss = closure()
        p.sub_(climb).sub_(0.1 * p.grad)
        return loss


class Problem:
    """A small least-squares fit, whose closure fails at its n-th evaluation on request."""

    def __init__(self, scaler: GradScaler | None, fail_at: int | None = None, how: str = "loss") -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(20, 4, generator=generator)
        self.targets = torch.randn(20, 1, generator=generator)
        self.weight = torch.nn.Parameter(torch.randn(4, 1, generator=generator))
        self.scaler, self.fail_at, self.how = scaler, fail_at, how
        self.evaluations = 0

    def closure(self) -> torch.Tensor:
        self.weight.grad = None
        self.evaluations += 1
        fails = self.evaluations == self.fail_at
        loss = (self.inputs @ self.weight - self.targets).square().mean()
        if fails and self.how == "loss":
            loss = loss * math.nan
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if fails and self.how == "gradient":
            self.weight.grad[0] = math.inf
        return loss

    def step(self, optimizer: torch.optim.Optimizer) -> Any:
        if isinstance(optimizer, SAM):
            self.closure()  # its first phase
        if self.scaler is None:
            return optimizer.step(self.closure)
        result = self.scaler.step(optimizer, closure=self.closure)
        self.scaler.update()
        return result


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lbfgs": lambda weight: torch.optim.LBFGS([weight], max_iter=5),
    "lbfgs strong_wolfe": lambda weight: torch.optim.LBFGS([weight], max_iter=5, line_search_fn="strong_wolfe"),
    "adam": lambda weight: torch.optim.Adam([weight], fused=False),
    "adam fused": lambda weight: torch.optim.Adam([weight], fused=True),
    "sam": lambda weight: SAM([weight], {}),
}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_without_scaling(name, enabled) -> None:
    """At a power-of-two scale unscaling is exact, so that every evaluation is. The first step finds no scale yet."""
    scaler = GradScaler("cpu", growth_interval=2, enabled=enabled)
    scaled, plain = Problem(scaler), Problem(None)
    ours, theirs = OPTIMIZERS[name](scaled.weight), OPTIMIZERS[name](plain.weight)
    for _ in range(4):
        assert torch.equal(scaled.step(ours), plain.step(theirs))
        assert torch.equal(scaled.weight, plain.weight)
        assert scaled.evaluations == plain.evaluations
    if enabled:
        assert (scaler.get_scale(), scaler.stats().steps) == (2.0**18, 4)


@pytest.mark.parametrize(
    ("name", "how", "fail_at"),
    [
        *(("lbfgs strong_wolfe", how, fail_at) for how in ("loss", "gradient") for fail_at in (1, 2, 9)),
        ("sam", "gradient", 1),
        ("sam", "gradient", 2),
    ],
)
def test_a_bad_evaluation_undoes_the_whole_step(name, how, fail_at) -> None:
    """Whether in its first evaluation or amid a line search: parameters and state are as before the step."""
    scaler = GradScaler("cpu")
    problem = Problem(scaler, fail_at, how)
    optimizer = OPTIMIZERS[name](problem.weight)
    while problem.evaluations < fail_at:
        before = problem.weight.detach().clone()
        history = [d.clone() for d in optimizer.state[problem.weight].get("old_dirs", [])]
        scale = scaler.get_scale()
        result = problem.step(optimizer)
    assert result is None
    assert problem.evaluations == fail_at
    assert torch.equal(problem.weight, before)
    assert alike(history, list(optimizer.state[problem.weight].get("old_dirs", [])))
    assert problem.weight.grad is None
    assert scaler.found_inf(optimizer)
    assert scaler.overflow_report(), "counted before"
    assert scaler.get_scale() == scale / 2
    assert problem.step(optimizer).isfinite(), "and the next step works"
    assert not torch.equal(problem.weight, before)


@pytest.mark.parametrize(
    "make", [torch.optim.Adam, lambda params: AdamW(params, masters="remainder")], ids=["Adam", "AdamW with remainders"]
)
def test_nothing_is_written_where_the_first_evaluation_comes_before_any_change(make) -> None:
    """A graph kept from before the step can still run backward, and masters keep the digits that 16 bits have not."""
    param = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer, scaler = make([param]), GradScaler("cpu")
    for factor in (1.0, 1.0, math.inf):

        def closure(factor: float = factor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (param.float() * factor).sum()
            scaler.scale(loss).backward()
            return loss

        masters = optimizer.masters()[param].clone() if isinstance(optimizer, AdamW) else param.detach().clone()
        state, version = dict(optimizer.state[param]), param._version
        scaler.step(optimizer, closure)
        scaler.update()
    assert scaler.stats().skips == 1
    assert param._version == version
    assert {name for name, value in optimizer.state[param].items() if value is not state[name]} == set()
    assert not isinstance(optimizer, AdamW) or torch.equal(optimizer.masters()[param], masters)


def test_a_closure_without_the_scaler_is_checked_and_not_divided() -> None:
    scaler = GradScaler("cpu")
    for fail_at in (None, 1):
        ours, theirs = Problem(None, fail_at, how="gradient"), Problem(None)
        before = ours.weight.detach().clone()
        result = scaler.step(torch.optim.SGD([ours.weight], lr=0.1), ours.closure)
        theirs.step(torch.optim.SGD([theirs.weight], lr=0.1))
        assert (result is None) is (fail_at == 1)
        assert torch.equal(ours.weight, before if fail_at else theirs.weight)


def test_python_losses_and_none_are_understood() -> None:
    scaler = GradScaler("cpu")
    problem = Problem(scaler)
    optimizer = torch.optim.SGD([problem.weight], lr=0.1)
    for returned, taken in ((lambda loss: loss.item(), True), (lambda _: math.inf, False), (lambda _: None, True)):
        scaler.step(optimizer, lambda returned=returned: returned(problem.closure()))
        assert scaler.stepped(optimizer) is taken
        scaler.update()
    problem.closure()
    before = problem.weight.detach().clone()
    scaler.step(optimizer, None)  # no closure at all
    assert not torch.equal(problem.weight, before)
