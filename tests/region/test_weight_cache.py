"""The weight cache: what is kept, for how long, and that it is never stale. Numbers are the conformance list's.

Copies are counted by the profiler, with a low-precision input so that only the weight needs one; a dispatch mode that
counted them would keep the cache from being used.
"""

import threading

import pytest
import torch
from torch.nn import Parameter

from ampkit import WeightCache, autocast, clear_autocast_cache
from ampkit.region.weight_cache import CacheInfo
from tests.helpers.regions import BF16, FP16, REGIONS, both
from tests.helpers.weights import WRITES, X, copies, uses, weight

# What is kept


LEAVES = {
    "a float32 leaf": (weight, 1),
    "a parameter made of a view": (lambda: Parameter(torch.ones(2, 4, 4)[1]), 1),
    "a tensor that requires no grad": (lambda: torch.ones(4, 4), 3),
    "a frozen parameter": (lambda: weight(False), 3),
    "a result": (lambda: weight() * 1, 3),
    "a view of a leaf": (lambda: torch.ones(2, 4, 4)[0].requires_grad_(), 3),
}


@both
@pytest.mark.parametrize("leaf", LEAVES)
def test_casts_of_three_uses_in_a_region(region, leaf):
    make, expected = LEAVES[leaf]
    assert uses(region, make()) == expected
    assert uses(region, make(), cache_enabled=False) == 3


def test_frozen_parameters_are_cast_once_with_a_cache_of_ones_own():
    """Without one, no cast is kept that torch.amp makes again: it is right after any write."""
    cache = WeightCache()
    assert uses(autocast, weight(), cache_enabled=False, cache=cache) == 3
    assert cache.info() == CacheInfo(0, 0, 0, 0)
    assert uses(autocast, weight(False), cache=cache) == 1
    assert uses(autocast, torch.ones(4, 4), cache=cache) == 3


@both
def test_what_ends_a_cast_amid_a_region(region):
    """A region without a cache inside makes its own, leaving an inner one ends nothing, clearing ends all."""
    clear = torch.clear_autocast_cache if region is torch.autocast else clear_autocast_cache

    def run(leaf, inside):
        with region("cpu"):
            for _ in range(2):
                torch.mm(X, leaf)
                inside(leaf)

    def inner(leaf, **options):
        with region("cpu", **options):
            torch.mm(X, leaf)

    leaf = weight()
    assert copies(lambda: run(leaf, lambda leaf: inner(leaf, cache_enabled=False))) == 3
    assert copies(lambda: run(leaf, inner)) == 1
    assert copies(lambda: run(leaf, lambda _: clear())) == 2
    clear()


def test_inference_mode():
    """Nothing is kept there; a user-provided cache is used for it too, and gradients after it still flow."""
    leaf = weight()

    def run(region, **kwargs):
        with region("cpu", **kwargs):
            with torch.no_grad():
                torch.mm(X, leaf)
            with torch.inference_mode():
                torch.mm(X, leaf)
                torch.mm(X, leaf)

    assert copies(lambda: run(torch.autocast)) == 3
    assert copies(lambda: run(autocast)) == 3
    assert copies(lambda: run(autocast, cache=WeightCache())) == 1

    x = X.clone().requires_grad_()      # so that the cast is saved for backward, which an inference tensor cannot be
    for inside in (True, False):
        leaf = weight()
        with torch.inference_mode(inside), autocast("cpu", cache=WeightCache()), torch.inference_mode():
            torch.mm(X, leaf)
            with torch.inference_mode(False):
                torch.mm(x, leaf).float().sum().backward()
        assert torch.equal(leaf.grad, torch.full((4, 4), 2.0))


@pytest.mark.parametrize("write", WRITES)
def test_write_inside_a_region_is_seen(write):
    """A cast made before the write is out of date. torch.amp goes on with the old cast."""
    for region, expected in ((torch.autocast, 4.0), (autocast, 8.0)):
        leaf = weight()
        with region("cpu"):
            torch.mm(X, leaf)
            kept = WRITES[write](leaf)
            assert torch.mm(X, leaf)[0, 0] == expected
        del kept


def test_data_written_in_place_needs_a_clear():
    """What nothing can see: a write through `.data` moves no counter and no address. torch.amp misses it as well."""
    for region, clear in ((torch.autocast, torch.clear_autocast_cache), (autocast, clear_autocast_cache)):
        leaf = weight()
        with region("cpu"):
            torch.mm(X, leaf)
            leaf.data.fill_(2.0)
            assert torch.mm(X, leaf)[0, 0] == 4
            clear()
            assert torch.mm(X, leaf)[0, 0] == 8


@pytest.mark.parametrize("outer", [{"device_type": "cpu", "enabled": False}, {"device_type": "cuda:0"}])
def test_outer_region_that_casts_nothing(outer):
    """torch.amp keeps the casts, stale, as long as any region at all is open, disabled ones too."""
    results = []
    for region in REGIONS:
        leaf = weight()
        with region(**outer):
            for value in (1.0, 2.0):
                leaf.detach().fill_(value)
                with region("cpu"):
                    results.append(torch.mm(X, leaf)[0, 0].item())
    assert results == [4, 4, 4, 8]


def test_regions_of_two_dtypes():
    """A weight is cast to each. torch.amp hands the inner region the outer one's cast, and the product fails."""
    leaf, x = weight(), torch.ones(2, 4)
    with torch.autocast("cpu", BF16):
        torch.mm(x, leaf)
        with torch.autocast("cpu", FP16), pytest.raises(RuntimeError, match="dtype"):
            torch.mm(x, leaf)
    with autocast("cpu", BF16):
        assert torch.mm(x, leaf).dtype is BF16
        with autocast("cpu", FP16):
            assert torch.mm(x, leaf).dtype is FP16
            with torch.autocast("cpu", BF16):
                assert torch.mm(x, leaf).dtype is BF16


def test_other_thread_has_a_cache_of_its_own():
    """With torch.amp any thread that leaves its outermost region drops the casts of all."""
    def casts(region):
        """How many casts one thread's two products use, seen through what autograd saves."""
        leaf, x, saved = weight(), X.clone().requires_grad_(), []

        def visit():
            with region("cpu"):
                torch.mm(X, leaf)

        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            with region("cpu"):
                torch.mm(x, leaf)
                thread = threading.Thread(target=visit)
                thread.start()
                thread.join()
                torch.mm(x, leaf)
        return len({t.data_ptr() for t in saved if t.shape == (4, 4)})

    assert casts(torch.autocast) == 2
    assert casts(autocast) == 1
