"""Any step of any optimizer invalidates every cast, however it writes; nothing is stale in a region or in the next."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampkit.optim
from ampkit import WeightCache, autocast
from ampkit.region import optimizer_steps
from tests.helpers.regions import BF16
from tests.helpers.weights import WritesThroughData, weight

X = torch.eye(4, dtype=BF16)
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1.0),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
    "Adam foreach": lambda params: torch.optim.Adam(params, lr=1.0, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1.0, fused=True),
    "ampkit": lambda params: ampkit.optim.AdamW(params, lr=1.0),
    "through .data": WritesThroughData,
}


def is_right(leaf: Tensor) -> bool:
    """Whether the region that is open uses a weight's cast of now."""
    return torch.equal(torch.mm(X, leaf).detach(), leaf.detach().to(BF16))


def step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_is_seen_in_the_open_region_and_in_the_next(name: str, cached: bool) -> None:
    leaf, cache = weight(), WeightCache() if cached else None
    optimizer = OPTIMIZERS[name]([leaf])
    for _ in range(2):
        with autocast("cpu", cache=cache):
            assert is_right(leaf)
            step(optimizer)
            assert is_right(leaf)
        step(optimizer)
        with autocast("cpu", cache=cache):
            assert is_right(leaf)


def test_casts_made_in_the_closure_of_a_step() -> None:
    """It is evaluated within the step, before the weights are written."""
    head, cache = weight(), WeightCache()
    optimizer = torch.optim.SGD([head], lr=1.0, fused=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with autocast("cpu", cache=cache):
            loss = torch.mm(X, head).float().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert cache.info().entries == 0
    with autocast("cpu", cache=cache):
        assert is_right(head)


@pytest.mark.parametrize("whole", [False, True], ids=["step", "a function around it"])
def test_compiled_step(whole: bool) -> None:
    """Dynamo traces the hooks, once."""
    torch._dynamo.reset()
    leaf, cache = weight(), WeightCache()
    optimizer = torch.optim.SGD([leaf], lr=1.0, fused=True)

    def run() -> None:
        optimizer.step()

    compiled = torch.compile(run if whole else optimizer.step, backend="eager")
    for n in range(6):
        leaf.grad = torch.ones_like(leaf)
        with torch.compiler.set_stance("default" if n == 0 else "fail_on_recompile"):
            compiled()
        with autocast("cpu", cache=cache):
            assert is_right(leaf)
    assert cache.info().misses == 6


def test_step_captured_into_a_graph_ends_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays write to the weights and call no hook."""
    layer, cache = nn.Linear(4, 4, bias=False), WeightCache()

    def hits() -> int:
        before = cache.info().hits
        for _ in range(2):
            with autocast("cpu", cache=cache):
                layer(X)
        return cache.info().hits - before

    assert hits() == 1
    monkeypatch.setattr(optimizer_steps.steps, "captured", False)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_steps, "is_capturing", lambda: True)
        step(torch.optim.SGD([weight()], lr=1.0))
    assert hits() == 0
