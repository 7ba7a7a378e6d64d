"""What a cache keeps alive and what it does not, recordings, and graph captures."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import WeightCache, autocast, clear_autocast_cache
from ampkit.region.weight_cache import CacheInfo
from tests.helpers.regions import BF16, FP16, both
from tests.helpers.weights import X, weight


def test_gradients_arrive_as_backward_passes_the_layers_in_every_micro_batch():
    """DDP sends them while backward goes on, and memory is freed. A cast's place in backward is that of its making."""
    model, cache = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), WeightCache()
    arrived, orders = [], []
    for n, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, n=n: arrived.append(f"weight {n}"))
        layer.register_full_backward_hook(lambda *_, n=n: arrived.append(f"layer {n}"))
    for region in (torch.autocast("cpu"), *[autocast("cpu", cache=cache)] * 3):
        with region:
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
    assert cache is None or cache.info()[:2] == (0, 0)


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
