"""Weight caches: which casts are kept, for how long, and that they are never stale.

Copies are counted by the profiler, with a low-precision input so that only the weight needs one; a dispatch mode that
counted them would keep the cache from being used.
"""

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.testing._internal.logging_tensor import capture_logs_with_logging_tensor_mode

import ampkit.optim
from ampkit import WeightCache, autocast, clear_autocast_cache
from ampkit.engine import optimizer_steps, weight_cache
from ampkit.engine.weight_cache import CacheInfo
from ampkit.torch_internals.tensors import connected
from tests.helpers.regions import BF16, FP16, REGIONS, both, copies, like_torch

X = torch.ones(2, 4, dtype=BF16)
EYE = torch.eye(4, dtype=BF16)


pytestmark = pytest.mark.usefixtures("small_weights_are_kept")


def weight(requires_grad: bool = True) -> Parameter:
    return Parameter(torch.ones(4, 4), requires_grad)


def uses(region, leaf, **kwargs) -> int:
    """How many copies it takes to use a leaf three times in one region."""
    return copies(region("cpu", **kwargs)(lambda: [torch.mm(X, leaf) for _ in range(3)]))


def kept(leaf, between=lambda: None) -> bool:
    """Whether the cast of a weight made in one region is used in the next."""
    cache = WeightCache()
    for entered in (between, lambda: None):
        with autocast("cpu", cache=cache):
            torch.mm(X, leaf)
        entered()
    return cache.info().hits == 1


# Which casts are kept


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
def test_events_that_end_a_cast_inside_a_region(region):
    """A region without a cache inside makes its own, leaving an inner one ends nothing, clearing ends all."""
    clear = torch.clear_autocast_cache if region is torch.autocast else clear_autocast_cache

    use = functools.partial(torch.mm, X, weight())

    def casts(inside):
        return copies(region("cpu")(lambda: (use(), inside(), use(), inside())))

    assert casts(region("cpu", cache_enabled=False)(use)) == 3
    assert casts(region("cpu")(use)) == 1
    assert casts(clear) == 2


def test_inference_mode():
    """No cast that is made there is kept, but for a user-provided cache; gradients after it still flow."""
    use = functools.partial(torch.mm, X, weight())
    without_grad, inside = torch.no_grad()(use), torch.inference_mode()(use)
    regions = torch.autocast("cpu"), autocast("cpu"), autocast("cpu", cache=WeightCache())
    assert [copies(region(lambda: (inside(), inside()))) for region in regions] == [2, 2, 1]
    regions = torch.autocast("cpu"), autocast("cpu"), autocast("cpu", cache=WeightCache())
    assert [copies(region(lambda: (without_grad(), inside(), inside()))) for region in regions] == [3, 1, 1]

    x = X.clone().requires_grad_()  # so that the cast is saved for backward, which an inference tensor cannot be
    for inside in (True, False):
        leaf = weight()
        with torch.inference_mode(inside), autocast("cpu", cache=WeightCache()), torch.inference_mode():
            torch.mm(X, leaf)
            with torch.inference_mode(False):
                torch.mm(x, leaf).float().sum().backward()
        assert torch.equal(leaf.grad, torch.full((4, 4), 2.0))


