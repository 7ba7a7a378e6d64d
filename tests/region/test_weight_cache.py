"""The weight cache: what is kept, for how long, and that it is never stale. Numbers are the conformance list's.

Copies are counted by the profiler, with a low-precision input so that only the weight needs one; a dispatch mode that
counted them would keep the cache from being used.
"""

import copy
import gc
import os
import pickle
import signal
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import CacheInfo, Policy, WeightCache, autocast, clear_autocast_cache
from ampkit.region import optimizer_steps, weight_cache
from ampkit.region.thread_state import thread
from tests.helpers.regions import BF16, FP16, FP32, like_torch

REGIONS = [torch.autocast, autocast]
both = pytest.mark.parametrize("region", REGIONS, ids=["torch", "ampkit"])
X = torch.ones(2, 4, dtype=BF16)


def weight(requires_grad: bool = True) -> Parameter:
    return Parameter(torch.ones(4, 4), requires_grad)


def copies(call) -> int:
    """How many copies a call makes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        call()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")


def uses(region, leaf, times: int = 3, **kwargs) -> int:
    """How many copies it takes to use a leaf so often in one region."""
    def run():
        with region("cpu", **kwargs):
            for _ in range(times):
                torch.mm(X, leaf)

    return copies(run)


# What is kept


@both
def test_one_cast_per_region(region):
    """However often a float32 leaf is used."""
    assert uses(region, weight()) == 1


@both
def test_what_gets_a_cast_per_use(region):
    """Tensors that require no grad, non-leaves and views of leaves."""
    plain = torch.ones(4, 4)
    assert uses(region, plain) == 3
    assert uses(region, weight() * 1) == 3
    assert uses(region, torch.ones(2, 4, 4)[0].requires_grad_()) == 3
    assert uses(region, weight(False)) == 3


def test_frozen_parameters_are_cast_once_with_a_cache_of_ones_own():
    """Without one, no cast is kept that torch.amp makes anew: it is right after any write."""
    assert uses(autocast, weight(False), cache=WeightCache()) == 1
    assert uses(autocast, torch.ones(4, 4), cache=WeightCache()) == 3


@both
def test_parameter_made_of_a_view(region):
    """A parameter is a leaf whatever it was made of."""
    assert uses(region, Parameter(torch.ones(2, 4, 4)[1])) == 1


@both
def test_cache_switched_off(region):
    """A cast per use."""
    assert uses(region, weight(), cache_enabled=False) == 3


def test_cache_switched_off_leaves_an_explicit_cache_alone():
    cache = WeightCache()
    assert uses(autocast, weight(), cache_enabled=False, cache=cache) == 3
    assert cache.info() == CacheInfo(0, 0, 0, 0)


@both
def test_cache_switched_off_inside(region):
    leaf = weight()

    def run():
        with region("cpu"):
            torch.mm(X, leaf)
            with region("cpu", cache_enabled=False):
                torch.mm(X, leaf)
                torch.mm(X, leaf)
            torch.mm(X, leaf)

    assert copies(run) == 3


@both
def test_casts_to_float32_are_not_kept(region):
    """Only low-precision casts of weights are."""
    half = Parameter(torch.ones(4, dtype=BF16))

    def run(times):
        with region("cpu"):
            for _ in range(times):
                F.mse_loss(half, half)

    once = copies(lambda: run(1))
    assert once >= 2
    assert copies(lambda: run(3)) == 3 * once


@both
def test_no_grad_first_and_gradients_after(region):
    """One cast for both, and gradients flow."""
    leaf = weight()

    def run():
        with region("cpu"):
            with torch.no_grad():
                torch.mm(X, leaf)
            torch.mm(X, leaf).float().sum().backward()

    assert copies(run) == copies(lambda: torch.mm(X, leaf.to(BF16)).float().sum().backward())
    assert leaf.grad is not None


def test_inference_mode():
    """Nothing is kept there; a cache of one's own serves it too, and gradients after it still flow."""
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


