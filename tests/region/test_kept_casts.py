"""Casts that outlive their region: what is kept, and what ends that."""

import copy
import pickle
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from ampkit import WeightCache, autocast
from ampkit.region.weight_cache import CacheInfo
from tests.helpers.regions import BF16, like_torch
from tests.helpers.weights import X, uses, weight


def test_replaced_storage_is_freed_at_once():
    """As ZeRO and offloading rely on: the values of a weight that is given away do not stay in memory."""
    leaf = weight()
    with autocast("cpu"), torch.no_grad():
        torch.mm(X, leaf)
        storage = weakref.ref(leaf.untyped_storage())
        leaf.data = torch.empty(0)
        assert storage() is None


# A cache that outlives the region


def test_each_weight_is_cast_once_per_optimizer_step():
    """Accumulation over 8 micro-batches: counted, and the gradients are those of torch.amp."""
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    batches = torch.randn(16, 2, 4, generator=torch.Generator().manual_seed(1))
    cache, theirs, ours = WeightCache(), model(), model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (theirs, ours)]
    regions = [lambda: torch.autocast("cpu"), lambda: like_torch(cache=cache)]
    for n, batch in enumerate(batches):
        for net, region in zip((theirs, ours), regions, strict=True):
            with region():
                loss = net(batch).float().pow(2).mean()
            loss.backward()
        if n % 8 == 7:
            assert cache.info() == CacheInfo(4, 2 * (32 + 8 + 32 + 4), 28 * (n // 8 + 1), 4 * (n // 8 + 1))
            for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert cache.info().entries == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_kept_cast_has_a_history_where_autograd_records_and_nowhere_else(mode):
    """Also where one region trains after it has evaluated. Without grad mode the history would be most of the work."""
    leaf, cache = weight(), WeightCache()
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf)
    with autocast("cpu", cache=cache):
        with mode():
            kept = cache.cast(leaf, BF16)
        again = cache.cast(leaf, BF16)
        torch.mm(X, leaf).sum().backward()
    assert cache.info().misses == 1
    assert kept.grad_fn is None
    assert again.grad_fn is not None
    assert again.data_ptr() == kept.data_ptr()
    assert torch.equal(leaf.grad, torch.full((4, 4), 2.0))


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_a_cache_in_nested_regions(which):
    """The outer one's serves inside; after an inner one with a cache of its own, the outer has it no longer."""
    leaf, cache = weight(), WeightCache()
    with autocast("cpu", cache=cache if which == "outer" else None):
        for _ in range(2):
            with autocast("cpu", cache=cache if which == "inner" else None):
                torch.mm(X, leaf)
        torch.mm(X, other := weight())
    assert other.grad is None
    assert cache.info() == (CacheInfo(2, 64, 1, 2) if which == "outer" else CacheInfo(1, 32, 1, 1))


def kept_across(leaf) -> bool:
    """Whether the cast of a weight made in one region is used in the next."""
    cache = WeightCache()
    for _ in range(2):
        with autocast("cpu", cache=cache):
            torch.mm(X, leaf)
    return cache.info().hits == 1


def test_weights_whose_memory_others_have_are_cast_anew_in_each_region():
    """Whoever shares it can write without a version counter knowing."""
    assert kept_across(weight())
    assert kept_across(weight(False))
    for leaf in (weight(), weight(False)):
        alias = leaf.detach()
        assert not kept_across(leaf)
        assert uses(autocast, leaf, cache=(cache := WeightCache())) == (1 if leaf.requires_grad else 3)
        assert cache.info().entries == 0        # an engine's unsharded weights would otherwise stay until the next
        del alias
        assert kept_across(leaf)
    whole = torch.ones(2, 4, 4)
    assert not kept_across(Parameter(whole[1]))
    assert not kept_across(Parameter(torch.from_numpy(np.ones((4, 4), np.float32))))
    assert not kept_across(nn.ParameterList([weight()]).share_memory()[0])

    class Sub(torch.Tensor):
        pass

    assert not kept_across(Parameter(torch.ones(4, 4).as_subclass(Sub)))


def test_any_collective_ends_keeping():
    """None of them moves a version, and each may have written to any weight."""
    leaf, cache = weight(), WeightCache()

    def hits() -> int:
        with autocast("cpu", cache=cache):
            torch.mm(X, leaf)
        return cache.info().hits

    assert [hits(), hits()] == [0, 1]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert [hits(), hits()] == [1, 2]
        dist.all_reduce(torch.ones(1))
        assert [hits(), hits()] == [2, 3]
        group = dist.new_group([0])
        assert [hits(), hits()] == [3, 4]
        dist.barrier(group)
        assert [hits(), hits()] == [4, 5]
    finally:
        dist.destroy_process_group()
    assert [hits(), hits()] == [5, 6]


def test_a_cache_says_what_it_holds_and_its_copies_start_empty():
    cache, leaf = WeightCache(), weight()
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf)
    assert repr(cache) == "WeightCache(): CacheInfo(entries=1, bytes=32, hits=0, misses=1)"
    for other in (copy.deepcopy(cache), copy.copy(cache), pickle.loads(pickle.dumps(cache))):
        assert other.info() == CacheInfo(0, 0, 0, 0)
    cache.clear()
    assert cache.info() == CacheInfo(0, 0, 0, 1)
