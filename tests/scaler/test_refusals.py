"""What scalers, strategies, limits and saved states refuse: the class and the text of each error."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from ampkit import DynamicLossScale, GradScaler, StaticLossScale, TimesMedian
from ampkit.scaler.loss_scale import to_dict
from tests.helpers.scaler_tools import one_parameter, started

INF, NAN = math.inf, math.nan


class TakesScaler(torch.optim.SGD):
    _step_supports_amp_scaling = True

    def step(self, grad_scaler: Any = None) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        *(
            (make, AssertionError, message)
            for cls in (GradScaler, torch.amp.GradScaler)
            for make, message in (
                (lambda cls=cls: cls("cpu", growth_factor=1.0), r"The growth factor must be > 1\.0"),
                (lambda cls=cls: cls("cpu", backoff_factor=1.0), r"The backoff factor must be < 1\.0"),
            )
        ),
        (lambda: GradScaler(2.0**16), TypeError, "device is 65536.0; expected .*; init_scale is the second"),
        (lambda: GradScaler(True), TypeError, "device is True; expected .*; pass enabled= by keyword"),
        *(
            (
                lambda given=given, on=on: GradScaler("cpu", loss_scale=given, enabled=on),
                TypeError,
                "loss_scale is .*; exp",
            )
            for given in ("dynamic", 128.0, DynamicLossScale)
            for on in (True, False)
        ),
        *(
            (
                lambda base=base: GradScaler("cpu", loss_scale=type("Mine", (base,), {})(8.0)),
                TypeError,
                r"loss_scale is Mine\(.*\) of a subclass, whose rule .*; expected DynamicLossScale\(\), Stat",
            )
            for base in (DynamicLossScale, StaticLossScale)
        ),
        (lambda: GradScaler("cpu", growth_factor=None), TypeError, "growth_factor is None; expected a number"),
        (lambda: GradScaler("cpu", init_scale=0.0), ValueError, "init_scale is 0"),
        (lambda: GradScaler("cpu", on_stuck="scream"), ValueError, "on_stuck is 'scream'; expected 'warn', 'raise'"),
        (lambda: GradScaler("cpu").set_growth_factor(0.5), ValueError, r"growth_factor is 0\.5"),
        (lambda: GradScaler("cpu").set_backoff_factor(0.0), ValueError, r"backoff_factor is 0\.0"),
        (
            lambda: GradScaler("cpu", 4.0, loss_scale=StaticLossScale(2.0)),
            ValueError,
            "one or the other: set the numbers",
        ),
        (
            lambda: GradScaler("cpu", loss_scale=StaticLossScale(2.0)).set_growth_factor(3.0),
            ValueError,
            r"cannot set growth_factor on StaticLossScale\(scale=2\.0\)",
        ),
        *(
            (
                lambda scale=scale: StaticLossScale(scale),
                ValueError,
                r"scale is .*; expected a number from 1\.18e-38 to",
            )
            for scale in (0.0, INF, NAN, 1e-44)
        ),
        *(
            (lambda options=options: DynamicLossScale(**options), ValueError, message)
            for options, message in (
                ({"growth_factor": 10**400}, "growth_factor is 1000.*; expected a finite number of 1 or more"),
                (
                    {"growth_interval": 2**63},
                    "growth_interval is 9223372036854775808; expected a number that fits 64 bits",
                ),
                (
                    {"growth_interval": -(2**63) - 1},
                    "growth_interval is -9223372036854775809; expected a number that fits",
                ),
                ({"backoff_factor": 0.0}, "backoff_factor is 0.0; expected a number above 0, at most 1"),
                ({"min_scale": 0.0}, "min_scale is 0.0; expected .*: a scale of 0 or inf destroys gradients"),
                ({"min_scale": 4.0, "max_scale": 2.0}, r"max_scale is 2.0; expected a number from min_scale \(4.0\)"),
                ({"init_scale": NAN}, "init_scale is nan; expected a number from min_scale"),
                ({"init_scale": 4.0, "max_scale": 2.0}, r"to max_scale \(2.0\)"),
                ({"hysteresis": 2**31}, r"hysteresis is 2147483648; expected 1 .*at most 2\*\*30"),
            )
        ),
        (lambda: GradScaler("cpu", skip_above=0.0), ValueError, "skip_above is 0.0; expected a positive"),
        (lambda: GradScaler("cpu", skip_above=NAN), ValueError, "skip_above is nan"),
        (lambda: GradScaler("cpu", skip_above=True), TypeError, "skip_above is True; expected a number"),
        (
            lambda: GradScaler("cpu", skip_above=TimesMedian),
            TypeError,
            r"the class TimesMedian; .* or TimesMedian\(factor",
        ),
        (lambda: TimesMedian(1.0), ValueError, "factor is 1.0; expected a number above 1"),
        (lambda: TimesMedian(2.0, window=7), ValueError, "window is 7; expected 8 to 65536 norms"),
        (
            lambda: started(skip_above=5.0).step(TakesScaler([one_parameter(grad=1.0)[0]], lr=0.1)),
            ValueError,
            "skip_above does not support TakesScaler, whose step takes grad_scaler",
        ),
        (
            lambda: started().step(one_parameter(grad=1.0)[1], lambda: 0.0),
            RuntimeError,
            r"GradScaler.step got a closure for SGD, .*; expected .* call step\(optimizer\) without a closure",
        ),
    ],
)
def test_arguments(make, error, message) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_given_in_place_of_an_optimizer_or_a_model(enabled) -> None:
    """The parameters, as torch's clipping takes them; the model. Nothing is noted."""
    scaler, model = started(enabled=enabled), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for given in (model.parameters(), [*model.parameters()], model, optimizer.step, None, [optimizer]):
        calls = [lambda given=given: scaler.clip_grad_norm_(given, 1.0)]
        calls += [lambda given=given: scaler.unscale_(given), lambda given=given: scaler.step(given)] * enabled
        for call in calls:
            with pytest.raises(AttributeError, match=rf"got {type(given).__name__} for an optimizer; exp.*_groups"):
                call()
    assert len(scaler._per_optimizer_states) == 0
    for limit in (None, "1"):
        with pytest.raises(TypeError, match=f"max_norm is {limit!r}; expected a number"):
            scaler.clip_grad_norm_(optimizer, limit)
    with pytest.raises(TypeError, match=r"model is SGD; expected the model .*; pass optimizer= by keyword"):
        scaler.overflow_report(optimizer)
    if enabled:
        with pytest.raises(AssertionError, match=r"new_scale should be a number .*; got SGD$"):
            scaler.update(optimizer)


