"""A region holds no more memory than torch.autocast: allocations counted through whole training steps."""

import contextlib
import gc
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ampkit import Policy, Rule, autocast
from benchmarks.workloads import Decoder, DecoderBlock
from tests.helpers.models import CASES
from tests.helpers.regions import like_torch as ours
from tests.helpers.training import Region, native

DECODER = CASES["decoder"]


def saved_megabytes(model: nn.Module, x: torch.Tensor, norms: Rule) -> float:
    """Memory that a forward under a rule for layer norms saves for backward, without the weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    policy = Policy.default("cpu").with_rules({"aten::layer_norm": norms})
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast("cpu", policy=policy):
        y = model(x)
    del y
    return sum(storage.nbytes() for address, storage in saved.items() if address not in weights) / 1e6


class Traffic(NamedTuple):
    """Bytes above what was held before, as torch's profiler recorded the CPU's allocator."""

    peak: int
    left: int


def measure(function: Callable[[], None]) -> Traffic:
    """The traffic of one call, after a first that fills what torch keeps for good."""
    function()
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        function()
        gc.collect()
    recorder: Any = profile.profiler
    events = [event for event in recorder.kineto_results.events() if event.name() == "[memory]"]
    assert events, "the profiler recorded no allocation"
    held = list(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    return Traffic(max(0, *held), held[-1])


def step_of(model: nn.Module, region: Region) -> Callable[[], None]:
    """A training step that leaves nothing behind."""
    inputs, targets = DECODER.batch()

    def step() -> None:
        with region():
            loss = DECODER.loss(model(inputs), targets)
        loss.backward()
        model.zero_grad()

    return step


def test_a_training_step_peaks_where_torchs_does() -> None:
    """Under the default policy too, lower than in float32, where all of the model is products and attention."""
    model = DECODER.build()
    torchs, mine = measure(step_of(model, native)), measure(step_of(model, ours))
    default = measure(step_of(model, lambda: autocast("cpu")))
    assert torchs.left == mine.left == default.left == 0
    assert 0 < mine.peak <= torchs.peak
    assert default.peak <= torchs.peak < measure(step_of(model, contextlib.nullcontext)).peak


def test_a_lasting_cache_costs_its_casts_and_no_more() -> None:
    """Three micro-batches with one cache, beside torch, whose casts are freed as backward passes them."""
    model = Decoder(width=64, heads=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [DECODER.batch() for _ in range(3)]

    def train(region: Region) -> None:
        for inputs, targets in batches:
            with region():
                loss = DECODER.loss(model(inputs), targets)
            loss.backward()
            del loss
        optimizer.step()
        model.zero_grad()

    mine = measure(autocast("cpu", enabled=False)(lambda: train(lambda: autocast("cpu"))))
    torchs = measure(lambda: train(native))
    n_bytes = 2 * sum(p.numel() for p in model.parameters())
    assert torchs.left == 0
    assert mine.peak <= torchs.peak + n_bytes
    assert mine.left == 0


def test_norms_in_16_bits_save_less_for_backward() -> None:
    """The figures of docs/policy.md; not if the activations are float32, as after an embedding."""
    blocks = [DecoderBlock(256, 4) for _ in range(4)]
    x = torch.randn(8, 128, 256)
    rules = (Rule.FLOAT32, Rule.KEEP, Rule.LOWER)
    model = nn.Sequential(nn.Linear(256, 256), *blocks)
    assert [round(saved_megabytes(model, x, rule), 1) for rule in rules] == [44.7, 40.5, 40.5]
    kept = saved_megabytes(nn.Sequential(*blocks), x, Rule.KEEP)
    assert kept == saved_megabytes(nn.Sequential(*blocks), x, Rule.FLOAT32)