def test_write_to_a_tensor_made_in_inference_mode_is_seen():
    """Such a tensor has no version counter, so its casts are not kept."""
    with torch.inference_mode(), autocast("cpu"):
        leaf = weight()
        torch.mm(X, leaf)
        leaf.mul_(2)
        assert torch.mm(X, leaf)[0, 0] == 8


@both
def test_leaving_an_inner_region_keeps_the_casts(region):
    """Only leaving the outermost one drops them."""
    leaf = weight()

    def run():
        with region("cpu"):
            for _ in range(2):
                with region("cpu"):
                    torch.mm(X, leaf)
                torch.mm(X, leaf)

    assert copies(run) == 1
    assert copies(run) == 1, "and the outermost dropped them"


@both
@pytest.mark.parametrize("write", ["in place", "data", "optimizer", "load_state_dict"])
def test_next_region_sees_the_new_weight(region, write):
    """Nothing outlives the outermost region."""
    layer = nn.Linear(4, 4, bias=False)
    for value in (1.0, 2.0):
        with torch.no_grad():
            if write == "in place":
                layer.weight.fill_(value)
            elif write == "data":
                layer.weight.data = torch.full((4, 4), value)
            elif write == "load_state_dict":
                layer.load_state_dict({"weight": torch.full((4, 4), value)})
            else:
                layer.weight.data.fill_(value + 1)
                layer.weight.grad = torch.ones(4, 4)
                torch.optim.SGD(layer.parameters(), lr=1.0).step()
        with region("cpu"):
            assert layer(X)[0, 0] == 4 * value


# Never stale


