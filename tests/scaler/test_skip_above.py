"""`GradScaler(skip_above=...)`: steps of an outlying gradient norm are not taken, and the scale knows nothing of it.

Ranks are in `test_scaler_distributed`, refusals in `test_refusals`.
"""

import copy
import itertools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import OptState

from ampkit import GradScaler, NoOpLossScale, TimesMedian
from ampkit.scaler.skip_above import compare_, first_norms
from tests.helpers.scaler_tools import OPTIMIZERS, count_reads, iterate, one_parameter, started, with_grads

BEFORE: dict[str, Callable[[GradScaler, Any], Any]] = {
    "nothing": lambda scaler, optimizer: None,
    "clipping": lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 0.5),
    "torch's clipping": lambda scaler, optimizer: (
        scaler.unscale_(optimizer),
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5),
    ),
}
NORMS = (1.0, 1.0, 1.0, 10.0, 1.0, math.inf, 1.0)


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize(("limit", "scaled"), [(5.0, True), (TimesMedian(5.0, window=16), True), (5.0, False)])
def test_an_outlier_is_skipped_and_counted_apart(which: str, before: str, limit: Any, scaled: bool) -> None:
    """The norm is the one before clipping; overflow stays overflow; fused optimizers wait for no device."""
    param = torch.nn.Parameter(torch.zeros(4, dtype=torch.float32 if scaled else torch.bfloat16))
    optimizer = OPTIMIZERS[which]([param])
    options: Any = {"init_scale": 8.0} if scaled else {"loss_scale": NoOpLossScale()}
    scaler = GradScaler("cpu", skip_above=limit, **options)
    for norm in NORMS:
        scaler.scale(torch.ones((), requires_grad=True))
        param.grad = torch.full_like(param, norm / 2 * scaler.get_scale())
        was = param.detach().clone()
        with count_reads() as reads:
            BEFORE[before](scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.stepped(optimizer) is not torch.equal(was, param) is (norm != 1.0)
        assert bool(scaler.found_inf(optimizer)) is math.isinf(norm)
        assert which != "fused" or norm == math.inf or reads == []
    stats = scaler.stats()
    assert (stats.steps, stats.skips, stats.outliers, stats.overflows, stats.updates) == (5, 1, 1, 1, 7)
    assert stats.scale == (4.0 if scaled else 1.0)
    assert [row["outlier"] for row in scaler.history] == [norm == 10.0 for norm in NORMS]
    assert [row["grad_norm"] for row in scaler.history] == list(NORMS)


@pytest.mark.parametrize("which", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"skip_above": 1e9}])
def test_history_has_the_norm_that_clipping_returned(which: str, options: dict[str, float]) -> None:
    """Of whatever order, also where `unscale_` has judged another; of calls, and of optimizers, the largest."""
    orders = ((math.inf, 4.0), (1.0, 7.0), (3.0, 91 ** (1 / 3)))
    for (order, norm), unscales in itertools.product(orders, (True, False)):
        param, other = with_grads([torch.tensor([3.0, 4.0]), torch.tensor([6.0])])
        clipped, judged = OPTIMIZERS[which]([param]), OPTIMIZERS[which]([other])
        scaler = started(GradScaler, 1.0, **options)
        for step in range(4):
            for each, grad in ((param, [3.0, 4.0]), (other, [6.0])):
                each.grad = torch.tensor(grad)
            if unscales:
                scaler.unscale_(clipped)
            assert float(scaler.clip_grad_norm_(clipped, 100.0, order)) == pytest.approx(norm)
            if step == 1:
                scaler.clip_grad_norm_(clipped, 1.0, 1.0)
            scaler.step(clipped)
            if step > 1:
                scaler.step(judged)
            scaler.update(1.0 if step == 3 else None)
        both = max(norm, 6.0) if options else norm
        expected = [pytest.approx(value) for value in (norm, max(norm, 7.0), both, both)]
        assert [row["grad_norm"] for row in scaler.history] == expected


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_unscaled_gradients_are_those_of_any_scaler(which: str) -> None:
    """Also finite ones whose norm overflows, which is an outlier."""
    found = []
    for options in ({}, {"skip_above": 1e9}):
        param, _ = one_parameter(grad=3.0)
        started(GradScaler, 3.0, **options).unscale_(OPTIMIZERS[which]([param]))
        found.append(param.grad)
    assert torch.equal(*found)
    (param,) = with_grads([torch.full((4,), 8e200, dtype=torch.float64)])
    optimizer, scaler = OPTIMIZERS[which]([param]), started(GradScaler, 8.0, skip_above=5.0)
    scaler.unscale_(optimizer)
    assert param.grad.eq(1e200).all()
    iterate(scaler, optimizer)
    assert (scaler.stats().outliers, scaler.stats().skips, scaler.get_scale(), param.min()) == (1, 0, 8.0, 1.0)