def test_small_weights_are_cast_in_each_region_where_autograd_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """To connect a kept cast to its weight takes longer. Without a graph, and for large weights, casts are kept."""
    monkeypatch.undo()
    large = Parameter(torch.ones(4, weight_cache.SMALLEST_CONNECTED // 4))
    small = weight()

    def casts(leaf: Parameter) -> int:
        cache = WeightCache()

        def use() -> None:
            with autocast("cpu", cache=cache):
                for _ in range(2):
                    torch.mm(X, leaf)

        return copies(lambda: [use() for _ in range(3)])

    assert [casts(small), casts(large)] == [3, 1]
    assert [torch.no_grad()(casts)(leaf) for leaf in (small, large, small.requires_grad_(False))] == [1, 1, 1]


@pytest.mark.parametrize("cache", [None, WeightCache()], ids=["region", "WeightCache"])
def test_a_cast_that_is_first_used_without_autograd_has_a_history_where_autograd_records(
    cache: WeightCache | None,
) -> None:
    """The weight has the gradient of every use in one region."""
    leaf = weight()
    with autocast("cpu", cache=cache):
        with torch.no_grad():
            torch.mm(X, leaf)
        outs = [torch.mm(X, leaf) for _ in range(2)]
        with torch.no_grad():
            torch.mm(X, leaf)
    sum(out.float().sum() for out in outs).backward()
    assert torch.equal(leaf.grad, torch.full((4, 4), 4.0))


def test_gradients_are_added_up_in_the_order_of_torch_after_a_use_without_autograd() -> None:
    """A tied weight: 2 uses as an embedding, 2 as a head, after one under `no_grad`. Another order has other bits."""
    values, inputs = torch.randn(16, 16), torch.randn(16, 16)

    def gradient(region: Any) -> Any:
        tied = Parameter(values.clone())
        with region:
            with torch.no_grad():
                torch.mm(inputs, tied)
            first = torch.mm(tied[torch.arange(16)], tied)
            second = torch.mm(tied[torch.arange(16).flip(0)] * inputs, tied)
        ((first + 0.3 * second).float() * inputs).sum().backward()
        return tied.grad

    assert torch.equal(gradient(like_torch()), gradient(torch.autocast("cpu")))


@pytest.mark.parametrize(
    ("write", "seen"),
    [
        (lambda p: p.detach().fill_(2.0), True),
        (lambda p: setattr(p, "data", torch.full((4, 4), 2.0)), True),
        (lambda p: (p.data, setattr(p, "data", torch.full((4, 4), 2.0))), True),  # the old values live on
        (lambda p: p.data.fill_(2.0), False),
    ],
    ids=["in place", "data =", "data =, with an alias", "data in place"],
)
def test_write_inside_a_region_is_seen(write, seen):
    """torch.amp goes on with the old cast. A write through `.data` needs a clear."""
    clears = torch.clear_autocast_cache, clear_autocast_cache
    for region, clear, expected in zip(REGIONS, clears, (4, 8 if seen else 4), strict=True):
        leaf = weight()
        with region("cpu"):
            torch.mm(X, leaf)
            alias = write(leaf)
            assert torch.mm(X, leaf)[0, 0].item() == expected
            clear()
            assert torch.mm(X, leaf)[0, 0].item() == 8
        del alias


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
        thread = threading.Thread(target=region("cpu")(lambda: torch.mm(X, leaf)))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), region("cpu"):
            torch.mm(x, leaf)
            thread.start()
            thread.join()
            torch.mm(x, leaf)
        return len({t.data_ptr() for t in saved if t.shape == (4, 4)})

    assert casts(torch.autocast) == 2
    assert casts(autocast) == 1


# What a cache keeps alive


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


@pytest.mark.parametrize("cache", [None, WeightCache()])
def test_sparse_weights_are_cast_at_each_use(cache):
    """They have no address to compare. torch cannot run backward of the cast, under torch.amp either."""
    sparse = torch.eye(4).to_sparse().requires_grad_()
    with autocast("cpu", cache=cache):
        product = torch.mm(sparse, torch.full((4, 2), 3.0))
        torch.mm(sparse, torch.ones(4, 2))
    assert product.dtype is BF16
    assert product.requires_grad
    assert torch.equal(product.float(), torch.full((4, 2), 3.0))
    assert cache is None or cache.info().misses == 0


@pytest.mark.parametrize("cache", [None, WeightCache()])
def test_parameters_die_with_their_model(cache):
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


def test_a_step_frees_every_cast_of_an_open_region():
    """Else the casts of models and inputs that are gone would pile up where a whole training runs in one region."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with autocast("cpu"):
        model(X).float().sum().backward()
        optimizer.step()
        alive = weakref.ref(model.weight)
        del model, optimizer
        gc.collect()
        assert alive() is None


# Operators for which the cache is not used


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_recordings_get_their_own_casts():
    """A tensor cached outside would be a constant to whatever records operators."""
    leaf, cache = weight(), WeightCache()
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf)
        with capture_logs_with_logging_tensor_mode() as log:
            torch.mm(X, leaf)
        torch.func.vmap(lambda x: torch.mm(X, x))(torch.stack([leaf.detach()] * 2))
        gradient = torch.func.grad(lambda w: torch.mm(X, w).float().sum())(leaf)
        traced = torch.jit.trace(lambda w: torch.mm(X, w), (leaf,), check_trace=False)
    assert "_to_copy" in "\n".join(log)
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


# Kept from region to region


def test_a_kept_cast_that_gets_no_gradient_gives_none():
    """And no zeros, which weight decay and momentum would act on."""

    class Ignoring(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x, w: torch.mm(x, w))
        backward = staticmethod(lambda ctx, gradient: (gradient, None))

    leaf, x = weight(), X.clone().requires_grad_()
    Ignoring.apply(x, connected(leaf, leaf.detach().bfloat16())).sum().backward()
    assert (leaf.grad, x.grad is None) == (None, False)


def test_replaced_storage_is_freed_at_once():
    """As ZeRO and offloading rely on. The address may be used again by another storage: here one buffer of two."""
    memory, leaf = bytearray(64), weight()
    with autocast("cpu"), torch.no_grad():
        for number in (1.0, 2.0):
            torch.mm(X, leaf)
            storage = weakref.ref(leaf.untyped_storage())
            leaf.data = torch.empty(0)
            assert storage() is None
            leaf.data = torch.frombuffer(memory, dtype=torch.float32).fill_(number).view(4, 4)
            assert torch.mm(X, leaf)[0, 0].item() == 4 * number


def test_each_weight_is_cast_once_per_optimizer_step():
    """Accumulation over 8 micro-batches: counted, and the gradients are those of torch.amp."""
    cache, theirs = WeightCache(), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    ours = copy.deepcopy(theirs)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    for n, batch in enumerate(torch.randn(16, 2, 4)):
        for net, region in ((theirs, torch.autocast("cpu")), (ours, like_torch(cache=cache))):
            with region:
                loss = net(batch).float().pow(2).mean()
            loss.backward()
        if n % 8 == 7:
            assert cache.info() == CacheInfo(4, 2 * (32 + 8 + 32 + 4), 28 * (n // 8 + 1), 4 * (n // 8 + 1))
            gradients = [[p.grad for p in model.parameters()] for model in (ours, theirs)]
            torch.testing.assert_close(*gradients, rtol=0, atol=0)
            optimizer.step()
            assert cache.info().entries == 0
            theirs.load_state_dict(ours.state_dict())


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


@pytest.mark.parametrize("policy", ["torch", "default"])
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_a_weight_that_a_transformed_function_captures(transform, policy):
    """In later regions the results are those of the first, where the cast is made."""
    leaf, cache = weight(), WeightCache()

    def function(row):
        return torch.mm(row.unsqueeze(0), leaf).float().square().sum()

    def call():
        if transform == "jvp":
            return torch.func.jvp(function, (X[0],), (X[1],))[1]
        return torch.func.vmap(function)(X) if transform == "vmap" else torch.func.grad(function)(X[0])

    results = []
    for region_cache in (None, cache, cache, cache):
        with autocast("cpu", policy=policy, cache=region_cache):
            result = call()
        results.append((result, *torch.autograd.grad(result.sum(), leaf)))
    for later in results[1:]:
        torch.testing.assert_close(later, results[0], rtol=0, atol=0)


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_a_cache_in_nested_regions(which):
    """An inner region uses the outer one's cache. An inner region's own cache is not used outside."""
    leaf, cache = weight(), WeightCache()
    with autocast("cpu", cache=cache if which == "outer" else None):
        for _ in range(2):
            with autocast("cpu", cache=cache if which == "inner" else None):
                torch.mm(X, leaf)
        torch.mm(X, other := weight())
    assert other.grad is None
    assert cache.info() == (CacheInfo(2, 64, 1, 2) if which == "outer" else CacheInfo(1, 32, 1, 1))


def test_weights_whose_memory_others_have_are_recast_in_each_region():
    """Others who share the memory can write to it without incrementing a version counter."""
    for leaf in (weight(), weight(False)):
        assert kept(leaf)
        alias = leaf.detach()
        assert not kept(leaf)
        assert uses(autocast, leaf, cache=(cache := WeightCache())) == (1 if leaf.requires_grad else 3)
        assert cache.info().entries == 0  # an engine's unsharded weights would otherwise stay until the next
        del alias
        assert kept(leaf)
    whole = torch.ones(2, 4, 4)
    assert not kept(Parameter(whole[1]))
    assert not kept(Parameter(torch.from_numpy(np.ones((4, 4), np.float32))))
    assert not kept(nn.ParameterList([weight()]).share_memory()[0])
    assert not kept(Parameter(torch.ones(4, 4).as_subclass(type("Sub", (torch.Tensor,), {}))))


DATA: dict[str, Callable[[Any], Any]] = {  # how adapters are merged, and averages of weights loaded
    "copy_": lambda p: p.data.copy_(torch.full((4, 4), 2.0)),
    "+=": lambda p: exec("p.data += 1.0", {"p": p}),
    "a part": lambda p: p.data[:2].fill_(2.0),
    "foreach": lambda p: torch._foreach_add_([p.data], 1.0),
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("write", DATA.values(), ids=DATA)
def test_writes_through_data_are_seen_between_regions(write: Callable[[Any], Any], trained: bool) -> None:
    """By every cache that has a cast of the parameter, also after other uses of it."""
    leaf, caches = weight(trained), [WeightCache(), WeightCache()]
    for dtype in (BF16, FP16):
        for cache in caches:
            with autocast("cpu", dtype, cache=cache):
                torch.mm(EYE.to(dtype), leaf)
    version = leaf._version
    write(leaf)
    assert leaf._version == version
    for dtype in (BF16, FP16):
        for cache in caches:
            with autocast("cpu", dtype, cache=cache):
                assert torch.equal(torch.mm(EYE.to(dtype), leaf).detach(), leaf.detach().to(dtype))
    assert [cache.info().hits for cache in caches] == [0, 0]


@pytest.mark.parametrize("trained", [True, False])
def test_write_through_data_in_an_open_region(trained: bool) -> None:
    """There the cast of a trained weight stays in use, as in torch.amp, which casts frozen ones at each use."""
    leaf, cache = weight(trained), WeightCache()
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf)
        leaf.data.fill_(2.0)
        assert torch.mm(X, leaf)[0, 0].item() == (4 if trained else 8)
    with autocast("cpu", cache=cache):
        assert torch.mm(X, leaf)[0, 0].item() == 8


def test_an_alias_older_than_the_cast_and_gone_with_the_region() -> None:
    leaf, cache = weight(), WeightCache()
    alias = leaf.data
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf)
        alias.fill_(2.0)
        del alias
    with autocast("cpu", cache=cache):
        assert torch.mm(X, leaf)[0, 0].item() == 8


def test_parameter_data_behaves_as_torchs() -> None:
    """The property that reports reads of `.data` does all that torch's does, in compiled code too."""
    leaf, cache = weight(), WeightCache()
    assert type(leaf.data) is Tensor
    assert (leaf.data.data_ptr(), leaf.data.requires_grad) == (leaf.data_ptr(), False)
    leaf.data = torch.zeros(2, 2)
    assert leaf.shape == (2, 2)
    with pytest.raises(RuntimeError, match="Deleting"):
        del leaf.data
    with pytest.raises(TypeError):
        leaf.data = 3  # type: ignore[assignment]

    @torch.compile(backend="eager", fullgraph=True)
    def doubled(p: Parameter) -> Tensor:
        p.data.mul_(2.0)
        return p * 1

    leaf = weight()
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf)
    assert torch.equal(doubled(leaf), torch.full((4, 4), 2.0))
    with autocast("cpu", cache=cache):
        assert torch.mm(X, leaf)[0, 0].item() == 8


