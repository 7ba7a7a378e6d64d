"""Optimizers that evaluate the loss themselves, under scaling."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ampkit.optim import AdamW
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.whole_model.master_weights import MasterWeights
from tests.helpers.scaler_tools import alike


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation in its usual two phases: climb, evaluate again, step from where it began."""

    def __init__(self, params, rho: float = 0.05, lr: float = 0.1) -> None:
        super().__init__(params, {"rho": rho, "lr": lr})

    @torch.no_grad()
    def step(self, closure):
        group = self.param_groups[0]
        norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
        for p in group["params"]:
            self.state[p]["climb"] = p.grad * (group["rho"] / (norm + 1e-12))
            p.add_(self.state[p]["climb"])
        loss = closure()
        for p in group["params"]:
            p.sub_(self.state[p]["climb"]).sub_(group["lr"] * p.grad)
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

    def loss(self) -> torch.Tensor:
        self.evaluations += 1
        loss = (self.inputs @ self.weight - self.targets).square().mean()
        return loss * math.nan if self.evaluations == self.fail_at and self.how == "loss" else loss

    def closure(self) -> torch.Tensor:
        self.weight.grad = None
        loss = self.loss()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.evaluations == self.fail_at and self.how == "gradient":
            self.weight.grad[0] = math.inf
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lbfgs": lambda weight: torch.optim.LBFGS([weight], max_iter=5),
    "lbfgs strong_wolfe": lambda weight: torch.optim.LBFGS([weight], max_iter=5, line_search_fn="strong_wolfe"),
    "adam": lambda weight: torch.optim.Adam([weight], fused=False),
    "adam fused": lambda weight: torch.optim.Adam([weight], fused=True),
}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_without_scaling(name, enabled) -> None:
    """At a power-of-two scale unscaling is exact, so that every evaluation is. The first step finds no scale yet."""
    scaler = GradScaler("cpu", growth_interval=2, enabled=enabled)
    scaled, plain = Problem(scaler), Problem(None)
    ours, theirs = OPTIMIZERS[name](scaled.weight), OPTIMIZERS[name](plain.weight)
    for step in range(4):
        loss = scaler.step(ours, closure=scaled.closure) if step % 2 else scaler.step(ours, scaled.closure)
        scaler.update()
        assert torch.equal(loss, theirs.step(plain.closure))
        assert torch.equal(scaled.weight, plain.weight)
        assert scaled.evaluations == plain.evaluations
    if enabled:
        assert (scaler.get_scale(), scaler.stats().steps) == (2.0**18, 4)


@pytest.mark.parametrize("how", ["loss", "gradient"])
@pytest.mark.parametrize("fail_at", [1, 2, 9])
def test_a_bad_evaluation_undoes_the_whole_step(how, fail_at) -> None:
    """Whether in its first evaluation or amid a line search: parameters and state are as before the step."""
    scaler = GradScaler("cpu")
    problem = Problem(scaler, fail_at, how)
    optimizer = OPTIMIZERS["lbfgs strong_wolfe"](problem.weight)
    while problem.evaluations < fail_at:
        before = problem.weight.detach().clone()
        history = [d.clone() for d in optimizer.state[problem.weight].get("old_dirs", [])]
        scale = scaler.get_scale()
        result = scaler.step(optimizer, problem.closure)
        scaler.update()
    assert result is None
    assert problem.evaluations == fail_at
    assert torch.equal(problem.weight, before)
    assert alike(history, list(optimizer.state[problem.weight].get("old_dirs", [])))
    assert problem.weight.grad is None
    assert scaler.found_inf(optimizer)
    assert scaler.overflow_report(), "counted before"
    assert scaler.get_scale() == scale / 2
    assert scaler.step(optimizer, problem.closure).isfinite(), "and the next step works"
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
    assert all(value is state[name] for name, value in optimizer.state[param].items())
    assert not isinstance(optimizer, AdamW) or torch.equal(optimizer.masters()[param], masters)


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.LBFGS])
def test_weights_loaded_into_a_model_with_masters_outlast_a_skipped_step(cls) -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer, scaler = cls([param], lr=0.1), GradScaler("cpu")
    MasterWeights(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param.float() ** 2).sum() * (math.inf if param[0] == 5 else 1)
        scaler.scale(loss).backward()
        return loss

    for value in (2.0, 5.0):
        with torch.no_grad():
            param.fill_(value)
        scaler.step(optimizer, closure)
        scaler.update()
    assert (scaler.stats().skips, param.tolist()) == (1, [5.0, 5.0])


def test_sam_equals_sam_without_scaling() -> None:
    scaler = GradScaler("cpu")
    scaled, plain = Problem(scaler), Problem(None)
    ours, theirs = SAM([scaled.weight]), SAM([plain.weight])
    for _ in range(3):
        scaled.closure()
        loss = scaler.step(ours, scaled.closure)
        scaler.update()
        plain.closure()
        assert torch.equal(loss, theirs.step(torch.enable_grad()(plain.closure)))
        assert torch.equal(scaled.weight, plain.weight)


@pytest.mark.parametrize("fail_at", [1, 2])
def test_sam_comes_back_from_a_bad_phase(fail_at) -> None:
    """Bad first gradients skip the step; bad second ones bring the parameters down from where they had climbed."""
    scaler = GradScaler("cpu")
    problem = Problem(scaler, fail_at, "gradient")
    before = problem.weight.detach().clone()
    problem.closure()
    assert scaler.step(SAM([problem.weight]), problem.closure) is None
    scaler.update()
    assert problem.evaluations == fail_at
    assert torch.equal(problem.weight, before)
    assert scaler.get_scale() == 2.0**15


def test_a_closure_without_the_scaler_is_checked_and_not_divided() -> None:
    scaler = GradScaler("cpu")
    problem, plain = Problem(None), Problem(None)
    scaler.step(torch.optim.SGD([problem.weight], lr=0.1), problem.closure)
    torch.optim.SGD([plain.weight], lr=0.1).step(plain.closure)
    assert torch.equal(problem.weight, plain.weight)
    bad = Problem(None, fail_at=1, how="gradient")
    before = bad.weight.detach().clone()
    assert scaler.step(torch.optim.SGD([bad.weight], lr=0.1), bad.closure) is None
    assert torch.equal(bad.weight, before)


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
    scaler.step(optimizer, None)    # no closure at all
    assert not torch.equal(problem.weight, before)
