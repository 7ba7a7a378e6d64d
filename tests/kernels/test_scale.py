"""update_scale_: against torch's operator, the kernel against the reference, and the rule's own promises."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampkit_kernels import update_scale_

IMPLS = ("reference", "triton")


def run(impl: str, scale: float, tracker: int, patience: int | None, found_inf: float, **options) -> tuple:
    state = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
    left = None if patience is None else torch.tensor(patience, dtype=torch.int32)
    settings = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, **options}
    update_scale_(*state, left, torch.tensor(found_inf), impl=impl, **settings)
    return state[0].item(), state[1].item(), None if left is None else left.item()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_plain_rule_is_torchs(impl: str) -> None:
    factors = ((2.0, 0.5), (1.001, 0.7), (3.3, 0.1))
    for (growth, backoff), scale, tracker, found_inf in itertools.product(
        factors, (1.0, 65536.0, 3e38, 0.3), (0, 2, 5), (0.0, 1.0, 2.0, float("nan"))
    ):
        want = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
        torch._amp_update_scale_(*want, torch.tensor(found_inf), growth, backoff, 3)
        got = run(impl, scale, tracker, None, found_inf, growth_factor=growth, backoff_factor=backoff)
        assert got[:2] == (want[0].item(), want[1].item()), (growth, scale, tracker, found_inf)


@pytest.mark.usefixtures("interpreted")
def test_kernel_equals_reference() -> None:
    bounds = ((None, None), (4.0, 16.0))
    for found_inf, hysteresis, refill, (low, high), scale, tracker, patience in itertools.product(
        (0.0, 1.0), (1, 3), ("clean", "growth"), bounds, (8.0, 2.0, 32.0, 1e-45, 3e38), (0, 2), (1, 3)
    ):
        options = {"hysteresis": hysteresis, "refill": refill, "min_scale": low, "max_scale": high}
        left = patience if hysteresis > 1 else None
        results = {run(impl, scale, tracker, left, found_inf, growth_factor=2.5, **options) for impl in IMPLS}
        assert len(results) == 1, (found_inf, options, scale, tracker, results)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_neither_zero_nor_infinite(impl: str) -> None:
    assert run(impl, 1e-45, 0, None, 1.0)[0] == pytest.approx(1e-45)  # the smallest positive number there is
    assert run(impl, 3e38, 2, None, 0.0)[0] == pytest.approx(3e38)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_bounds_stop_products_but_do_not_move_what_was_set(impl: str) -> None:
    assert run(impl, 6.0, 0, None, 1.0, min_scale=4.0)[0] == 4.0
    assert run(impl, 2.0, 0, None, 1.0, min_scale=4.0)[0] == 2.0
    assert run(impl, 12.0, 2, None, 0.0, max_scale=16.0)[0] == 16.0
    assert run(impl, 32.0, 2, None, 0.0, max_scale=16.0)[0] == 32.0


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("impl", IMPLS)
def test_patience(impl: str) -> None:
    clean = {"hysteresis": 3, "refill": "clean"}
    assert run(impl, 8.0, 2, 3, 1.0, **clean) == (8.0, 0, 2)
    assert run(impl, 8.0, 0, 2, 1.0, **clean) == (8.0, 0, 1)
    assert run(impl, 8.0, 0, 1, 1.0, **clean) == (4.0, 0, 1)
    assert run(impl, 4.0, 0, 1, 0.0, **clean) == (4.0, 1, 3)
    growth = {"hysteresis": 3, "refill": "growth"}
    assert run(impl, 4.0, 0, 1, 0.0, **growth) == (4.0, 1, 1)
    assert run(impl, 4.0, 2, 1, 0.0, **growth) == (8.0, 0, 3)


@settings(max_examples=25)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 5))
def test_sequences_follow_torch(overflows: list[bool], interval: int) -> None:
    ours = torch.tensor(2.0**15), torch.zeros((), dtype=torch.int32)
    theirs = torch.tensor(2.0**15), torch.zeros((), dtype=torch.int32)
    for overflow in overflows:
        found_inf = torch.tensor(float(overflow))
        torch._amp_update_scale_(*theirs, found_inf, 2.0, 0.5, interval)
        update_scale_(*ours, None, found_inf, growth_factor=2.0, backoff_factor=0.5, growth_interval=interval)
        assert [t.item() for t in ours] == [t.item() for t in theirs]


def test_refusals() -> None:
    options = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    scale, tracker, flag = torch.tensor(8.0), torch.zeros((), dtype=torch.int32), torch.tensor(0.0)
    with pytest.raises(
        ValueError, match=r"growth_tracker is a torch.float32 .*expected one int32 element on cpu"
    ):
        update_scale_(scale, torch.tensor(0.0), None, flag, **options)
    with pytest.raises(ValueError, match="hysteresis 2 with hysteresis_tracker None"):
        update_scale_(scale, tracker, None, flag, hysteresis=2, **options)
    with pytest.raises(ValueError, match="unknown refill 'always'; expected 'clean' or 'growth'"):
        update_scale_(scale, tracker, None, flag, refill="always", **options)
    assert scale == 8.0
