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


def test_the_meter_reads_what_it_should() -> None:
    """A tensor that lives, one that dies, and two at once."""
    kept = []
    traffic = Traffic()
    with traffic.recorded():
        kept.append(torch.empty(1000, dtype=torch.float32))
        temporary = torch.empty(3000, dtype=torch.float32)
        del temporary
        again = torch.empty(500, dtype=torch.float32)
        del again
    assert (traffic.peak, traffic.left) == (16000, 4000)


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


def generation(model: nn.Module, region: Region, mode: Callable[[], Any]) -> Callable[[], None]:
    """Three passes in one region without gradients."""
    ids = torch.randint(32, (2, 12))

    def generate() -> None:
        with region(), mode():
            for _ in range(3):
                model(ids)

    return generate


def test_inference_and_frozen_weights_are_cached_on_request() -> None:
    """There torch casts at every use and keeps nothing; so does a region, unless it is given a `WeightCache`.

    That costs the bytes of the casts.
    """
    model = Decoder(width=64, heads=4)
    n_bytes = 2 * sum(p.numel() for p in model.parameters())
    for mode, frozen in ((torch.inference_mode, False), (torch.no_grad, False), (torch.no_grad, True)):
        model.requires_grad_(not frozen)
        torchs = measure(generation(model, native, mode)).peak
        assert measure(generation(model, ours, mode)).peak <= torchs
        cache = WeightCache()
        peak = measure(generation(model, lambda cache=cache: ampkit.autocast("cpu", cache=cache), mode)).peak
        assert peak <= torchs + n_bytes
        assert 0 < cache.info().bytes <= n_bytes


def test_casts_die_with_the_region() -> None:
    model, ids = Decoder(width=64, heads=4), torch.randint(32, (2, 12))
    traffic = Traffic()
    with traffic.recorded(), default(), torch.no_grad():
        model(ids)
    assert traffic.left == 0


def test_lasting_casts_die_with_their_model() -> None:
    model, ids = Decoder(width=64, heads=4), torch.randint(32, (2, 12))
    cache, traffic = WeightCache(), Traffic()
    with traffic.recorded(), ampkit.autocast("cpu", cache=cache):
        model(ids).float().sum().backward()
    held = cache.info().bytes
    assert 0 < held < traffic.left
    model.zero_grad()
    traffic = Traffic()
    with traffic.recorded():
        del model
    assert traffic.left <= -held, "the casts outlived the weights they were made from"
    assert cache.info().bytes == 0


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