WRITES = {
    "in place": lambda p: p.detach().fill_(2.0),
    "no_grad": lambda p: torch.no_grad()(lambda: p.fill_(2.0))(),
    "inference_mode": lambda p: torch.inference_mode()(lambda: p.fill_(2.0))(),
    "copy_": lambda p: torch.no_grad()(lambda: p.copy_(torch.full((4, 4), 2.0)))(),
    "data =": lambda p: setattr(p, "data", torch.full((4, 4), 2.0)),
    "set_": lambda p: torch.no_grad()(lambda: p.set_(torch.full((4, 4), 2.0)))(),
    "through a view": lambda p: p.detach().view(-1)[:].fill_(2.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_write_inside_a_region_is_seen(write):
    """A cast made before the write is out of date. torch.amp goes on with the old cast."""
    for region, expected in ((torch.autocast, 4.0), (autocast, 8.0)):
        leaf = weight()
        with region("cpu"):
            torch.mm(X, leaf)
            WRITES[write](leaf)
            assert torch.mm(X, leaf)[0, 0] == expected


class WritesThroughData(torch.optim.Optimizer):
    """As many optimizers outside torch do it: no version counter moves, no address changes."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad)


OPTIMIZERS = {
    "through .data": WritesThroughData,
    "SGD": lambda p: torch.optim.SGD(p, lr=1.0),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=1.0, fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=1.0, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1.0, fused=True, weight_decay=0.0),
    "Adam": lambda p: torch.optim.Adam(p, lr=1.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("cache", ["region", "explicit"])
def test_optimizer_step_inside_a_region_is_seen(name, cache):
    """A cast made before the write is out of date. The hook on `step` sees also what moves no version counter."""
    leaf = weight()
    leaf.grad = -torch.ones(4, 4)
    optimizer = OPTIMIZERS[name]([leaf])
    with autocast("cpu", cache=WeightCache() if cache == "explicit" else None):
        torch.mm(X, leaf)
        optimizer.step()
        assert torch.mm(X, leaf)[0, 0] == 8


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


def test_kept_casts_need_a_clear_before_and_after_what_nothing_can_see():
    """As its docstring says: writes through `.data` between regions, and swapped parameters."""
    cache, layer = WeightCache(), nn.Linear(4, 4, bias=False)
    with autocast("cpu", cache=cache):
        before = layer(X)
    layer.weight.data.zero_()
    with autocast("cpu", cache=cache):
        assert torch.equal(layer(X), before)
        cache.clear()
        assert layer(X).count_nonzero() == 0
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match="Couldn't swap"):
            layer.double()
        cache.clear()
        assert layer.double().weight.dtype is torch.float64
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


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


def test_casts_that_torch_made_inside_do_not_outlive_our_region():
    """A library's torch.autocast in an island casts by torch's own cache, which only the outermost region clears."""
    leaf = weight()
    with autocast("cpu", enabled=False), torch.autocast("cpu"):
        torch.mm(X, leaf)
    leaf.detach().fill_(2.0)
    with torch.autocast("cpu"):
        assert torch.mm(X, leaf)[0, 0] == 8


def test_optimizer_step_frees_what_it_outdates():
    leaf, cache = weight(), WeightCache()
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf)
    leaf.grad = torch.zeros(4, 4)
    (entry,) = cache._entries.values()
    cast = weakref.ref(entry.cast)
    del entry
    torch.optim.SGD([leaf]).step()
    assert not cache._entries
    assert cast() is None


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


def test_two_losses_share_a_cast():
    """And their separate backwards accumulate."""
    gradients = []
    for region in (torch.autocast("cpu"), like_torch()):
        leaf = weight()
        with region:
            first, second = torch.mm(X, leaf).float().sum(), torch.mm(X, leaf).float().pow(2).sum()
        first.backward()
        alone = leaf.grad.clone()
        second.backward()
        gradients.append((alone, leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@both
def test_use_in_a_custom_function_does_not_poison_later_use(region):
    """A weight first used in a forward without grad mode still gets its gradient afterwards."""
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            return torch.mm(x, w)

        @staticmethod
        def backward(ctx, gradient):
            return None, gradient.new_zeros(4, 4).float()

    leaf = weight()
    with region("cpu"):
        Function.apply(X, leaf)
        torch.mm(X, leaf).float().sum().backward()
    assert torch.equal(leaf.grad, torch.full((4, 4), 2.0))


@both
def test_cleared_in_the_middle(region):
    """Weights are cast anew from there on."""
    clear = torch.clear_autocast_cache if region is torch.autocast else clear_autocast_cache
    leaf = weight()

    def run():
        with region("cpu"):
            torch.mm(X, leaf)
            clear()
            torch.mm(X, leaf)
            torch.mm(X, leaf)

    assert copies(run) == 2
    clear()


def test_weight_frozen_or_unfrozen_inside_a_region():
    for first in (True, False):
        leaf = weight(first)
        with autocast("cpu"):
            torch.mm(X, leaf)
            leaf.requires_grad_(not first)
            result = torch.mm(X, leaf)
        assert result.requires_grad is not first
        if result.requires_grad:
            result.float().sum().backward()
            assert leaf.grad is not None


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_address_that_comes_back_is_not_taken_for_the_weight(explicit, frozen):
    """The second storage mostly lies where the first was. torch.amp goes on with the old cast of a trained weight."""
    for _ in range(20):
        leaf, cache = Parameter(torch.ones(64, 64), not frozen), WeightCache() if explicit else None
        x = torch.ones(2, 64, dtype=BF16)
        with autocast("cpu", cache=cache):
            torch.mm(x, leaf)
            leaf.data = leaf.data * 2
            leaf.data = leaf.data * 2
            assert torch.mm(x, leaf)[0, 0] == 256
            layer = nn.Linear(64, 64, bias=False).requires_grad_(not frozen)
            layer(x)
            layer.half()
            layer.weight.data.zero_()
            layer.float()
            assert layer(x).count_nonzero() == 0


@pytest.mark.parametrize("explicit", [False, True])
def test_replaced_storage_is_freed_at_once_and_its_cast_with_it(explicit):
    """As ZeRO and offloading rely on: neither the values nor the cast of a weight that is given away stay in memory."""
    leaf, cache = weight(), WeightCache() if explicit else None
    with autocast("cpu", cache=cache), torch.no_grad():
        torch.mm(X, leaf)
        held = cache if explicit else thread.cache
        storage = weakref.ref(leaf.untyped_storage())
        assert len(held._entries) == 1
        leaf.data = torch.empty(0)
        assert storage() is None
        assert not held._entries
        assert held._bytes == 0


def test_interrupted_step_outdates_casts():
    """What it has written till then has moved no version, and its post hook never runs."""
    class Interrupted(WritesThroughData):
        def step(self, closure=None):
            leaf.data.fill_(2)
            raise KeyboardInterrupt

    leaf = weight()
    leaf.grad = -torch.ones(4, 4)
    with autocast("cpu"):
        torch.mm(X, leaf)
        with pytest.raises(KeyboardInterrupt):
            Interrupted([leaf]).step()
        assert torch.mm(X, leaf)[0, 0] == 8


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


def test_gradients_flow_through_a_kept_cast():
    leaf, cache = weight(), WeightCache()
    for n in range(1, 4):
        with autocast("cpu", cache=cache):
            torch.mm(X, leaf).float().sum().backward()
        assert torch.equal(leaf.grad, torch.full((4, 4), 2.0 * n))
    assert cache.info() == CacheInfo(1, 32, 2, 1)


def test_kept_casts_of_two_dtypes():
    leaf, cache = weight(), WeightCache()
    for _ in range(2):
        for dtype in (BF16, FP16):
            with autocast("cpu", dtype, cache=cache):
                assert torch.mm(torch.ones(2, 4), leaf).dtype is dtype
    assert cache.info() == CacheInfo(2, 64, 2, 2)


def test_kept_cast_sees_every_write():
    for write in WRITES.values():
        leaf, cache = weight(), WeightCache()
        with autocast("cpu", cache=cache):
            torch.mm(X, leaf)
        write(leaf)
        with autocast("cpu", cache=cache):
            assert torch.mm(X, leaf)[0, 0] == 8


def test_inner_region_uses_the_outer_cache():
    leaf, cache = weight(), WeightCache()
    with autocast("cpu", cache=cache):
        with autocast("cpu"):
            torch.mm(X, leaf)
        torch.mm(X, leaf)
    assert cache.info() == CacheInfo(1, 32, 1, 1)


def test_explicit_cache_inside_a_region_without_one():
    leaf, cache = weight(), WeightCache()
    with autocast("cpu"):
        for _ in range(2):
            with autocast("cpu", cache=cache):
                torch.mm(X, leaf)
        torch.mm(X, leaf)
    assert cache.info() == CacheInfo(1, 32, 1, 1)


def test_cache_switched_off_by_a_region_of_torch_inside():
    leaf, cache = weight(), WeightCache()
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf)
        with torch.autocast("cpu", cache_enabled=False):
            leaf.data.fill_(2.0)
            assert torch.mm(X, leaf)[0, 0] == 8
            torch.mm(X, weight())
        assert cache.info() == CacheInfo(1, 32, 0, 1)


def test_byte_budget_drops_the_least_recently_used():
    first, second, third = weight(), weight(), weight()
    cache = WeightCache(max_bytes=64)
    with autocast("cpu", cache=cache):
        for leaf in (first, second, first, third):      # 32 bytes each: the third takes the second's place
            torch.mm(X, leaf)
        assert cache.info() == CacheInfo(2, 64, 1, 3)
        torch.mm(X, first)
        assert cache.info().hits == 2
        torch.mm(X, second)
        assert cache.info() == CacheInfo(2, 64, 2, 4)
        torch.mm(X, third)
        assert cache.info().misses == 5


def test_byte_budget_too_small_for_a_weight():
    leaf, cache = weight(), WeightCache(max_bytes=31)
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf).float().sum().backward()
        torch.mm(X, leaf).float().sum().backward()
    assert torch.equal(leaf.grad, torch.full((4, 4), 4.0))
    assert cache.info() == CacheInfo(0, 0, 0, 2)
    assert uses(autocast, leaf, cache=WeightCache(max_bytes=0)) == 3


def kept_across(leaf) -> bool:
    """Whether the cast of a weight made in one region serves in the next."""
    cache = WeightCache()
    for _ in range(2):
        with autocast("cpu", cache=cache):
            torch.mm(X, leaf)
    return cache.info().hits == 1


def test_weights_whose_memory_others_have_are_cast_anew_in_each_region():
    """Whoever shares it can write without a version counter knowing."""
    assert kept_across(weight())
    assert kept_across(weight(False))
    alias = (leaf := weight()).detach()
    assert not kept_across(leaf)
    del alias
    assert kept_across(leaf)
    whole = torch.ones(2, 4, 4)
    assert not kept_across(Parameter(whole[1]))
    assert not kept_across(Parameter(torch.from_numpy(np.ones((4, 4), np.float32))))
    assert not kept_across(nn.ParameterList([weight()]).share_memory()[0])

    class Sub(torch.Tensor):
        pass

    assert not kept_across(Parameter(torch.ones(4, 4).as_subclass(Sub)))


def test_cast_of_shared_memory_is_not_held_between_regions():
    """An engine's unsharded weights would otherwise stay, as casts, until the next region."""
    cache, leaf = WeightCache(), weight()
    alias = leaf.detach()
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf)
        assert cache.info().entries == 1
    assert cache.info() == CacheInfo(0, 0, 0, 1)
    del alias


def test_frozen_weight_whose_memory_others_have_is_not_kept_at_all():
    leaf = weight(False)
    alias = leaf.detach()
    assert uses(autocast, leaf, cache=WeightCache()) == 3
    del alias
    assert uses(autocast, leaf, cache=WeightCache()) == 1


def test_step_captured_into_a_graph_ends_keeping(monkeypatch):
    """Its replays write to the weights and call no hook."""
    leaf = weight()
    assert kept_across(leaf)
    monkeypatch.setattr(optimizer_steps.seen, "captured", False)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_steps, "capturing", lambda: True)
        optimizer = torch.optim.SGD([other := weight()], lr=1.0)
        other.grad = torch.zeros(4, 4)
        optimizer.step()
    assert not kept_across(leaf)


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")       # Python 3.12+ about forks beside threads
@pytest.mark.parametrize("held", ["cache", "steps"])
def test_step_in_a_child_forked_while_a_thread_held_the_lock(held):
    leaf, cache = weight(), WeightCache()
    leaf.grad = torch.zeros(4, 4)
    optimizer = torch.optim.SGD([leaf])
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf)
    locked, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with cache._lock if held == "cache" else optimizer_steps.seen.lock:
            locked.set()
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            optimizer.step()
            os._exit(0 if cache.info() == CacheInfo(0, 0, 0, 1) else 1)
        finally:
            os._exit(2)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("verify", [0, -1, 1.5, "all", None])
