"""Regions and threads: each has its own; work handed to other threads takes its region along where one asks for it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from regions import BF16, FP16, FP32, state
from torch import nn

from ampkit import Policy, WeightCache, autocast, wrap_forward
from ampkit.region.snapshot import Snapshot


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def in_threads(calls):
    """Results of calls that all run at the same time, each in a thread of its own."""
    together = threading.Barrier(len(calls))

    def run(call):
        together.wait(20)
        return call(together)

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(30) for future in [pool.submit(run, call) for call in calls]]


def test_regions_of_several_threads_at_once():
    """Off, with the default dtype and the cache on."""
    def in_region(dtype, policy):
        def call(together):
            seen = []
            with autocast("cpu", dtype, policy=policy):
                for _ in range(5):
                    together.wait(20)
                    seen.append((product(), torch.softmax(torch.ones(2, dtype=dtype), 0).dtype))
            return set(seen)
        return call

    def outside(together):
        for _ in range(5):
            together.wait(20)
        return {product()}

    before = state()
    results = in_threads([
        in_region(BF16, None), in_region(FP16, None), in_region(BF16, Policy.torch("cpu")), outside
    ])
    assert results == [{(BF16, FP32)}, {(FP16, FP32)}, {(BF16, BF16)}, {FP32}]
    assert state() == before


def test_one_region_object_in_several_threads():
    region = autocast("cpu", FP16)

    def call(together):
        with region:
            together.wait(20)
            inside = product()
            with region:
                together.wait(20)
        return inside, product()

    assert in_threads([call] * 4) == [(FP16, FP32)] * 4


def test_decorated_forward_in_threads_of_parallel_apply():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        @autocast("cpu", FP16)
        def forward(self, x):
            return self.layer(x)

    assert replicas_give(Model()) == [FP16] * 4


def replicas_give(model):
    """The dtypes that replicas of a module give in threads, as `nn.DataParallel` makes and calls them."""
    def call(replica):
        def run(together):
            together.wait(20)
            return replica(torch.ones(2, 4)).dtype
        return run

    replicas = []
    for _ in range(4):
        memo = {module: module._replicate_for_data_parallel() for module in model.modules()}
        for module, replica in memo.items():
            for name, child in module._modules.items():
                replica._modules[name] = memo[child]
            for name, parameter in module._parameters.items():
                replica._parameters[name] = parameter
        replicas.append(memo[model])
    return in_threads([call(replica) for replica in replicas])


def test_wrapped_module_in_threads_of_parallel_apply():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert replicas_give(wrap_forward(model, "cpu", FP16)) == [FP16] * 4


def test_module_rules_in_several_threads():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = Policy.default("cpu").for_modules({"1": FP32})

    def call(together):
        dtypes = []
        for _ in range(5):
            with autocast("cpu", policy=policy):
                together.wait(20)
                dtypes.append(model(torch.ones(1, 4)).dtype)
                dtypes.append(model[0](torch.ones(1, 4)).dtype)
        return dtypes

    assert in_threads([call] * 4) == [[FP32, BF16] * 5] * 4
    assert not nn.modules.module._global_forward_pre_hooks


def test_cache_shared_by_several_threads():
    layers = [nn.Linear(8, 8) for _ in range(6)]
    expected = [layer(torch.ones(1, 8)).bfloat16() for layer in layers]
    cache = WeightCache(max_bytes=400)      # three layers' worth, so that threads evict each other's casts

    def call(together):
        together.wait(20)
        for _ in range(20):
            for layer, want in zip(layers, expected, strict=True):
                with autocast("cpu", cache=cache):
                    out = layer(torch.ones(1, 8))
                out.float().sum().backward()
                torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
        return cache.info().bytes

    assert all(held <= 400 for held in in_threads([call] * 4))
    info = cache.info()
    assert info.bytes == sum(entry.nbytes for entry in cache._entries.values()) <= 400


def test_gradients_of_threads_that_share_a_cache_add_up():
    layer, cache = nn.Linear(8, 8, bias=False), WeightCache()
    lock = threading.Lock()

    def call(together):
        for _ in range(10):
            with autocast("cpu", cache=cache):
                loss = layer(torch.ones(1, 8)).float().sum()
            with lock:
                loss.backward()

    in_threads([call] * 4)
    assert torch.equal(layer.weight.grad, torch.full((8, 8), 40.0))


def test_snapshot_takes_a_region_to_another_thread():
    keeps = Policy.default("cpu").with_rules({"aten::mm": "keep"})
    results = []
    for region, expected in ((autocast("cpu", FP16), FP16), (autocast("cpu", policy=keeps), FP32)):
        with region:
            call = Snapshot().wrap(product)
        thread = threading.Thread(target=lambda call=call: results.append(call()))
        thread.start()
        thread.join()
        assert results.pop() is expected
    assert product() is FP32
