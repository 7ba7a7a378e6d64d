"""`GradScaler(skip_above=...)`: steps of an outlying gradient norm are not taken, and the scale knows nothing of it.

Ranks are in `test_scaler_distributed`.
"""

import copy
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ampkit.optim
from ampkit import GradScaler, NoOpLossScale, TimesMedian
from ampkit.scaler.norm_limit import RecentNorms
from tests.helpers.scaler_tools import count_reads, iterate, one_parameter, started, with_grads

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ordinary": lambda params: torch.optim.SGD(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "ampkit": lambda params: ampkit.optim.AdamW(params, lr=0.1),
}
BEFORE: dict[str, Callable[[GradScaler, Any], Any]] = {
    "nothing": lambda scaler, optimizer: None,
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "clipping": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 0.5),
    "torch's clipping": lambda scaler, optimizer: (
        scaler.unscale_(optimizer), torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
    ),
    "limits of values": lambda scaler, optimizer: scaler.clip_grad_value_(optimizer, 0.1),
}
NORMS = (1.0, 1.0, 1.0, 10.0, 1.0, math.inf, 1.0)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize("limit", [5.0, TimesMedian(5.0, warmup=3)])
@pytest.mark.parametrize("scaled", [True, False])
def test_an_outlier_is_skipped_and_counted_apart(which: str, before: str, limit: Any, scaled: bool) -> None:
    """The norm is the one before clipping; overflow stays overflow."""
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float32 if scaled else torch.bfloat16))
    optimizer = OPTIMIZERS[which]([param])
    options: Any = {"init_scale": 8.0} if scaled else {"loss_scale": NoOpLossScale()}
    scaler = GradScaler("cpu", skip_above=limit, **options)
    for norm in NORMS:
        scaler.scale(torch.ones((), requires_grad=True))
        param.grad = torch.full_like(param, norm / 2 * scaler.get_scale())
        was = param.detach().clone()
        BEFORE[before](scaler, optimizer)
        if before == "unscale_":
            assert torch.equal(param.grad, torch.full_like(param, norm / 2))
        scaler.step(optimizer)
        assert scaler.stepped(optimizer) is not torch.equal(was, param) is (norm != 1.0)
        assert bool(scaler.found_inf(optimizer)) is math.isinf(norm)
        scaler.update()
    stats = scaler.stats()
    assert (stats.steps, stats.skips, stats.outliers, stats.overflows, stats.updates) == (5, 1, 1, 1, 7)
    assert stats.scale == (4.0 if scaled else 1.0)
    assert [row["outlier"] for row in scaler.history] == [norm == 10.0 for norm in NORMS]
    assert [row["grad_norm"] for row in scaler.history] == list(NORMS)


def test_the_median_is_that_of_the_last_finite_norms() -> None:
    """Beside a plain account; saved and loaded on the way."""
    draw = torch.Generator().manual_seed(0)
    rule, seen = TimesMedian(2.0, window=5, warmup=3), []
    norms = RecentNorms(rule, torch.device("cpu"))
    for step in range(200):
        value = float(torch.rand((), generator=draw)) * (4.0 if step % 7 == 0 else 1.0 if step > 8 else 0.0)
        norm = torch.tensor((math.inf, math.nan)[step % 2] if step % 11 == 5 else value)
        known = seen[-rule.window:]
        median = statistics.median_low(known) if known else 0.0
        limit = 2.0 * median if len(known) >= rule.warmup and median > 0 else math.inf
        with count_reads() as reads:
            flag = norms.judge(norm)
        assert reads == []
        assert bool(flag) is not (math.isfinite(norm) and float(norm) <= limit)
        seen += [float(norm)] if math.isfinite(norm) else []
        assert norms.norms() == seen[-rule.window:]
        if step % 13 == 12:
            norms = RecentNorms(rule, torch.device("cpu"), norms.norms())


def test_nothing_waits_for_the_device() -> None:
    scaler = started(GradScaler, skip_above=TimesMedian(5.0, warmup=1))
    (param,) = with_grads([torch.ones(4)])
    optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
    with count_reads() as reads:
        for _ in range(5):
            scaler.scale(torch.ones((), requires_grad=True))
            scaler.clip_grad_norm_(optimizer, 1.0)
            iterate(scaler, optimizer)
    assert reads == []


def test_each_optimizer_has_its_own_median_and_a_resumed_run_goes_on_with_it() -> None:
    """Also after a copy and in a scaler that is in use; an optimizer without gradients has none."""
    def train(scaler: GradScaler, *sizes: float) -> list[bool]:
        for (_, optimizer), size in zip(pairs, sizes, strict=True):
            scaler.scale(torch.ones((), requires_grad=True))
            optimizer.param_groups[0]["params"][0].grad = torch.tensor([size])
            scaler.step(optimizer)
        scaler.step(one_parameter()[1])
        scaler.update()
        return [scaler.stepped(optimizer) for _, optimizer in pairs]

    pairs = [one_parameter(), one_parameter()]
    scaler = started(GradScaler, 1.0, skip_above=TimesMedian(3.0, warmup=2))
    assert [train(scaler, 1.0, 100.0) for _ in range(3)] == [[True, True]] * 3
    state = scaler.state_dict()
    assert state["ampkit"]["norms"] == [[1.0] * 3, [100.0] * 3]
    used, fresh = (GradScaler("cpu", 1.0, skip_above=TimesMedian(3.0, warmup=2)) for _ in range(2))
    train(used, 5.0, 5.0)
    for each in (used, fresh):
        each.load_state_dict(state)
        assert each.state_dict()["ampkit"]["norms"] == state["ampkit"]["norms"]
    for each in (scaler, used, fresh, copy.deepcopy(scaler)):
        assert train(each, 4.0, 100.0) == [False, True]
        assert train(each, 2.0, 301.0) == [True, False]
    bad = copy.deepcopy(state)
    for norms, error in (("1", TypeError), ([1.0], TypeError), ([["1"]], TypeError), ([[-1.0]], ValueError),
                         ([[math.nan]], ValueError), ([[1e39]], ValueError)):
        bad["ampkit"]["norms"] = norms
        with pytest.raises(error, match="saved"):
            fresh.load_state_dict(bad)


@pytest.mark.parametrize(("limit", "error", "message"), [
    (0.0, ValueError, "skip_above is 0.0; expected a positive"), (math.nan, ValueError, "skip_above is nan"),
    (True, TypeError, "skip_above is True; expected a number"), ("10x", TypeError, "skip_above is '10x'"),
])
def test_limits_that_are_refused(limit: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GradScaler("cpu", skip_above=limit)
    with pytest.raises(ValueError, match=r"factor is 1.0; expected a number above 1"):
        TimesMedian(1.0)
    with pytest.raises(ValueError, match=r"warmup is 9 and window 8; expected 1 <= warmup <= window"):
        TimesMedian(2.0, window=8, warmup=9)


def test_closures_are_refused() -> None:
    _, optimizer = one_parameter(grad=1.0)
    with pytest.raises(ValueError, match="a closure, which skip_above does not judge"):
        started(GradScaler, skip_above=5.0).step(optimizer, lambda: 0.0)