def test_verify_that_is_none(verify):
    with pytest.raises(ValueError, match=rf"verify is {verify!r}; expected True to compare every element"):
        WeightCache(verify=verify)


def test_verify_takes_what_is_right():
    """NaN is NaN, an empty weight has nothing to compare, and a layout of its own does not matter."""
    for leaf in (Parameter(torch.full((4, 4), float("nan"))), Parameter(torch.ones(0, 4).t()), weight(False)):
        for verify in (True, 2, 100):
            cache = WeightCache(verify=verify)
            for _ in range(2):
                with autocast("cpu", cache=cache):
                    torch.mm(X, leaf)
                    torch.mm(X, leaf)
            assert cache.info().hits == 3
            assert repr(cache).startswith(f"WeightCache(max_bytes=None, verify={verify})")
            assert copy.copy(cache).verify == verify


@pytest.mark.parametrize("bound", [-1, 1.5, "many", True])
def test_byte_budget_that_is_none(bound):
    with pytest.raises(ValueError, match=rf"max_bytes is {bound!r}; expected a number of bytes, 0 or more, or None"):
        WeightCache(bound)


def test_cache_says_what_it_holds():
    cache = WeightCache(max_bytes=1024)
    with autocast("cpu", cache=cache):
        torch.mm(X, weight_kept := weight())
    assert repr(cache) == "WeightCache(max_bytes=1024): CacheInfo(entries=1, bytes=32, hits=0, misses=1)"
    cache.clear()
    assert cache.info() == CacheInfo(0, 0, 0, 1)
    assert weight_kept.grad is None


