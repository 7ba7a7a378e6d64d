"""A region holds no more memory than torch.autocast: allocations counted through whole training steps."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ampkit
from ampkit import Policy, WeightCache
from benchmarks.workloads import Decoder
from tests.helpers.models import CASES, Case

Region = Callable[[], contextlib.AbstractContextManager[Any]]
PEAKS = ("convnet", "encoder", "decoder", "unet")


def native() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def ours() -> contextlib.AbstractContextManager[Any]:
    return ampkit.autocast("cpu", torch.bfloat16, policy=Policy.torch("cpu"))


def default() -> contextlib.AbstractContextManager[Any]:
    return ampkit.autocast("cpu", torch.bfloat16)


class Traffic:
    """Bytes that torch's CPU allocator handed out and took back, as its profiler recorded them."""

    def __init__(self) -> None:
        self.peak = 0
        self.left = 0

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Count what is allocated and freed in here; `peak` and `left` are above what was held on entry."""
        gc.collect()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profile:
            yield
            gc.collect()
        recorder: Any = profile.profiler
        events = [event for event in recorder.kineto_results.events() if event.name() == "[memory]"]
        assert events, "the profiler recorded no allocation"
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.left += event.nbytes()
            self.peak = max(self.peak, self.left)


def measure(function: Callable[[], None]) -> Traffic:
    """The traffic of one call, after a first that fills what torch keeps for good."""
    function()
    traffic = Traffic()
    with traffic.recorded():
        function()
    return traffic


def step_of(case: Case, model: nn.Module, region: Region) -> Callable[[], None]:
    """A training step that leaves nothing behind."""
    inputs, targets = case.batch()

    def step() -> None:
        with region():
            loss = case.loss(model(inputs), targets)
        loss.backward()
        model.zero_grad()

    return step


@pytest.mark.parametrize("case", [case for case in CASES if case.name in PEAKS], ids=lambda case: case.name)
def test_a_training_step_peaks_where_torchs_does(case: Case) -> None:
    """Under the default policy too, lower than in float32, where all of the model is products and attention."""
    model = case.build()
    torchs, mine = measure(step_of(case, model, native)), measure(step_of(case, model, ours))
    assert torchs.left == mine.left == 0
    assert 0 < mine.peak <= torchs.peak
    if case.name in ("encoder", "decoder"):
        mine = measure(step_of(case, model, default))
        assert mine.left == 0
        assert mine.peak <= torchs.peak < measure(step_of(case, model, contextlib.nullcontext)).peak


def test_a_lasting_cache_costs_its_casts_and_no_more() -> None:
    """Eight micro-batches with one cache, beside torch, whose casts are freed as backward passes them."""
    case = next(case for case in CASES if case.name == "decoder")
    model = Decoder(width=64, heads=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [case.batch() for _ in range(8)]

    def train(region: Region) -> None:
        for inputs, targets in batches:
            with region():
                loss = case.loss(model(inputs), targets)
            loss.backward()
            del loss
        optimizer.step()
        model.zero_grad()

    cache = WeightCache()
    mine = measure(lambda: train(lambda: ampkit.autocast("cpu", cache=cache)))
    torchs = measure(lambda: train(native))
    n_bytes = 2 * sum(p.numel() for p in model.parameters())
    assert torchs.left == 0
    assert mine.peak <= torchs.peak + n_bytes
    assert mine.left <= n_bytes         # the step has invalidated them; the next use of the cache frees them
    assert cache.info().bytes == 0