def test_any_collective_ends_keeping():
    """None of them increments a version counter, and each may have written to any weight."""
    leaf = weight()
    assert not kept(leaf, lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1))
    try:
        group = dist.new_group([0])
        assert kept(leaf)
        assert not kept(leaf, lambda: dist.all_reduce(torch.ones(1)))
        assert not kept(leaf, lambda: dist.barrier(group))
        assert not kept(leaf, lambda: dist.new_group([0]))
    finally:
        dist.destroy_process_group()
    assert kept(leaf)


def test_a_cache_reports_its_contents_and_its_copies_start_empty():
    cache, leaf = WeightCache(), weight()
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf)
    assert repr(cache) == "WeightCache(): CacheInfo(entries=1, bytes=32, hits=0, misses=1)"
    for copied in (copy.deepcopy(cache), copy.copy(cache), pickle.loads(pickle.dumps(cache))):
        assert copied.info() == CacheInfo(0, 0, 0, 0)
    cache.clear()
    assert cache.info() == CacheInfo(0, 0, 0, 1)


# Any step of any optimizer invalidates every cast, however it writes


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD fused": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
    "Adam foreach": lambda params: torch.optim.Adam(params, lr=1.0, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1.0, fused=True),
    "ampkit": lambda params: ampkit.optim.AdamW(params, lr=1.0),
}


