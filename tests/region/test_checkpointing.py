"""Activation checkpointing in a region: the recompute does what the forward did. Numbers are the conformance list's."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from ampkit import Policy, autocast
from ampkit.region.stack import thread
from tests.helpers.regions import FP16, like_torch, state


@pytest.fixture(autouse=True)
def _whole_recomputes():
    """torch ends a recompute once it has what backward needs; here the whole body is to be seen."""
    with set_checkpoint_early_stop(False):
        yield


KEEPS_MM = Policy.default("cpu").with_rules({"aten::linear": "float32", "aten::softmax.int": "keep"})


def checkpointed(use_reentrant, **options):
    return lambda function, *args: checkpoint(function, *args, use_reentrant=use_reentrant, **options)


SAVED = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
WAYS = {
    "not reentrant": checkpointed(False),
    "reentrant": checkpointed(True),
    # torch's own pushes a dispatch mode; casts inside it are recorded like everything else.
    "selective": checkpointed(False, context_fn=functools.partial(create_selective_checkpoint_contexts, SAVED)),
}


class Net(nn.Module):
    """Two layers with operators that the policies treat differently; notes the dtypes of each run."""

    def __init__(self, seen):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.seen = seen

    def forward(self, x):
        hidden = self.first(x)
        probabilities = torch.softmax(hidden, -1)
        out = self.second(probabilities.exp())
        self.seen.append(
            (
                hidden.dtype,
                probabilities.dtype,
                out.dtype,
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.is_autocast_cache_enabled(),
            )
        )
        return out


def run(way, region, backward):
    """Gradients with a checkpoint or without, and what each run of the net saw."""
    seen = []
    net, x = Net(seen), torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with region:
        loss = (net(x) if way is None else way(net, x)).float().pow(2).sum()
    with backward:
        loss.backward()
    return [x.grad, *(p.grad for p in net.parameters())], seen


REGIONS = {  # of the forward, and of backward
    "default": (lambda: autocast("cpu"), contextlib.nullcontext),
    "like torch": (like_torch, contextlib.nullcontext),
    "float16": (lambda: autocast("cpu", FP16), contextlib.nullcontext),
    "policy": (lambda: autocast("cpu", policy=KEEPS_MM), contextlib.nullcontext),
    "no cache": (lambda: autocast("cpu", cache_enabled=False), contextlib.nullcontext),
    "disabled": (lambda: autocast("cpu", enabled=False), contextlib.nullcontext),
    "backward in a disabled one": (lambda: autocast("cpu"), lambda: autocast("cpu", enabled=False)),
    "backward under a policy": (lambda: autocast("cpu"), lambda: autocast("cpu", FP16, policy=KEEPS_MM)),
    "backward without the policy": (
        lambda: autocast("cpu", policy=KEEPS_MM),
        lambda: autocast("cpu", cache_enabled=False),
    ),
    "only backward enabled": (lambda: autocast("cpu", enabled=False), lambda: autocast("cpu")),
    "only backward in a region": (contextlib.nullcontext, lambda: autocast("cpu")),
}


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("way", WAYS)
def test_recompute_sees_what_the_forward_saw(way, name):
    """Enabled, dtype, policy and cache flag are those of the forward, wherever backward is called."""
    forward, backward = REGIONS[name]
    expected, once = run(None, forward(), backward())
    gradients, seen = run(WAYS[way], forward(), backward())
    assert seen == once * 2
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, in a reentrant forward
@pytest.mark.parametrize("outer_way", ["not reentrant", "reentrant"])
@pytest.mark.parametrize("inner_way", ["not reentrant", "reentrant"])
def test_nested_checkpoints(outer_way, inner_way):
    """Each is recomputed in the region that it was called in, also where nothing runs between the two calls."""
    x, seen = torch.randn(4, 4, requires_grad=True), []

    def inner(x):
        out = torch.softmax(F.linear(torch.mm(x, x), x), -1)
        seen.append((out.dtype, torch.mm(x, x).dtype))
        return out.float()

    alone = functools.partial(WAYS[inner_way], inner)
    in_a_region = autocast("cpu", FP16, policy="default")(alone)
    for outer in (alone, in_a_region, functools.partial(WAYS[outer_way], alone)):
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


def test_recompute_leaves_the_caches_of_open_regions_alone():
    net, x = Net([]), torch.randn(4, 8, requires_grad=True)
    with autocast("cpu"):
        loss = checkpointed(False)(net, x).float().sum()
        casts = [dict(casts) for casts in thread.cache._casts.values()]
        loss.backward()
        assert casts == list(thread.cache._casts.values()) != [{}]


def test_a_recompute_that_ends_in_a_compiled_graph_leaves_nothing_open():
    """The graph opens the region of a module with a rule, and the recompute stops when it has what backward needs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled = torch.compile(lambda x: model(x), backend="eager")
    policy = Policy.default("cpu").for_modules(model, {"1": torch.float32})
    before = state()
    with set_checkpoint_early_stop(True), autocast("cpu", policy=policy):
        loss = checkpointed(False)(compiled, torch.ones(2, 4, requires_grad=True)).sum()
    loss.backward()
    assert state() == before
    for _ in range(2):
        with autocast("cpu"):
            pass
