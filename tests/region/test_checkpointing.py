"""Activation checkpointing in a region: the recompute does what the forward did. Numbers are the conformance list's."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from ampkit import Policy, WeightCache, autocast
from tests.helpers.regions import FP16, like_torch, state


@pytest.fixture(autouse=True)
def _whole_recomputes():
    """torch ends a recompute once it has what backward needs; here the whole body is to be seen."""
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        yield


KEEPS_MM = Policy.default("cpu").with_rules({"aten::linear": "float32", "aten::softmax.int": "keep"})


def plain(use_reentrant):
    return lambda function, *args: torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant)


WAYS = {"not reentrant": plain(False), "reentrant": plain(True)}


class Net(nn.Module):
    """Two layers with operators that the policies treat differently; notes the dtypes of each run."""

    def __init__(self, seen):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen = seen

    def body(self, x):
        hidden = self.first(x)
        probabilities = torch.softmax(hidden, -1)
        out = self.second(probabilities.exp())
        self.seen.append((hidden.dtype, probabilities.dtype, out.dtype, torch.is_autocast_enabled("cpu"),
                          torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()))
        return out

    def forward(self, x, way=None):
        return self.body(x) if way is None else way(self.body, x)


def run(way, region, backward=None):
    """Gradients with a checkpoint, and what each run of the body saw."""
    seen = []
    net, x = Net(seen), torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with region:
        loss = net(x, way).float().pow(2).sum()
    if backward is None:
        loss.backward()
    else:
        with backward:
            loss.backward()
    return [x.grad, *(p.grad for p in net.parameters())], seen


REGIONS = {
    "default": lambda: autocast("cpu"),
    "like torch": like_torch,
    "float16": lambda: autocast("cpu", FP16),
    "policy": lambda: autocast("cpu", policy=KEEPS_MM),
    "no cache": lambda: autocast("cpu", cache_enabled=False),
    "explicit cache": lambda: autocast("cpu", cache=WeightCache()),
    "disabled": lambda: autocast("cpu", enabled=False),
}


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("way", WAYS)
def test_recompute_sees_what_the_forward_saw(way, name):
    """Enabled, dtype and cache flag are those of the forward."""
    before = state()
    expected, once = run(None, REGIONS[name]())
    gradients, seen = run(WAYS[way], REGIONS[name]())
    assert seen == once * 2
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))
    assert state() == before


@pytest.mark.parametrize("way", WAYS)
def test_backward_in_another_region(way):
    """The recompute follows the forward's region, not the one backward is called in."""
    others = {"policy": KEEPS_MM}
    for forward, backward in (
        (lambda: autocast("cpu"), lambda: autocast("cpu", enabled=False)),
        (lambda: autocast("cpu"), lambda: autocast("cpu", FP16, **others)),
        (lambda: autocast("cpu", policy=KEEPS_MM), lambda: autocast("cpu", cache_enabled=False)),
        (lambda: autocast("cpu", enabled=False), lambda: autocast("cpu")),
        (contextlib.nullcontext, lambda: autocast("cpu")),
    ):
        before = state()
        _, once = run(None, forward())
        _, seen = run(WAYS[way], forward(), backward())
        assert seen == once * 2
        assert state() == before


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")     # torch's, in a reentrant forward
@pytest.mark.parametrize("outer_way", WAYS)
@pytest.mark.parametrize("inner_way", WAYS)
def test_nested_checkpoints(outer_way, inner_way):
    """Each is recomputed in the region that it was called in, also where nothing runs between the two calls."""
    x, seen = torch.randn(4, 4, requires_grad=True), []

    def inner(x):
        out = torch.softmax(F.linear(torch.mm(x, x), x), -1)
        seen.append((out.dtype, torch.mm(x, x).dtype))
        return out.float()

    def alone(x):
        return WAYS[inner_way](inner, x)

    def in_a_region(x):
        with autocast("cpu", FP16, policy="default"):
            return WAYS[inner_way](inner, x)

    def deeper(x):
        return WAYS[outer_way](alone, x)

    for outer in (alone, in_a_region, deeper):
        gradients = []
        for way in (lambda function, x: function(x), WAYS[outer_way]):
            seen.clear()
            x.grad = None
            with autocast("cpu", policy=KEEPS_MM):
                loss = way(outer, x).square().sum()
            loss.backward()
            gradients.append(x.grad)
            assert len(set(seen)) == 1
        assert torch.equal(*gradients)


def test_selective_checkpoint():
    """torch's own selective policies push a dispatch mode; casts inside it are recorded like everything else."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def decide(ctx, op, *args, **kwargs):
        save = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def way(function, *args):
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(decide)
        )

    expected, once = run(None, autocast("cpu"))
    gradients, seen = run(way, autocast("cpu"))
    assert seen == once * 2
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))


def test_recompute_leaves_the_caches_of_open_regions_alone():
    cache = WeightCache()
    net, x = Net([]), torch.randn(4, 8, requires_grad=True)
    with autocast("cpu", cache=cache):
        loss = net(x, plain(False)).float().sum()
        misses = cache.info().misses
        loss.backward()
    assert cache.info().misses == misses
    assert cache.info().entries == misses


def test_a_recompute_that_ends_in_a_compiled_graph_leaves_nothing_open():
    """The graph opens the region of a module with a rule, and the recompute stops when it has what backward needs."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled = torch.compile(lambda x: model(x), backend="eager")
    policy = Policy.default("cpu").for_modules(model, {"1": torch.float32})
    before = state()
    with torch.utils.checkpoint.set_checkpoint_early_stop(True), autocast("cpu", policy=policy):
        loss = plain(False)(compiled, torch.ones(2, 4, requires_grad=True)).sum()
    loss.backward()
    assert state() == before
    for _ in range(2):
        with autocast("cpu"):
            pass
    assert state() == before
    torch._dynamo.reset()
