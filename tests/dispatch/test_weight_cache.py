"""The cache of weight casts: which casts are kept, for how long, and that they are never stale.

Copies are counted by the profiler, with a low-precision input so that only the weight needs one; a dispatch mode that
counted them would keep the cache from being used.
"""

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.testing._internal.logging_tensor import capture_logs_with_logging_tensor_mode

import ampkit.optim
from ampkit import autocast, clear_autocast_cache
from tests.helpers.regions import BF16, FP16, REGIONS, both, copies, like_torch

X = torch.ones(2, 4, dtype=BF16)
EYE = torch.eye(4, dtype=BF16)


def weight(requires_grad: bool = True) -> Parameter:
    return Parameter(torch.ones(4, 4), requires_grad)


def uses(region, leaf, **kwargs) -> int:
    """How many copies it takes to use a leaf three times in one region."""
    return copies(region("cpu", **kwargs)(lambda: [torch.mm(X, leaf) for _ in range(3)]))


# Which casts are kept: for each leaf, copies under torch.amp and under ampkit

LEAVES = {
    "a float32 leaf": (weight, 1, 1),
    "a parameter made of a view": (lambda: Parameter(torch.ones(2, 4, 4)[1]), 1, 1),
    "a tensor that requires no grad": (lambda: torch.ones(4, 4), 3, 3),
    "a frozen parameter": (lambda: weight(False), 3, 3),
    "a result": (lambda: weight() * 1, 3, 3),
    "a view of a leaf": (lambda: torch.ones(2, 4, 4)[0].requires_grad_(), 3, 3),
}


@pytest.mark.parametrize("leaf", LEAVES)
def test_casts_of_three_uses_in_a_region(leaf):
    make, torchs, ours = LEAVES[leaf]
    assert uses(torch.autocast, make()) == torchs
    assert uses(autocast, make()) == ours
    assert uses(torch.autocast, make(), cache_enabled=False) == uses(autocast, make(), cache_enabled=False) == 3


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


def test_an_outer_region_keeps_the_casts_of_regions_inside():
    """Around micro-batches, with the gradients of each; and around a generation loop, without autograd."""
    leaf = weight()

    def region() -> None:
        with autocast("cpu"):
            out = torch.mm(X, leaf)
        if out.requires_grad:
            out.float().sum().backward()

    def loop() -> None:
        with autocast("cpu", enabled=False):
            for _ in range(3):
                region()

    assert copies(torch.no_grad()(loop)) == copies(torch.inference_mode()(loop)) == 1
    loop()
    assert torch.equal(leaf.grad, torch.full((4, 4), 6.0))


def test_casts_of_inference_mode_are_used_there_alone():
    """Gradients after it still flow."""
    use = functools.partial(torch.mm, X, weight())
    without_grad, inside = torch.no_grad()(use), torch.inference_mode()(use)
    assert copies(autocast("cpu")(lambda: (inside(), inside()))) == 1
    assert copies(autocast("cpu")(lambda: (without_grad(), inside(), inside(), without_grad()))) == 2
    x = X.clone().requires_grad_()  # so that the cast is saved for backward, which an inference tensor cannot be
    for mode in (True, False):
        leaf = weight()
        with torch.inference_mode(mode), autocast("cpu"), torch.inference_mode():
            torch.mm(X, leaf)
            with torch.inference_mode(False):
                torch.mm(x, leaf).float().sum().backward()
        assert torch.equal(leaf.grad, torch.full((4, 4), 2.0))


def test_a_cast_that_is_first_used_without_autograd_has_a_history_where_autograd_records() -> None:
    """The weight has the gradient of every use in one region."""
    leaf = weight()
    with autocast("cpu"):
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


def test_freezing_and_unfreezing_inside_a_region():
    leaf = weight(False)
    with autocast("cpu"):
        assert not torch.mm(X, leaf).requires_grad
        leaf.requires_grad_()
        torch.mm(X, leaf).float().sum().backward()
        leaf.requires_grad_(False)
        assert not torch.mm(X, leaf).requires_grad
    assert torch.equal(leaf.grad, torch.full((4, 4), 2.0))


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


# What the cache keeps alive


def test_sparse_weights_are_cast_at_each_use():
    """They have no address to compare. torch cannot run backward of the cast, under torch.amp either."""
    sparse = torch.eye(4).to_sparse().requires_grad_()
    with autocast("cpu"):
        product = torch.mm(sparse, torch.full((4, 2), 3.0))
        torch.mm(sparse, torch.ones(4, 2))
    assert product.dtype is BF16
    assert product.requires_grad
    assert torch.equal(product.float(), torch.full((4, 2), 3.0))


