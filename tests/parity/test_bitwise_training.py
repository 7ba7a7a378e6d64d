"""Training under `Policy.torch("cpu")` is training under `torch.autocast("cpu")`, bit for bit, step after step."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ampkit
from ampkit import Policy
from tests.helpers.models import CASES, Case, custom_function_case

STEPS = 20
DTYPES = (torch.bfloat16, torch.float16)
BY_NAME = {case.name: case for case in CASES}


class Trace(NamedTuple):
    """What a training run computed: the loss and every gradient of each step, then the final parameters and buffers."""

    losses: list[Tensor]
    gradients: list[dict[str, Tensor]]
    state: dict[str, Tensor]


def native(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype)


def ours(dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    return ampkit.autocast("cpu", dtype, policy=Policy.torch("cpu"))


def train(
    case: Case,
    region: Callable[[], contextlib.AbstractContextManager[Any]],
    *,
    scaled: bool = False,
    backward_inside: bool = False,
    micro_batches: int = 1,
    steps: int = STEPS,
) -> Trace:
    """Train a case from the same seed, optionally with a loss scaler, backward in the region, or accumulation."""
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    losses, gradients = [], []
    for _ in range(steps):
        for _ in range(micro_batches):
            inputs, targets = case.batch()
            with region():
                loss = case.loss(model(inputs), targets) / micro_batches
                if backward_inside:
                    scaler.scale(loss).backward()
            if not backward_inside:
                scaler.scale(loss).backward()
            losses.append(loss.detach().clone())
        scaler.unscale_(optimizer)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return Trace(losses, gradients, model.state_dict())


def assert_same_bits(got: Trace, expected: Trace) -> None:
    """Every loss, gradient, parameter and buffer has the same dtype and the same bits, and nothing is missing."""
    assert [loss.dtype for loss in got.losses] == [loss.dtype for loss in expected.losses]
    for step, (one, other) in enumerate(zip(got.losses, expected.losses, strict=True)):
        assert same_bits(one, other), f"loss {step}: {one.item()!r}, expected {other.item()!r}"
    for step, (mine, theirs) in enumerate(zip(got.gradients, expected.gradients, strict=True)):
        assert mine.keys() == theirs.keys()
        different = [name for name in mine if not same_bits(mine[name], theirs[name])]
        assert not different, f"gradients of step {step} differ: {different}"
    assert all(same_bits(value, expected.state[name]) for name, value in got.state.items())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equality of dtype, shape and bits: tells 0.0 from -0.0, and one NaN pattern equals itself."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    one, other = (value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_twenty_steps_have_torchs_bits(case: Case, dtype: torch.dtype) -> None:
    scaled = dtype is torch.float16
    expected = train(case, lambda: native(dtype), scaled=scaled)
    got = train(case, lambda: ours(dtype), scaled=scaled)
    assert len(got.losses) == STEPS
    assert all(loss.isfinite() for loss in got.losses)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("case", [BY_NAME["decoder"], BY_NAME["convnet"]], ids=lambda case: case.name)
def test_backward_inside_the_region_has_torchs_bits(case: Case) -> None:
    expected = train(case, lambda: native(torch.bfloat16), backward_inside=True)
    assert_same_bits(train(case, lambda: ours(torch.bfloat16), backward_inside=True), expected)


def test_accumulation_with_a_lasting_cache_has_torchs_bits() -> None:
    """Casts kept over the micro-batches of a step are the ones torch makes again for each."""
    case = BY_NAME["decoder"]
    cache = ampkit.WeightCache()
    expected = train(case, lambda: native(torch.bfloat16), micro_batches=4)
    got = train(
        case,
        lambda: ampkit.autocast("cpu", torch.bfloat16, policy=Policy.torch("cpu"), cache=cache),
        micro_batches=4,
    )
    assert_same_bits(got, expected)
    assert cache.info().hits > 2 * cache.info().misses


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_own_custom_function_decorators_have_torchs_bits(dtype: torch.dtype) -> None:
    """`ampkit.custom_fwd` and `custom_bwd` in our lane, torch's in torch's."""
    case = custom_function_case(ampkit.custom_fwd(device_type="cpu"), ampkit.custom_bwd(device_type="cpu"))
    expected = train(BY_NAME["custom_function"], lambda: native(dtype))
    assert_same_bits(train(case, lambda: ours(dtype)), expected)