def test_copies_and_pickles_start_empty():
    cache = WeightCache(max_bytes=1024)
    with autocast("cpu", cache=cache):
        torch.mm(X, kept := weight())
    for other in (copy.deepcopy(cache), copy.copy(cache), pickle.loads(pickle.dumps(cache))):
        assert (other.max_bytes, other.info()) == (1024, CacheInfo(0, 0, 0, 0))
    assert cache.info().entries == 1
    assert kept.grad is None


def test_gradients_arrive_as_backward_passes_the_layers_in_every_micro_batch():
    """DDP sends them while backward goes on, and memory is freed. A cast's place in backward is that of its making."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    arrived = []
    for n, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, n=n: arrived.append(f"weight {n}"))
        layer.register_full_backward_hook(lambda *_, n=n: arrived.append(f"layer {n}"))
    cache, orders = WeightCache(), []
    for region in (lambda: torch.autocast("cpu"), *[lambda: autocast("cpu", cache=cache)] * 3):
        with region():
            loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        arrived.clear()
        loss.backward()
        orders.append(list(arrived))
    assert orders[0].index("weight 2") < orders[0].index("layer 1") < orders[0].index("weight 0")
    assert orders[1:] == [orders[0]] * 3
    assert cache.info().misses == 6


@pytest.mark.parametrize("explicit", [False, True])
def test_sparse_weights_are_cast_at_each_use(explicit):
    """They have no address to compare. Backward of the cast is torch's, which cannot do it, under torch.amp either."""
    cache = WeightCache() if explicit else None
    sparse = torch.eye(4).to_sparse().requires_grad_()
    with autocast("cpu", cache=cache):
        product = torch.mm(sparse, torch.full((4, 2), 3.0))
        torch.mm(sparse, torch.ones(4, 2))
    assert product.dtype is BF16
    assert product.requires_grad
    assert torch.equal(product.float(), torch.full((4, 2), 3.0))
    assert cache is None or cache.info().misses == 0


