"""The scaler's state: checkpoints, and what a resumed run goes on with. What is refused: test_refusals.

That states travel between both scalers, and pickles and copies, is proved in lockstep.
"""

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ampkit import DynamicLossScale, GradScaler, NoOpLossScale, StaticLossScale, TimesMedian
from tests.helpers.scaler_tools import iterate, one_parameter, started


def run(scaler: GradScaler, flags: list[bool]) -> list[float]:
    """Iterate with a made-up overflow wherever a flag is set; returns the scales."""
    scales = []
    for bad in flags:
        scaler.scale(torch.ones((), requires_grad=True))
        param, optimizer = one_parameter()
        iterate(scaler, optimizer, math.nan if bad else 1.0)
        assert (param.item() == 1.0) == bad
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize(
    "rule",
    [
        DynamicLossScale(8.0, growth_interval=2, hysteresis=2, min_scale=2.0, max_scale=16.0),
        DynamicLossScale(8.0, hysteresis=3),
        StaticLossScale(128.0),
        NoOpLossScale(),
    ],
    ids=lambda rule: rule.kind,
)
@pytest.mark.parametrize("live", [True, False])
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(rule, live, tmp_path) -> None:
    """Every counter of every strategy is saved, amid forgiven overflows too, in plain values."""
    before = [False, True, False, False, True]
    after = [True, True, False, False, False, True, True, True]
    whole, first = GradScaler("cpu", loss_scale=rule), GradScaler("cpu", loss_scale=rule)
    expected = run(whole, before + after)[len(before) :]
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
@pytest.mark.parametrize("strategy", [DynamicLossScale(hysteresis=3), StaticLossScale(64.0)])
def test_a_distributed_checkpoint_brings_every_count_to_a_fresh_scaler(tmp_path, strategy) -> None:
    """It loads the entries that it finds in the scaler to load, so those are there before anything has happened."""
    used, fresh = GradScaler("cpu", loss_scale=strategy), GradScaler("cpu", loss_scale=strategy)
    run(used, [False, True, True, False])
    dcp.save({"scaler": used}, checkpoint_id=tmp_path / "run")
    dcp.load({"scaler": fresh}, checkpoint_id=tmp_path / "run")
    assert fresh.state_dict() == used.state_dict()
    assert fresh.stats() == used.stats()


def test_fractions_stay_fractions_and_counts_integers() -> None:
    """Of scales that are set and loaded, and of saved norms; also in a scaler that has not been used."""
    scaler, (param, optimizer) = started(GradScaler, 1.25, skip_above=TimesMedian(3.0)), one_parameter()
    for value in (1.5, 0.75, 1.75):
        param.grad = torch.full((1,), value)
        scaler.step(optimizer)
        scaler.update(value)
        assert scaler.get_scale() == value
    state = scaler.state_dict()
    ((_, _, norms),) = state["ampkit"]["norms"]
    assert norms == pytest.approx([1.5 / 1.25, 0.75 / 1.5, 1.75 / 0.75])
    for other in (GradScaler("cpu", skip_above=TimesMedian(3.0)), started(GradScaler, skip_above=TimesMedian(3.0))):
        other.load_state_dict(state)
        again = other.state_dict()
        assert again == state
        assert other.get_scale() == 1.75
        counts = [again["_growth_tracker"], *again["ampkit"]["counters"].values(), *again["ampkit"]["totals"].values()]
        assert {type(count) for count in counts} == {int}
        assert {type(value) for value in vars(other.stats()).values()} == {int, float}
        assert type(other.stats().updates) is int


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
    theirs = started(torch.amp.GradScaler)  # a static scale stays static in torch
    theirs.load_state_dict(static.state_dict())
    for value in (1.0, math.inf):
        iterate(theirs, one_parameter()[1], value)
    assert theirs.get_scale() == 128.0
