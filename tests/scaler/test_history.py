"""Counts and rows that a scaler keeps on the device, against a plain account of the same run."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from ampkit import TimesMedian
from ampkit.scaler.grad_scaler import GradScaler
from ampkit.scaler.history import ScalerStats
from tests.helpers.scaler_tools import Operators, count_reads, iterate, one_parameter, started, with_grads


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
        scaler, (param, optimizer) = started(GradScaler, 2.0**60, growth_interval=3), one_parameter()
        rows, run, scales = [], 0, [scaler.get_scale()]
        for i, bad in enumerate(flags):
            param.grad = torch.tensor([math.inf if bad else 1.0])
            norm = scaler.clip_grad_norm_(optimizer, 1.0).item() if i % 3 == 0 else None
            iterate(scaler, optimizer)
            rows.append({"update": i + 1, "scale": scales[i], "overflow": bad, "grad_norm": norm, "outlier": False})
            scales.append(scaler.get_scale())
            run = run + 1 if bad else 0
            if i in reads:
                assert scaler.stats().consecutive_skips == run
                assert len(scaler.history) == min(size, i + 1)
    changes, skips = [after - before for before, after in itertools.pairwise(scales)], flags.count(True)
    assert scaler.stats() == ScalerStats(
        scale=scales[-1],
        updates=len(flags),
        steps=len(flags) - skips,
        skips=skips,
        overflows=skips,
        consecutive_skips=run,
        growths=sum(by > 0 for by in changes),
        backoffs=sum(by < 0 for by in changes),
    )
    assert scaler.history == rows[-size:]


def test_two_optimizers_count_their_own_steps_and_the_norm_is_the_largest() -> None:
    """And a scale that is set by hand is no growth."""
    scaler = started(GradScaler, 1.0)
    grads = [torch.tensor([3.0]), torch.tensor([math.nan, math.inf, 1.0]), torch.tensor([4.0])]
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in with_grads(grads)]
    for clipped in (optimizers[2], optimizers[0]):
        scaler.clip_grad_norm_(clipped, 100.0)
    for optimizer in (*optimizers[:2], one_parameter()[1]):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.history[0]["grad_norm"] == 4.0
    scaler.update(64.0)
    assert scaler.stats() == ScalerStats(64.0, updates=2, steps=1, skips=1, no_gradients=1, overflows=1, backoffs=1)


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
    for step_reads in (1, 2):  # a skipped one the scale too
        with count_reads() as reads, monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", None)  # a read that calls no operator on the CPU
            iterate(scaler, optimizer)
            scaler.stepped(optimizer)
            scaler.found_inf(optimizer)
        assert len(reads) == step_reads
        params[0].grad = torch.full((4,), math.inf)
    assert len(scaler.overflow_report()) == 1, "of what was counted in the step"


@pytest.mark.parametrize("uses", ["scale", "a median"])
def test_what_a_capture_would_make_is_refused(monkeypatch, uses) -> None:
    """Each replay would reset it, and its first values come from memory that a capture cannot copy. Nothing changes."""
    scaler, (param, optimizer) = GradScaler("cpu", 4.0, skip_above=TimesMedian(3.0)), one_parameter(grad=4.0)
    if uses == "a median":
        scaler.scale(torch.ones(()))
    call = scaler.clip_grad_norm_ if uses == "a median" else lambda *_: scaler.scale(torch.ones(()))
    with monkeypatch.context() as patch:
        patch.setattr("ampkit_kernels.is_capturing", lambda _: True)
        with pytest.raises(RuntimeError, match=r"inside a CUDA graph capture, .*; run a whole iteration .* before"):
            call(optimizer, 1.0)
    assert (scaler._scale is None) is (scaler._history is None) is (uses == "scale")
    scaler.scale(torch.ones(()))
    scaler.clip_grad_norm_(optimizer, 10.0)
    iterate(scaler, optimizer)
    assert (param.item(), scaler.history[0]["grad_norm"]) == (0.0, 1.0)


def test_a_captured_iteration_and_its_replays_are_not_counted(monkeypatch) -> None:
    """Nor does the host keep tensors of the graph, whose memory ends with it."""
    scaler, (_, optimizer) = started(GradScaler), one_parameter()
    for value in (1.0, math.inf):
        iterate(scaler, optimizer, value)
    with monkeypatch.context() as patch:
        patch.setattr("ampkit_kernels.is_capturing", lambda _: True)
        iterate(scaler, optimizer, 1.0)
    iterate(scaler, optimizer, 1.0)
    assert scaler.stats() == ScalerStats(scaler.get_scale(), updates=3, steps=2, skips=1, overflows=1, backoffs=1)
    assert [row["overflow"] for row in scaler.history] == [False, True, False]


@pytest.mark.parametrize("ask", ["stats", "metrics", "history"])
def test_answers_cost_the_same_after_a_thousand_updates(ask) -> None:
    scaler, (_, optimizer), counts = started(GradScaler, skip_above=1e9), one_parameter(), []
    for updates in (1, 999):
        for _ in range(updates):
            iterate(scaler, optimizer, 1.0)
        with Operators() as operators:
            answer = getattr(scaler, ask)
            answer = answer() if callable(answer) else answer
        counts.append(len(operators.names))
    assert counts[0] <= counts[1] <= 60
    assert ask != "history" or len(answer) == 1000
