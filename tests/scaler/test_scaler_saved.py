"""The scaler's state: checkpoints, what a resumed run goes on with, and what is refused.

That states travel between both scalers, and pickles and copies, is proved in lockstep.
"""

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.loss_scale import DynamicLossScale, NoOpLossScale, StaticLossScale
from tests.helpers.scaler_tools import iterate, started, with_grads

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
        iterate(scaler, torch.optim.SGD([param], lr=1.0))
        assert (param.item() == 1.0) == bad
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("rule", STRATEGIES, ids=lambda rule: rule.kind)
@pytest.mark.parametrize("live", [True, False])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(rule, live, tmp_path) -> None:
    """Every counter of every strategy is saved, amid forgiven overflows too, in plain values."""
    before = [False, True, False, False, True]
    after = [True, True, False, False, False, True, True, True]
    whole = GradScaler("cpu", loss_scale=rule)
    expected = run(whole, before + after)[len(before) :]
    first = GradScaler("cpu", loss_scale=rule)
    run(first, before)
    torch.save(first.state_dict(), tmp_path / "scaler.pt")
    second = GradScaler("cpu", loss_scale=type(rule)(8.0) if rule.kind == "dynamic" else rule)
    if live:
        second.scale(torch.ones((), requires_grad=True))
    second.load_state_dict(torch.load(tmp_path / "scaler.pt", weights_only=True))
    assert second.loss_scale == rule
    assert second.state_dict() == first.state_dict()
    assert second.stats() == first.stats()
    assert run(second, after) == expected
    assert second.stats() == whole.stats()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("strategy", [DynamicLossScale(hysteresis=3, tolerance=0.1), StaticLossScale(64.0)])
def test_a_distributed_checkpoint_brings_every_count_to_a_fresh_scaler(tmp_path, strategy) -> None:
    """It loads the entries that it finds in the scaler to load, so those are there before anything has happened."""
    used, fresh = GradScaler("cpu", loss_scale=strategy), GradScaler("cpu", loss_scale=strategy)
    run(used, [False, True, True, False])
    dcp.save({"scaler": used}, checkpoint_id=tmp_path / "run")
    dcp.load({"scaler": fresh}, checkpoint_id=tmp_path / "run")
    assert fresh.state_dict() == used.state_dict()
    assert fresh.stats() == used.stats()


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
    theirs = started(torch.amp.GradScaler)      # a static scale stays static in torch
    theirs.load_state_dict(static.state_dict())
    for value in (1.0, math.inf):
        iterate(theirs, torch.optim.SGD(with_grads([torch.tensor([value])]), lr=0.1))
    assert theirs.get_scale() == 128.0


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        ({"counters": {"hysteresis_left": 2**31}}, ValueError, "hysteresis_left of 'counters' is 2147483648; expected"),
        ({"totals": {"skips": -1}}, ValueError, "the saved skips of 'totals' is -1; expected a whole number from 0"),
        ({"loss_scale": {"kind": "static"}}, ValueError, r"the saved loss scale \(static\) has the fields \[\]; expec"),
        ({"loss_scale": {"kind": "magic"}}, ValueError, r"kind 'magic'; expected one of \['dynamic', 'noop', 'static'"),
        ({"scale": math.inf}, ValueError, "the saved scale is inf; expected a positive finite number"),
        ({"flavour": 1}, ValueError, r"the saved 'ampkit' has unknown entries \['flavour'\].*newer ampkit"),
    ],
)
def test_a_bad_entry_is_named_and_nothing_loaded(own, error, message) -> None:
    """Any entry of any kind: hostile/test_scaler_state.py."""
    scaler = started(GradScaler, 4.0)
    saved = GradScaler("cpu", 8.0).state_dict()
    before = scaler.state_dict()
    theirs = {name: own[name] for name in own if name in saved}
    own = {name: own[name] for name in own if name not in saved}
    with pytest.raises(error, match=message):
        scaler.load_state_dict({**saved, "ampkit": {**saved["ampkit"], **own}, **theirs})
    assert scaler.state_dict() == before


def test_missing_and_unknown_entries_are_named() -> None:
    scaler = started()
    saved = started(GradScaler, 4.0).state_dict()
    with pytest.raises(RuntimeError, match="The source state dict is empty"):
        scaler.load_state_dict({})
    with pytest.raises(KeyError, match="no 'scale', 'growth_interval'"):
        scaler.load_state_dict({k: v for k, v in saved.items() if k not in ("scale", "growth_interval")})
    assert scaler.get_scale() == 2.0**16
    with pytest.warns(UserWarning, match=r"unknown entries in the scaler's state dict: \['flavour'\]"):
        scaler.load_state_dict({**saved, "flavour": 3})
    assert scaler.get_scale() == 4.0
