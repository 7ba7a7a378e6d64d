"""Strategies inside a scaler: what it scales, how it saves them, and that none lets a bad step through."""

import math

import pytest
import torch

from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from tests.helpers.scaler_tools import equal_bits, started, with_grads

STRATEGIES = [
    DynamicLossScale(8.0, growth_interval=2, hysteresis=2, tolerance=0.1, min_scale=2.0, max_scale=16.0),
    DynamicLossScale(8.0, hysteresis=3, hysteresis_refill="clean"),
    StaticLossScale(128.0),
    NoOpLossScale(),
]


def run(scaler: GradScaler, flags: list[bool]) -> list[float]:
    """Iterate with a made-up overflow wherever a flag is set; returns the scales."""
    scales = []
    for bad in flags:
        scaler.scale(torch.ones((), requires_grad=True))
        (param,) = with_grads([torch.tensor([math.nan if bad else 1.0])])
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler.step(optimizer)
        assert (param.item() == 1.0) == bad
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_bounds_hold() -> None:
    rule = DynamicLossScale(8.0, growth_interval=1, min_scale=6.0, max_scale=20.0)
    scaler = GradScaler("cpu", loss_scale=rule, on_stuck=lambda _: None)
    assert run(scaler, [False, False, True, True, True]) == [16.0, 20.0, 10.0, 6.0, 6.0]
    scaler.update(1.0)
    assert scaler.get_scale() == 6.0


def test_noop_neither_scales_nor_divides_and_still_guards() -> None:
    scaler = GradScaler("cpu", loss_scale=NoOpLossScale())
    loss = torch.ones((), requires_grad=True)
    assert scaler.scale(loss) is loss
    (param,) = with_grads([torch.tensor([3.0])])
    before = param.grad.clone()
    optimizer = torch.optim.SGD([param], lr=1.0)
    assert scaler.clip_grad_norm_(optimizer, 10.0).item() == 3.0
    assert equal_bits(param.grad, before)
    scaler.step(optimizer)
    assert param.item() == -2.0
    scaler.update()
    fused = torch.optim.Adam(with_grads([torch.tensor([2.0])]), lr=1.0, fused=True)
    scaler.step(fused)
    plain = torch.optim.Adam(with_grads([torch.tensor([2.0])]), lr=1.0, fused=True)
    plain.step()
    assert equal_bits(fused.param_groups[0]["params"][0].detach(), plain.param_groups[0]["params"][0].detach())
    scaler.update()
    assert run(scaler, [True, False]) == [1.0, 1.0]


@pytest.mark.parametrize("rule", STRATEGIES, ids=lambda rule: rule.kind)
@pytest.mark.parametrize("live", [True, False])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(rule, live) -> None:
    """Every counter of every strategy is saved, amid forgiven overflows too."""
    before = [False, True, False, False, True]
    after = [True, True, False, False, False, True, True, True]
    whole = GradScaler("cpu", loss_scale=rule)
    expected = run(whole, before + after)[len(before) :]
    first = GradScaler("cpu", loss_scale=rule)
    run(first, before)
    second = GradScaler("cpu", loss_scale=type(rule)(8.0) if rule.kind == "dynamic" else rule)
    if live:
        second.scale(torch.ones((), requires_grad=True))
    second.load_state_dict(first.state_dict())
    assert second.loss_scale == rule
    assert second.state_dict() == first.state_dict()
    assert run(second, after) == expected
    assert second.stats() == whole.stats()


def test_the_script_decides_about_the_kind_of_strategy() -> None:
    dynamic, static = started(GradScaler, 64.0), started(GradScaler, loss_scale=StaticLossScale(128.0))
    with pytest.warns(UserWarning, match=r"saved with DynamicLossScale.*; this scaler keeps StaticLossScale"):
        static.load_state_dict(dynamic.state_dict())
    assert static.get_scale() == 128.0
    with pytest.warns(UserWarning, match="this scaler keeps DynamicLossScale"):
        dynamic.load_state_dict(static.state_dict())
    assert dynamic.get_growth_factor() == 2.0
    static.load_state_dict(torch.amp.GradScaler("cpu", 4.0).state_dict())
    assert static.get_scale() == 128.0


def test_a_static_scaler_stays_static_in_torch() -> None:
    theirs = started(torch.amp.GradScaler)
    theirs.load_state_dict(started(GradScaler, loss_scale=StaticLossScale(32.0)).state_dict())
    for value in (1.0, math.inf):
        (param,) = with_grads([torch.tensor([value])])
        theirs.step(torch.optim.SGD([param], lr=0.1))
        theirs.update()
    assert theirs.get_scale() == 32.0


def test_one_way_to_say_it() -> None:
    with pytest.raises(ValueError, match="expected one or the other: set the numbers on the strategy"):
        GradScaler("cpu", 4.0, loss_scale=StaticLossScale(2.0))
    with pytest.raises(ValueError, match=r"cannot set growth_factor on StaticLossScale\(scale=2\.0\)"):
        GradScaler("cpu", loss_scale=StaticLossScale(2.0)).set_growth_factor(3.0)


def test_float16_sparse_duplicates_that_overflow() -> None:
    """torch finds these too: scaled float16 gradients are added up before they are looked at."""
    for cls in (GradScaler, torch.amp.GradScaler):
        param = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
        values = torch.tensor([6e4, 6e4], dtype=torch.float16)
        param.grad = torch.sparse_coo_tensor([[1, 1]], values, (3,), check_invariants=True)
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler = started(cls)
        found = scaler._unscale_grads_(optimizer, torch.tensor(1.0), torch.zeros(()), True)
        assert [flag.item() for flag in found.values()] == [1.0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:Using backward")
def test_compressed_and_differentiable_gradients() -> None:
    scaler = started(GradScaler, 4.0)
    table = torch.nn.Parameter(torch.eye(2).to_sparse_csr())
    table.grad = (8 * torch.eye(2)).to_sparse_csr()
    scaler.unscale_(torch.optim.SGD([table], lr=1.0))
    assert torch.equal(table.grad.to_dense(), 2 * torch.eye(2))
    param = torch.nn.Parameter(torch.ones(2))
    for use in (scaler.unscale_, lambda o: scaler.clip_grad_norm_(o, 1e9), lambda o: scaler.clip_grad_value_(o, 1e9)):
        param.grad = None
        scaler.scale((param**3).sum()).backward(create_graph=True)
        use(torch.optim.SGD([param], lr=1.0))
        assert param.grad.tolist() == [3.0, 3.0]
    param.grad = None  # breaks the reference cycle that create_graph makes
