"""Training under `Policy.torch("cpu")` is training under `torch.autocast("cpu")`, bit for bit, step after step."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ampkit import WeightCache
from tests.helpers.models import CASES, Case
from tests.helpers.regions import like_torch as ours

STEPS = 20
DTYPES = (torch.bfloat16, torch.float16)
BY_NAME = {case.name: case for case in CASES}


def native(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", dtype)


def train(
    case: Case,
    region: Callable[[], contextlib.AbstractContextManager[Any]],
    *,
    scaled: bool = False,
    backward_inside: bool = False,
    micro_batches: int = 1,
) -> dict[str, Tensor]:
    """The loss and every gradient of each step, then the final parameters and buffers, from the same seed."""
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    found = {}
    for step in range(STEPS):
        for part in range(micro_batches):
            inputs, targets = case.batch()
            with region():
                loss = case.loss(model(inputs), targets) / micro_batches
                if backward_inside:
                    scaler.scale(loss).backward()
            if not backward_inside:
                scaler.scale(loss).backward()
            found[f"loss {step}.{part}"] = loss.detach().clone()
        scaler.unscale_(optimizer)
        found |= {f"{name} {step}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert all(value.isfinite() for name, value in found.items() if name.startswith("loss"))
    return found | model.state_dict()


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Everything has the same dtype and the same bits, and nothing is missing. 0.0 and -0.0 differ."""

    def bits(value: Tensor) -> Tensor:
        return value.detach().contiguous().reshape(-1).view(torch.uint8)

    assert got.keys() == expected.keys()
    different = [
        name for name, value in expected.items()
        if got[name].dtype is not value.dtype or not torch.equal(bits(got[name]), bits(value))
    ]
    assert not different, f"{len(different)} of {len(expected)} differ: {different[:8]}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_twenty_steps_have_torchs_bits(case: Case, dtype: torch.dtype) -> None:
    scaled = dtype is torch.float16
    assert_same_bits(train(case, lambda: ours(dtype), scaled=scaled), train(case, lambda: native(dtype), scaled=scaled))


@pytest.mark.parametrize("case", [BY_NAME["decoder"], BY_NAME["convnet"]], ids=lambda case: case.name)
def test_backward_inside_the_region_has_torchs_bits(case: Case) -> None:
    expected = train(case, lambda: native(torch.bfloat16), backward_inside=True)
    assert_same_bits(train(case, lambda: ours(torch.bfloat16), backward_inside=True), expected)


def test_accumulation_with_a_lasting_cache_has_torchs_bits() -> None:
    """Casts kept over the micro-batches of a step are the ones torch makes again for each."""
    case, cache = BY_NAME["decoder"], WeightCache()
    expected = train(case, lambda: native(torch.bfloat16), micro_batches=4)
    assert_same_bits(train(case, lambda: ours(torch.bfloat16, cache=cache), micro_batches=4), expected)
    assert cache.info().hits > 2 * cache.info().misses