@pytest.mark.parametrize("value", ["2", None, True, [], 1j, torch.ones(2)], ids=str)
def test_what_is_no_number(value) -> None:
    """When it is given, not in a later update, by torch."""
    for make, name in (
        (StaticLossScale, "scale"),
        (DynamicLossScale, "init_scale"),
        (lambda value: DynamicLossScale(hysteresis=value), "hysteresis"),
        (GradScaler("cpu").set_growth_interval, "growth_interval"),
    ):
        with pytest.raises(TypeError, match=rf"{name} is .*; expected a (whole )?number"):
            make(value)


def test_numbers_of_other_classes_become_pythons_own() -> None:
    rule = DynamicLossScale(torch.tensor(8.0), np.float32(2.0), growth_interval=np.int64(3))
    assert rule == DynamicLossScale(8.0, 2.0, growth_interval=3)
    assert [type(value) for value in to_dict(rule).values()][1:5] == [float, float, float, int]


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        ({"counters": {"hysteresis_left": 2**31}}, ValueError, "hysteresis_left of 'counters' is 2147483648; expected"),
        ({"totals": {"skips": -1}}, ValueError, "the saved skips of 'totals' is -1; expected a whole number from 0"),
        ({"loss_scale": {"kind": "static"}}, ValueError, r"the saved loss scale \(static\) has the fields \[\]; expec"),
        ({"loss_scale": {"kind": "magic"}}, ValueError, r"kind 'magic'; expected one of \['dynamic', 'noop', 'static'"),
        ({"flavour": 1}, ValueError, r"the saved 'ampkit' has unknown entries \['flavour'\].*newer ampkit"),
        *(({"norms": norms}, (TypeError, ValueError), "saved") for norms in ("1", [1.0], [[1, 1]], [[1, -1, []]])),
        *(
            ({"norms": [[1, 1, norms]]}, (TypeError, ValueError), "saved")
            for norms in (1.0, ["1"], [-1.0], [NAN], [1e39])
        ),
    ],
)
def test_bad_entries_of_a_saved_state(own, error, message) -> None:
    """Any entry of any kind: stress/test_scaler_state.py."""
    scaler: Any = started(GradScaler, 4.0, skip_above=TimesMedian(3.0))
    before = scaler.state_dict()
    saved = {**before, "scale": 8.0, "ampkit": {**before["ampkit"], **own}}
    with pytest.raises(error, match=message):
        scaler.load_state_dict(saved)
    assert scaler.state_dict() == before


def test_saved_states_as_a_whole() -> None:
    scaler = started()
    saved = started(GradScaler, 4.0).state_dict()
    for state, error, message in (
        ({}, RuntimeError, "The source state dict is empty"),
        ({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}}, KeyError, "Apex's amp; .*amp.load_state_dict"),
        ("scaler.pt", TypeError, "the saved 'scaler' is 'scaler.pt'; expected a dict"),
        ({**saved, "scale": INF}, ValueError, "the saved scale is inf; expected a positive finite number"),
        (
            {key: saved[key] for key in saved.keys() - {"scale", "growth_interval"}},
            KeyError,
            "no 'scale', 'growth_interval'",
        ),
    ):
        with pytest.raises(error, match=message):
            scaler.load_state_dict(state)
        assert scaler.get_scale() == 2.0**16
    with pytest.warns(UserWarning, match=r"unknown entries in the scaler's state dict: \['flavour'\]"):
        scaler.load_state_dict({**saved, "flavour": 3})
    assert scaler.get_scale() == 4.0