# Lifetime


@pytest.mark.parametrize("explicit", [False, True])
def test_parameters_die_with_their_model(explicit):
    cache = WeightCache() if explicit else None
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    alive = [weakref.ref(p) for p in model.parameters()] + [weakref.ref(model)]
    gc.disable()
    try:
        with autocast("cpu", cache=cache):
            model(X).float().sum().backward()
        del model
        assert [ref() for ref in alive] == [None] * 5
    finally:
        gc.enable()
    if cache is not None:
        assert cache.info().entries == 0
        assert cache.info().bytes == 0


@pytest.mark.parametrize("how", ["leave", "step", "clear"])
def test_weights_that_nothing_but_their_casts_keep_alive(how):
    """They die while the cache goes through its casts."""
    cache, other = WeightCache(), Parameter(torch.zeros(1))
    gc.disable()
    try:
        with autocast("cpu", cache=cache):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
            model(X)
            alive = [weakref.ref(p) for p in model.parameters()]
            del model
            assert None not in [ref() for ref in alive]
            if how == "step":
                other.grad = torch.zeros(1)
                torch.optim.SGD([other]).step()
            elif how == "clear":
                clear_autocast_cache()
        assert [ref() for ref in alive] == [None] * 6
    finally:
        gc.enable()
    assert cache.info()[:2] == (0, 0)


