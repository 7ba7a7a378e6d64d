"""Loss-scale strategies against torch's update kernel, and against a plain Python account of the rules."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings

from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.loss_scale import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    DynamicLossScale,
    NoOpLossScale,
    ScaleState,
    StaticLossScale,
    to_dict,
)
from tests.helpers.scaler_tools import iterate, with_grads

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
    scale, run, left, updates, overflows = np.float32(rule.init_scale), 0, rule.hysteresis, 0, 0
    out = []
    for flag in flags:
        updates += 1
        moved = False
        if flag:
            run = 0
            overflows += 1
            if overflows / updates >= rule.tolerance:
                if left <= 1:
                    scale = max(np.float32(float(scale) * rule.backoff_factor), np.float32(rule.min_scale))
                    moved = True
                left = max(left - 1, 1)
        else:
            run += 1
            if run == rule.growth_interval:
                run = 0
                moved = True
                scale = min(np.float32(float(scale) * rule.growth_factor), np.float32(rule.max_scale))
                if rule.hysteresis_refill == "growth":
                    left = rule.hysteresis
            if rule.hysteresis_refill == "clean":
                left = rule.hysteresis
        if moved:
            updates = overflows = 0
        out.append((float(scale), run))
    return out


@example([0.0, 0.0, 0.0, 0.0, 1.0, 1.0], 2, "growth", 0.25, 6, (4.0, 64.0))     # forgiven, then counted
@given(
    flags=flags,
    hysteresis=st.integers(1, 3),
    refill=st.sampled_from(["growth", "clean"]),
    tolerance=st.sampled_from([0.0, 0.25, 0.5]),
    interval=st.integers(1, 6),
    bounds=st.sampled_from([(SMALLEST_SCALE, LARGEST_SCALE), (4.0, 64.0), (16.0, 16.0)]),
)
def test_dynamic_rule_follows_its_description(flags, hysteresis, refill, tolerance, interval, bounds) -> None:
    rule = DynamicLossScale(
        16.0, growth_interval=interval, min_scale=bounds[0], max_scale=bounds[1], hysteresis=hysteresis,
        hysteresis_refill=refill, tolerance=tolerance,
    )
    state = rule.init("cpu")
    for flag, (scale, run) in zip(flags, account(rule, flags), strict=True):
        before = [part.clone() for part in state]
        after = rule.next_state(state, torch.tensor(flag))
        assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True)), "next_state is pure"
        state = after
        assert (float(state.scale), int(state.growth_tracker)) == (scale, run)


@settings(max_examples=30)
@given(
    flags=flags,
    rule=st.sampled_from(
        [
            DynamicLossScale(8.0, growth_interval=2),
            DynamicLossScale(8.0, growth_interval=2, min_scale=2.0, max_scale=16.0),
            DynamicLossScale(8.0, growth_interval=3, hysteresis=2),
            DynamicLossScale(8.0, growth_interval=3, hysteresis=2, hysteresis_refill="clean"),
            DynamicLossScale(8.0, growth_interval=3, tolerance=0.3),
            StaticLossScale(128.0),
            NoOpLossScale(),
        ]
    ),
)
def test_scaler_advances_in_place_as_the_pure_rule_says(flags, rule) -> None:
    """The scaler's quick path for plain rules and the general one give the same state, in the same tensors."""
    scaler = GradScaler("cpu", loss_scale=rule)
    scaler.scale(torch.ones((), requires_grad=True))
    expected = rule.init("cpu")
    tensors = [scaler._scale, scaler._growth_tracker, *scaler._counters]
    for flag in flags:
        scaler._advance(torch.tensor(flag))
        expected = rule.next_state(expected, torch.tensor(flag))
        live = ScaleState(scaler._scale, scaler._growth_tracker, *scaler._counters)
        assert rule.kind == "dynamic" or float(live.scale) == rule.init_scale
        compared = 2 if rule.is_plain else 5    # a plain rule needs no other counters
        assert list(map(float, live[:compared])) == list(map(float, expected[:compared]))
        assert all(a is b for a, b in zip(tensors, live, strict=True))


