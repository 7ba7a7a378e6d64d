"""The README's comparison with torch.amp, line by line: each probe is put to both, and both answers are compared.

Differences that only docs/differences.md names are here too. When torch starts to answer as ampkit does, a test fails
and the line goes.
"""

import asyncio
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampkit.policy.policy import Policy, Rule
from ampkit.region.autocast import autocast
from ampkit.region.weight_cache import WeightCache
from ampkit.scaler.grad_scaler import GradScaler

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Region = Callable[..., AbstractContextManager]


def native(**options: Any) -> Any:
    """torch.amp's region."""
    return torch.autocast("cpu", BF16, **options)


def ours(**options: Any) -> Any:
    """ampkit's region."""
    return autocast("cpu", BF16, **options)


@pytest.fixture(autouse=True)
def _native_flag_restored() -> Iterator[None]:
    """The entry about re-entering shows that torch leaves its flag on."""
    yield
    torch.set_autocast_enabled("cpu", False)
    torch.clear_autocast_cache()


@pytest.fixture
def linear() -> nn.Linear:
    """A layer with float32 weights; without a bias, its only copies are casts."""
    return nn.Linear(4, 4, bias=False)


X = torch.ones(2, 4)


def casts_made(run: Callable[[], object]) -> int:
    """How many tensors were copied while `run` ran, by whoever."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        run()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")


def test_softmax_and_norms_on_a_cpu() -> None:
    """torch computes them in the dtype of their input, ampkit in float32."""
    x = torch.ones(2, 4, dtype=BF16)

    def dtypes(region: Region) -> set[torch.dtype]:
        with region():
            return {torch.softmax(x, -1).dtype, F.layer_norm(x, (4,)).dtype}

    assert (dtypes(native), dtypes(ours)) == ({BF16}, {FP32})


def test_a_weight_changed_inside_an_open_region(linear: nn.Linear) -> None:
    """torch goes on with the old cast, ampkit casts again."""

    def notices(region: Region) -> bool:
        with region():
            before = linear(X)
            with torch.no_grad():
                linear.weight.mul_(2)
            return not torch.equal(before, linear(X))

    assert (notices(native), notices(ours)) == (False, True)


def test_frozen_weights(linear: nn.Linear) -> None:
    """Used twice: torch casts twice, ampkit as well, or once with a cache."""
    linear.requires_grad_(False)
    x, cache = X.to(BF16), WeightCache()

    def casts(region: Region) -> int:
        with region():
            return casts_made(lambda: (linear(x), linear(x)))

    assert (casts(native), casts(ours), casts(lambda: ours(cache=cache))) == (2, 2, 1)


def test_casts_across_micro_batches(linear: nn.Linear) -> None:
    """Three regions and an optimizer step: torch casts in each, ampkit once before the step and once after."""
    cache, x = WeightCache(), X.to(BF16)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)

    def casts(region: Region, **options: Any) -> int:
        def run() -> None:
            for _ in range(3):
                with region(**options):
                    linear(x)

        return casts_made(run)

    assert (casts(native), casts(ours, cache=cache)) == (3, 1)
    optimizer.step()
    assert casts(ours, cache=cache) == 1


def test_one_region_object_entered_twice(linear: nn.Linear) -> None:
    """Afterwards autocast is still on with torch; ampkit restores everything."""

    def dtype_afterwards(region: Region) -> torch.dtype:
        again = region()
        with again, again:
            pass
        return linear(X).dtype

    assert dtype_afterwards(ours) is FP32
    assert dtype_afterwards(native) is BF16


def test_decorated_generators_and_coroutines(linear: nn.Linear) -> None:
    """Their bodies run outside torch's region and inside ampkit's."""

    def dtypes(region: Region) -> list[torch.dtype]:
        @region()
        def generator() -> Iterator[torch.dtype]:
            yield linear(X).dtype

        @region()
        async def coroutine() -> torch.dtype:
            return linear(X).dtype

        return [*generator(), asyncio.run(coroutine())]

    assert (dtypes(native), dtypes(ours)) == ([FP32, FP32], [BF16, BF16])


def test_float16_beside_bfloat16() -> None:
    """A promoting operator raises in torch and gives float32 in ampkit."""
    both = [torch.ones(2, dtype=FP16), torch.ones(2, dtype=BF16)]
    with native(), pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
        torch.cat(both)
    with ours():
        assert torch.cat(both).dtype is FP32


def test_rules_can_be_read_and_changed(linear: nn.Linear) -> None:
    """One operator, one module; with torch neither."""
    policy = Policy.default("cpu").with_rules({"aten::linear": Rule.FLOAT32})
    assert policy.explain("aten::linear").layer == "with_rules[0]"
    with autocast("cpu", BF16, policy=policy):
        assert linear(X).dtype is FP32
    with autocast("cpu", BF16, policy=Policy.default("cpu").for_modules(linear, {nn.Linear: FP32})):
        assert linear(X).dtype is FP32


def test_whether_the_step_was_skipped(linear: nn.Linear) -> None:
    """torch's scaler has no answer but its scale; ampkit's says it on the device, and names the parameter."""
    scaler = GradScaler("cpu")
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    scaler.scale(linear(X).sum() * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.found_inf(optimizer).item() is True
    assert scaler.stats().skips == 1
    assert "weight" in str(scaler.overflow_report(linear))
    assert not hasattr(torch.amp.GradScaler, "skipped")


def test_an_optimizer_without_gradients(linear: nn.Linear) -> None:
    """An assertion in torch, a count in ampkit."""
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    theirs, scaler = torch.amp.GradScaler("cpu"), GradScaler("cpu")
    theirs.scale(torch.ones((), requires_grad=True))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        theirs.step(optimizer)
    scaler.scale(torch.ones((), requires_grad=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.step(optimizer)
        scaler.update()
    assert scaler.stats().no_gradients == 1