def test_parameters_die_with_their_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    alive = [weakref.ref(p) for p in model.parameters()] + [weakref.ref(model)]
    gc.disable()
    try:
        with autocast("cpu"):
            model(X).float().sum().backward()
        del model
        assert [ref() for ref in alive] == [None] * 5
    finally:
        gc.enable()


def test_the_first_cast_after_a_step_frees_those_before_it():
    """Else the casts of models and inputs that are gone would pile up where a whole training runs in one region."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with autocast("cpu"):
        model(X).float().sum().backward()
        optimizer.step()
        alive = weakref.ref(model.weight)
        del model, optimizer
        torch.mm(X, weight())
        gc.collect()
        assert alive() is None


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


# Operators for which the cache is not used


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_recordings_get_their_own_casts():
    """A tensor cached outside would be a constant to whatever records operators."""
    leaf = weight()
    with autocast("cpu"):
        torch.mm(X, leaf)
        with capture_logs_with_logging_tensor_mode() as log:
            torch.mm(X, leaf)
        torch.func.vmap(lambda x: torch.mm(X, x))(torch.stack([leaf.detach()] * 2))
        gradient = torch.func.grad(lambda w: torch.mm(X, w).float().sum())(leaf)
        traced = torch.jit.trace(lambda w: torch.mm(X, w), (leaf,), check_trace=False)
    assert "_to_copy" in "\n".join(log)
    assert torch.equal(gradient, torch.full((4, 4), 2.0))
    assert traced(leaf).dtype is BF16


@pytest.mark.parametrize("policy", ["torch", "default"])
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_a_weight_that_a_transformed_function_captures(transform, policy):
    """In later regions the results are those of the first, where the cast is made."""
    leaf = weight()

    def function(row):
        return torch.mm(row.unsqueeze(0), leaf).float().square().sum()

    def call():
        if transform == "jvp":
            return torch.func.jvp(function, (X[0],), (X[1],))[1]
        return torch.func.vmap(function)(X) if transform == "vmap" else torch.func.grad(function)(X[0])

    results = []
    for outer in (True, False):
        with autocast("cpu", enabled=outer), autocast("cpu", policy=policy):
            for _ in range(2):
                result = call()
                results.append((result, *torch.autograd.grad(result.sum(), leaf)))
    for later in results[1:]:
        torch.testing.assert_close(later, results[0], rtol=0, atol=0)


@pytest.mark.gpu
def test_graph_capture_makes_its_own_casts():
    """A replay must read the weights of its own time: casts made before the capture are not part of it."""
    layer, x = nn.Linear(8, 8, device="cuda"), torch.randn(4, 8, device="cuda")
    with torch.no_grad(), autocast("cuda", FP16):
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
        layer.weight.fill_(0.0)
        layer.bias.fill_(3.0)
        graph.replay()
        assert torch.equal(out, torch.full_like(out, 3.0))
        assert torch.equal(again, out)


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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_is_seen_in_the_open_region(name: str) -> None:
    leaf = weight()
    optimizer = OPTIMIZERS[name]([leaf])
    with autocast("cpu", enabled=False):
        for _ in range(2):
            with autocast("cpu"):
                assert is_right(leaf)
                step(optimizer, leaf)
                assert is_right(leaf)
            step(optimizer, leaf)
            with autocast("cpu"):
                assert is_right(leaf)


def test_casts_made_in_the_closure_of_a_step() -> None:
    """It is evaluated within the step, before the weights are written."""
    leaf = weight()
    leaf.grad = torch.ones_like(leaf)
    with autocast("cpu"):
        torch.optim.SGD([leaf], lr=1.0, fused=True).step(lambda: torch.mm(EYE, leaf).sum())
        assert is_right(leaf)


@pytest.mark.parametrize("whole", [False, True], ids=["step", "a function around it"])
def test_compiled_step(whole: bool) -> None:
    """Dynamo traces the hooks, once."""
    leaf = weight()
    optimizer = torch.optim.SGD([leaf], lr=1.0, fused=True)

    def run() -> None:
        optimizer.step()

    compiled = torch.compile(run if whole else optimizer.step, backend="eager")
    with autocast("cpu", enabled=False):
        for n in range(6):
            leaf.grad = torch.ones_like(leaf)
            with torch.compiler.set_stance("default" if n == 0 else "fail_on_recompile"):
                compiled()
            with autocast("cpu"):
                assert is_right(leaf)