def test_write_while_a_weight_is_being_cast_is_seen(monkeypatch):
    """By another thread, say, or by a hook."""
    leaf, convert = weight(), weight_cache.converter

    def written_after(dtype):
        def converted(value):
            made = convert(dtype)(value)
            with torch.no_grad():
                value.fill_(2)
            return made

        return converted

    with autocast("cpu"):
        with monkeypatch.context() as patch:
            patch.setattr(weight_cache, "converter", written_after)
            assert torch.mm(X, leaf)[0, 0] == 4
        assert torch.mm(X, leaf)[0, 0] == 8


def test_policy_that_names_a_module_does_not_keep_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = Policy.default("cpu").for_modules({model[1]: FP32})
    with autocast("cpu", policy=policy):
        model(torch.ones(1, 4))
    alive = weakref.ref(model[1])
    del model
    gc.collect()
    assert alive() is None
    assert "gone" in repr(policy)


def test_cache_dies_with_its_last_user():
    cache = WeightCache()
    leaf = weight()
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf)
    alive = weakref.ref(cache)
    del cache
    gc.collect()
    assert alive() is None
    del leaf


def test_entry_of_a_dead_weight_goes_even_while_the_region_is_open():
    cache = WeightCache()
    with autocast("cpu", cache=cache), torch.no_grad():
        leaf = weight(False)
        torch.mm(X, leaf)
        assert cache.info().entries == 1
        del leaf
        assert cache.info() == CacheInfo(0, 0, 0, 1)


# Where it stands aside


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_recordings_get_their_own_casts():
    """A tensor cached outside would be a constant to whatever records operators."""
    leaf, cache = weight(), WeightCache()

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            log.append(func)
            return func(*args, **(kwargs or {}))

    log = []
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf)
        with Log():
            torch.mm(X, leaf)
        torch.func.vmap(lambda x: torch.mm(X, x))(torch.stack([leaf.detach()] * 2))
        gradient = torch.func.grad(lambda w: torch.mm(X, w).float().sum())(leaf)
        traced = torch.jit.trace(lambda w: torch.mm(X, w), (leaf,), check_trace=False)
    assert torch.ops.aten._to_copy.default in log
    assert torch.equal(gradient, torch.full((4, 4), 2.0))
    assert cache.info() == CacheInfo(1, 32, 0, 1)
    assert traced(leaf).dtype is BF16


def test_subclasses_and_views_of_parameters_are_right():
    class Sub(torch.Tensor):
        pass

    leaf = Parameter(torch.ones(4, 4).as_subclass(Sub))
    with autocast("cpu"):
        assert torch.mm(X, leaf)[0, 0] == 4
        with torch.no_grad():
            leaf.fill_(2.0)
        assert torch.mm(X, leaf)[0, 0] == 8
        assert torch.mm(X, leaf.t())[0, 0] == 8


@pytest.mark.gpu
def test_graph_capture_makes_its_own_casts():
    """A replay must read the weights of its own time: casts made before the capture are not part of it."""
    layer, x = nn.Linear(8, 8, device="cuda"), torch.randn(4, 8, device="cuda")
    cache = WeightCache()
    with torch.no_grad(), autocast("cuda", FP16, cache=cache):
        layer(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
            again = layer(x)
        entries = cache.info().entries
        layer.weight.fill_(0.0)
        layer.bias.fill_(3.0)
        graph.replay()
        assert torch.equal(out, torch.full_like(out, 3.0))
        assert torch.equal(again, out)
        assert cache.info().entries == entries


@pytest.mark.gpu
@both
def test_graphed_callables(region):
    """Graphed callables are captured inside a region. torch refuses to capture while a cache is on, and sees ours."""
    layer, x = nn.Linear(8, 8, device="cuda"), torch.randn(4, 8, device="cuda")
    with region("cuda", FP16), pytest.raises(RuntimeError, match="cache_enabled=False"):
        torch.cuda.make_graphed_callables(layer, (x,))
    with region("cuda", FP16, cache_enabled=False):
        graphed = torch.cuda.make_graphed_callables(layer, (x,))
        assert graphed(x).dtype is FP16