def is_right(leaf: Tensor) -> bool:
    """Whether the open region uses a cast of the weight's present values."""
    return torch.equal(torch.mm(EYE, leaf).detach(), leaf.detach().to(BF16))


def step(optimizer: Any, leaf: Tensor) -> None:
    leaf.grad = torch.ones_like(leaf)
    optimizer.step()


@pytest.mark.parametrize("cache", [None, WeightCache()])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_is_seen_in_the_open_region_and_in_the_next(name: str, cache: WeightCache | None) -> None:
    leaf = weight()
    optimizer = OPTIMIZERS[name]([leaf])
    for _ in range(2):
        with autocast("cpu", cache=cache):
            assert is_right(leaf)
            step(optimizer, leaf)
            assert is_right(leaf)
        step(optimizer, leaf)
        with autocast("cpu", cache=cache):
            assert is_right(leaf)


def test_casts_made_in_the_closure_of_a_step() -> None:
    """It is evaluated within the step, before the weights are written."""
    leaf, cache = weight(), WeightCache()
    leaf.grad = torch.ones_like(leaf)
    closure = autocast("cpu", cache=cache)(lambda: torch.mm(EYE, leaf).sum())
    torch.optim.SGD([leaf], lr=1.0, fused=True).step(closure)
    assert cache.info() == CacheInfo(0, 0, 0, 1)
    with autocast("cpu", cache=cache):
        assert is_right(leaf)


@pytest.mark.parametrize("whole", [False, True], ids=["step", "a function around it"])
def test_compiled_step(whole: bool) -> None:
    """Dynamo traces the hooks, once."""
    leaf, cache = weight(), WeightCache()
    optimizer = torch.optim.SGD([leaf], lr=1.0, fused=True)

    def run() -> None:
        optimizer.step()

    compiled = torch.compile(run if whole else optimizer.step, backend="eager")
    for n in range(6):
        leaf.grad = torch.ones_like(leaf)
        with torch.compiler.set_stance("default" if n == 0 else "fail_on_recompile"):
            compiled()
        with autocast("cpu", cache=cache):
            assert is_right(leaf)
    assert cache.info().misses == 6


def test_step_captured_into_a_graph_ends_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays write to the weights and call no hook."""
    leaf = weight()
    assert kept(leaf)
    monkeypatch.setattr(optimizer_steps.observed, "captured", False)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_steps, "is_capturing", lambda device: True)
        step(torch.optim.SGD([leaf], lr=0.0), leaf)
    assert not kept(leaf)