def test_noop_neither_scales_nor_divides_and_still_guards() -> None:
    scaler = GradScaler("cpu", loss_scale=NoOpLossScale())
    loss = torch.ones((), requires_grad=True)
    assert scaler.scale(loss) is loss
    (param,) = with_grads([torch.tensor([3.0])])
    optimizer = torch.optim.SGD([param], lr=1.0)
    assert scaler.clip_grad_norm_(optimizer, 10.0).item() == 3.0
    assert param.grad.item() == 3.0
    iterate(scaler, optimizer)
    assert param.item() == -2.0
    results = []
    for step in (lambda fused: iterate(scaler, fused), lambda fused: fused.step()):
        params = with_grads([torch.tensor([2.0])])
        step(torch.optim.Adam(params, lr=1.0, fused=True))
        results += params
    assert torch.equal(*results)
    param.grad = torch.tensor([math.nan])
    iterate(scaler, optimizer)
    assert (param.item(), scaler.get_scale()) == (-2.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"growth_factor": 10**400}, "growth_factor is 1000.*; expected a finite number of 1 or more"),
        ({"growth_interval": 2**63}, "growth_interval is 9223372036854775808; expected a number that fits 64 bits"),
        ({"backoff_factor": 0.0}, "backoff_factor is 0.0; expected a number above 0, at most 1"),
        ({"min_scale": 0.0}, "min_scale is 0.0; expected .*: a scale of 0 or inf destroys gradients"),
        ({"min_scale": 4.0, "max_scale": 2.0}, r"max_scale is 2.0; expected a number from min_scale \(4.0\)"),
        ({"init_scale": math.nan}, "init_scale is nan; expected a number from min_scale"),
        ({"init_scale": 4.0, "max_scale": 2.0}, r"to max_scale \(2.0\)"),
        ({"hysteresis": 2**31}, r"hysteresis is 2147483648; expected 1 .*at most 2\*\*30"),
        ({"hysteresis_refill": "never"}, "hysteresis_refill is 'never'; expected 'growth' or 'clean'"),
        ({"tolerance": 1.0}, "tolerance is 1.0; expected a share"),
    ],
)
def test_bad_settings_are_named(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicLossScale(**arguments)


def test_bad_constants_and_combinations_are_named() -> None:
    for make, message in (
        *((lambda scale=scale: StaticLossScale(scale), r"scale is .*; expected a number from 1\.18e-38 to")
          for scale in (0.0, math.inf, math.nan, 1e-44)),
        (lambda: GradScaler("cpu", 4.0, loss_scale=StaticLossScale(2.0)), "one or the other: set the numbers on the"),
        (lambda: GradScaler("cpu", loss_scale=StaticLossScale(2.0)).set_growth_factor(3.0),
         r"cannot set growth_factor on StaticLossScale\(scale=2\.0\)"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("value", ["2", None, True, [], 1j, torch.ones(2)], ids=str)
def test_what_is_no_number_is_refused_when_it_is_given(value) -> None:
    """Not in a later update, by torch. Numbers of other classes become Python's own."""
    for make, name in (
        (StaticLossScale, "scale"), (DynamicLossScale, "init_scale"),
        (lambda value: DynamicLossScale(hysteresis=value), "hysteresis"),
        (GradScaler("cpu").set_growth_interval, "growth_interval"),
    ):
        with pytest.raises(TypeError, match=rf"{name} is .*; expected a (whole )?number"):
            make(value)
    rule = DynamicLossScale(torch.tensor(8.0), np.float32(2.0), growth_interval=np.int64(3))
    assert rule == DynamicLossScale(8.0, 2.0, growth_interval=3)
    assert [type(value) for value in to_dict(rule).values()][1:5] == [float, float, float, int]
