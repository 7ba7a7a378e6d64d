"""Counts and rows that a scaler keeps on the device, against a plain account of the same run."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.history import _COUNTED, ScalerStats
from tests.helpers.scaler_tools import count_reads, iterate, started, with_grads


@settings(max_examples=25)
@given(
    flags=st.lists(st.booleans(), min_size=1, max_size=80),
    reads=st.sets(st.integers(0, 80), max_size=4),
    size=st.sampled_from([1, 7, 1000]),
    block=st.sampled_from([1, 4, 256]),
)
def test_counts_and_rows_equal_a_plain_account(flags, reads, size, block) -> None:
    """However the ledger is folded and read in between."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ampkit.scaler.history._BLOCK", block)
        patch.setattr("ampkit.scaler.history._ROWS", size)
        scaler = GradScaler("cpu", 2.0**60, growth_interval=3)
        scaler.scale(torch.ones((), requires_grad=True))
        (param,) = with_grads([torch.ones(1)])
        optimizer = torch.optim.SGD([param], lr=0.0)
        rows, run, growths, backoffs = [], 0, 0, 0
        for i, bad in enumerate(flags):
            param.grad = torch.tensor([math.inf if bad else 1.0])
            clips = i % 3 == 0
            norm = scaler.clip_grad_norm_(optimizer, 1.0).item() if clips else None
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            after = scaler.get_scale()
            rows.append({"update": i + 1, "scale": before, "overflow": bad, "grad_norm": norm, "outlier": False})
            run = run + 1 if bad else 0
            growths += after > before
            backoffs += after < before
            if i in reads:
                assert scaler.stats().consecutive_skips == run
                assert len(scaler.history) == min(size, i + 1)
    skips = flags.count(True)
    assert scaler.stats() == ScalerStats(
        scale=scaler.get_scale(), updates=len(flags), steps=len(flags) - skips, skips=skips, overflows=skips,
        consecutive_skips=run, growths=growths, backoffs=backoffs,
    )
    assert scaler.history == rows[-size:]


def test_two_optimizers_count_their_own_steps_and_the_norm_is_the_largest() -> None:
    """And a scale that is set by hand is no growth."""
    scaler = started(GradScaler, 1.0)
    good, bad = with_grads([torch.tensor([3.0]), torch.tensor([math.nan, math.inf, 1.0])])
    scaler.clip_grad_norm_(torch.optim.SGD(with_grads([torch.tensor([4.0])]), lr=0.1), 100.0)
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in (good, bad, torch.nn.Parameter(torch.ones(1)))]
    scaler.clip_grad_norm_(optimizers[0], 100.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.history[0]["grad_norm"] == 4.0
    scaler.update(64.0)
    assert scaler.stats() == ScalerStats(
        64.0, updates=2, steps=1, skips=1, no_gradients=1, overflows=1, consecutive_skips=0, growths=0, backoffs=1
    )


def test_counting_waits_for_no_device_until_somebody_asks() -> None:
    scaler = started(GradScaler)
    optimizer = torch.optim.AdamW(with_grads([torch.ones(4)]), lr=0.1, fused=True)
    with count_reads() as reads:
        for _ in range(600):  # past two foldings
            scaler.scale(torch.ones((), requires_grad=True))
            scaler.clip_grad_norm_(optimizer, 1.0)
            iterate(scaler, optimizer)
            scaler.found_inf(optimizer)
    assert reads == []
    with count_reads() as reads:
        assert scaler.stats().steps == 600
    assert len(reads) <= 12, "one small tensor, read once"


def test_an_ordinary_step_reads_one_number(monkeypatch) -> None:
    scaler = started(GradScaler)
    params = with_grads([torch.ones(4), torch.ones(3, dtype=torch.float64)])
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step_reads in (1, 2):       # a skipped one the scale too
        with count_reads() as reads, monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", None)     # a read that calls no operator on the CPU
            iterate(scaler, optimizer)
            assert len(reads) == step_reads
            scaler.stepped(optimizer)
            scaler.found_inf(optimizer)
        assert len(reads) == step_reads
        params[0].grad = torch.full((4,), math.inf)
    assert len(scaler.overflow_report()) == 1, "of what was counted in the step"


def test_a_captured_iteration_counts_itself_alone(monkeypatch) -> None:
    """What is summed up within a graph is summed up at each replay: not what was noted before the capture.

    Nor do updates between replays count the growths of those.
    """
    scaler = started(GradScaler)
    (param,) = with_grads([torch.ones(1)])
    optimizer = torch.optim.SGD([param], lr=0.1)

    def iteration(value: float) -> None:
        param.grad = torch.tensor([value])
        iterate(scaler, optimizer)

    for value in (1.0, math.inf, math.nan):
        iteration(value)
    counted = [scaler._history._totals.clone()]     # of the first one; the others wait
    monkeypatch.setattr("ampkit_kernels.is_capturing", lambda _: True)
    iteration(1.0)
    counted.append(scaler._history._totals)
    assert [dict(zip(_COUNTED, each.tolist(), strict=True)) for each in counted] == [
        {**dict.fromkeys(_COUNTED, 0), "updates": n, "attempts": n} for n in (1, 2)
    ]
    monkeypatch.undo()
    for _ in range(2):
        iteration(1.0)
        scaler._scale.mul_(2.0)     # as replays would
    assert scaler.stats() == ScalerStats(
        scaler.get_scale(), updates=6, steps=4, skips=2, overflows=2, backoffs=2, growths=0, consecutive_skips=0
    )
    assert [row["overflow"] for row in scaler.history] == [False, True, True, False, False]