def test_the_median_is_that_of_the_last_finite_norms() -> None:
    """Beside a plain account; saved and loaded on the way."""
    draw, rule = torch.Generator().manual_seed(0), TimesMedian(2.0, window=17)
    norms, seen = first_norms(rule), list[float]()
    for step in range(200):
        value = float(torch.rand((), generator=draw)) * (4.0 if step % 7 == 0 else 1.0 if step > 9 else 0.0)
        norm = torch.tensor((math.nan, math.inf)[step % 2] if step % 11 == 5 else value)
        median = statistics.median_low(seen) if seen else 0.0
        limit = 2.0 * median if len(seen) >= 2 and median > 0 else math.inf
        assert bool(compare_(rule, norms, norm)) is not (math.isfinite(norm) and float(norm) <= limit)
        seen = [*seen, *([float(norm)] if math.isfinite(norm) else [])][-17:]
        assert norms.tolist() == [math.inf] * (17 - len(seen)) + seen
        norms = first_norms(rule, seen) if step % 13 == 12 else norms


def test_each_optimizer_has_its_own_median_and_a_resumed_run_goes_on_with_it() -> None:
    """Also where it begins with another one, after a copy, in a scaler that is in use, and without gradients.

    Those that are gone have none; those of equal size, which cannot be told apart, start empty.
    """

    def train(scaler: GradScaler, *sizes: float, order: int = 1) -> list[bool]:
        for optimizer, size in [*zip(optimizers, sizes, strict=True)][::order]:
            scaler.scale(torch.ones((), requires_grad=True))
            param = optimizer.param_groups[0]["params"][0]
            param.grad = torch.full_like(param, size / len(param) ** 0.5) if size else None
            scaler.step(optimizer)
        scaler.step(one_parameter()[1])
        scaler.step(one_parameter(grad=7.0)[1])
        scaler.update()
        return [scaler.stepped(optimizer) for optimizer in optimizers]

    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(n))], lr=1.0) for n in (1, 4)]
    late = started(GradScaler, 1.0, skip_above=TimesMedian(3.0))
    assert train(late, 0.0, 100.0) == train(late, 0.0, 100.0) == [False, True]
    train(late, 1.0, 0.0)
    assert late.state_dict()["ampkit"]["norms"] == [[1, 1, [1.0]], [1, 4, [100.0, 100.0]]]
    scaler, used, fresh = (GradScaler("cpu", 1.0, skip_above=TimesMedian(3.0, window=16)) for _ in range(3))
    assert [train(scaler, 1.0, 100.0) for _ in range(3)] == [[True, True]] * 3
    state = scaler.state_dict()
    assert state["ampkit"]["norms"] == [[1, 1, [1.0] * 3], [1, 4, [100.0] * 3]]
    train(used, 5.0, 5.0)
    for each in (used, fresh):
        each.load_state_dict(state)
        assert each.state_dict()["ampkit"]["norms"] == state["ampkit"]["norms"]
    for each in (scaler, used, fresh, copy.deepcopy(scaler)):
        assert train(each, 4.0, 100.0, order=-1) == [False, True]
        assert train(each, 2.0, 301.0) == [True, False]
    twins = [[1, 1, [1.0] * 9], [1, 1, [100.0] * 9]]
    fresh.load_state_dict({**state, "ampkit": {**state["ampkit"], "norms": twins}})
    assert train(fresh, 4.0, 100.0) == [True, True]


@pytest.mark.parametrize("order", [1, -1])
def test_one_outlier_of_two_optimizers_marks_the_row(order: int) -> None:
    scaler, pairs = started(GradScaler, 1.0, skip_above=5.0), [one_parameter(grad=value) for value in (1.0, 10.0)]
    for _, optimizer in pairs[::order]:
        scaler.step(optimizer)
    scaler.update()
    assert [param.item() for param, _ in pairs] == [0.0, 1.0]
    assert (scaler.history[0]["outlier"], scaler.stats().outliers, scaler.stats().steps) == (True, 1, 1)


def test_a_flag_is_that_of_one_iteration() -> None:
    """Also where other code says that an optimizer is READY again, and where `update` gets a scale."""
    param, optimizer = one_parameter(grad=10.0)
    scaler = started(GradScaler, 1.0, skip_above=5.0)
    scaler.unscale_(optimizer)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.READY
    param.grad.fill_(1.0)
    scaler.unscale_(optimizer)
    iterate(scaler, optimizer)
    assert scaler.stepped(optimizer)
    param.grad.fill_(10.0)
    scaler.step(optimizer)
    scaler.update(2.0)
    assert scaler.stats().outliers == 1
    assert [(row["grad_norm"], row["outlier"]) for row in scaler.history] == [(10.0, False), (10.0, True)]
