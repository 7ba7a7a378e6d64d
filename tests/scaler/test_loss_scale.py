"""Loss-scale strategies against torch's update kernel, and against a plain Python account of the rules."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from ampkit import DynamicLossScale, NoOpLossScale, StaticLossScale
from ampkit.scaler.loss_scale import LARGEST_SCALE, SMALLEST_SCALE
from tests.helpers.scaler_tools import iterate, one_parameter, started, with_grads

flags = st.lists(st.sampled_from([0.0, 0.0, 0.0, 1.0]), min_size=30, max_size=60)


@given(
    flags=st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0, 0.5, -1.0, math.nan]), min_size=1, max_size=60),
    init=st.sampled_from([1.0, 65536.0, 2.0**120, 3.0e38, 1e-20, 777.0]),
    growth=st.sampled_from([1.0, 2.0, 1.3, 1e6]),
    backoff=st.sampled_from([0.5, 0.9, 0.123, 1.0]),
    interval=st.integers(0, 5),
)
def test_plain_rule_is_torchs_update_kernel(flags, init, growth, backoff, interval) -> None:
    """Scale and tracker equal `_amp_update_scale_` bit for bit, down to the floor that torch does not have."""
    rule = DynamicLossScale(init, growth, backoff, interval)
    state = rule.init("cpu")
    scale, tracker = torch.tensor(init), torch.zeros((), dtype=torch.int32)
    for flag in flags:
        state = rule.next_state(state, torch.tensor(flag))
        torch._amp_update_scale_(scale, tracker, torch.tensor(flag), growth, backoff, interval)
        if float(scale) < SMALLEST_SCALE:
            assert float(state.scale) == SMALLEST_SCALE
            return
        assert torch.equal(state.scale, scale)
        assert state.growth_tracker.dtype == tracker.dtype
        assert torch.equal(state.growth_tracker, tracker)


def account(rule: DynamicLossScale, flags: list[float]) -> list[tuple[float, int]]:
    """The dynamic rule in Python numbers, written from its description."""
    scale, run, left = np.float32(rule.init_scale), 0, rule.hysteresis
    out = []
    for flag in flags:
        if flag:
            run = 0
            if left <= 1:
                scale = max(np.float32(float(scale) * rule.backoff_factor), np.float32(rule.min_scale))
            left = max(left - 1, 1)
        else:
            run += 1
            if run == rule.growth_interval:
                run = 0
                scale = min(np.float32(float(scale) * rule.growth_factor), np.float32(rule.max_scale))
                left = rule.hysteresis
        out.append((float(scale), run))
    return out


@pytest.mark.filterwarnings("ignore:the loss scale has fallen")
@settings(max_examples=30)
@given(
    flags=flags,
    hysteresis=st.integers(1, 3),
    interval=st.integers(1, 6),
    bounds=st.sampled_from([(SMALLEST_SCALE, LARGEST_SCALE), (4.0, 64.0), (16.0, 16.0)]),
)
def test_dynamic_rule_follows_its_description(flags, hysteresis, interval, bounds) -> None:
    """As a pure rule, and in a scaler, which writes the next state into the same tensors."""
    rule = DynamicLossScale(
        16.0, growth_interval=interval, min_scale=bounds[0], max_scale=bounds[1], hysteresis=hysteresis
    )
    state, scaler, (_, optimizer) = rule.init("cpu"), started(loss_scale=rule), one_parameter()
    tensors = [scaler._scale, scaler._growth_tracker, *scaler._counters]
    for flag, expected in zip(flags, account(rule, flags), strict=True):
        before = [part.clone() for part in state]
        after = rule.next_state(state, torch.tensor(flag))
        assert list(map(float, before)) == list(map(float, state)), "next_state changes nothing"
        state = after
        iterate(scaler, optimizer, math.inf if flag else 0.0)
        assert (float(state.scale), int(state.growth_tracker)) == expected
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == expected
    live = scaler._scale, scaler._growth_tracker, *scaler._counters
    assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in live], "updates write in place"


def test_a_static_scale_stays() -> None:
    rule = StaticLossScale(128.0)
    state, scaler, (_, optimizer) = rule.init("cpu"), started(loss_scale=rule), one_parameter()
    for flag, run in ((0.0, 1), (0.0, 2), (math.nan, 0), (0.0, 1)):
        state = rule.next_state(state, torch.tensor(flag))
        iterate(scaler, optimizer, flag)
        assert (float(state.scale), int(state.growth_tracker)) == (128.0, run)
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (128.0, run)


def test_noop_neither_scales_nor_divides_and_still_guards() -> None:
    scaler = started(loss_scale=NoOpLossScale())
    loss = torch.ones((), requires_grad=True)
    assert scaler.scale(loss) is loss
    param, optimizer = one_parameter(grad=3.0)
    assert scaler.clip_grad_norm_(optimizer, 10.0).item() == 3.0
    assert param.grad.item() == 3.0
    for grad in (3.0, math.nan):
        iterate(scaler, optimizer, grad)
        assert (param.item(), scaler.get_scale()) == (-2.0, 1.0)
    ours, theirs = (with_grads([torch.tensor([2.0])]) for _ in range(2))
    iterate(scaler, torch.optim.Adam(ours, lr=1.0, fused=True))
    torch.optim.Adam(theirs, lr=1.0, fused=True).step()
    assert torch.equal(*ours, *theirs)
