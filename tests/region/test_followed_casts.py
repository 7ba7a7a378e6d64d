"""`WeightCache.follow`: casts that a step brings up to date. Bits are those of casts made anew, and none is stale."""

import copy
import gc
import os
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import ampkit.optim
from ampkit import GradScaler, WeightCache, autocast
from ampkit.region import followed_casts, optimizer_steps
from ampkit.region.weight_cache import CacheInfo
from tests.helpers.regions import BF16, FP16
from tests.helpers.weights import WritesThroughData, orders_of_arrival

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "ampkit AdamW": lambda params: ampkit.optim.AdamW(params, lr=0.1),
    "ampkit SGD": lambda params: ampkit.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "through .data": WritesThroughData,
}
WRITES_CASTS = ("ampkit AdamW", "ampkit SGD")
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def model_of(seed: int = 0) -> nn.Sequential:
    """Six weights, of which a norm's two are not cast."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def train(
    model: nn.Module, optimizer: Any, cache: WeightCache | None, steps: int = 4, dtype: torch.dtype = BF16
) -> list[int]:
    """How many casts each step made."""
    made = []
    for n in range(steps):
        before = 0 if cache is None else cache.info().misses
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(n))
        with autocast("cpu", dtype, cache=cache):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        made.append(0 if cache is None else cache.info().misses - before)
    return made


def assert_right(cache: WeightCache) -> None:
    """What is held, and valid, is the cast of its weight."""
    for (_, dtype), entry in cache._entries.items():
        weight = entry.weight()
        if entry.version == weight._version:
            assert torch.equal(entry.cast.detach(), weight.detach().to(dtype))


@every_optimizer
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_bits_and_counts(kind: str, dtype: torch.dtype) -> None:
    """Four casts once; then none, or four in one call, and training goes on with the same bits."""
    plain, followed, cache = model_of(), model_of(), WeightCache()
    train(plain, OPTIMIZERS[kind](plain.parameters()), None, dtype=dtype)
    optimizer = OPTIMIZERS[kind](followed.parameters())
    cache.follow(optimizer)
    made = train(followed, optimizer, cache, dtype=dtype)
    assert made == [4, 0, 0, 0] if kind in WRITES_CASTS else [4, 4, 4, 4]
    for ours, theirs in zip(followed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert cache.info()[:2] == (4, 2 * (32 + 8 + 24 + 3))
    assert_right(cache)


def test_other_optimizers_get_one_call_for_all_weights() -> None:
    model, cache = model_of(), WeightCache()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cache.follow(optimizer)
    train(model, optimizer, cache, 2)
    with torch.profiler.profile(acc_events=True) as profile, autocast("cpu", cache=cache):
        model(torch.ones(1, 4, dtype=BF16))
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::_foreach_copy_"] == 1


@every_optimizer
def test_verified(kind: str) -> None:
    model, cache = model_of(), WeightCache(verify=True)
    optimizer = OPTIMIZERS[kind](model.parameters())
    cache.follow(optimizer)
    train(model, optimizer, cache, 6)


def launching(params: Any) -> Any:
    """Kernels move no version by themselves."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs the interpreter")
    return ampkit.optim.AdamW(params, lr=0.1, impl="triton")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", [*OPTIMIZERS, "launching"])
def test_backward_after_the_step_raises(kind: str) -> None:
    """As in torch for the weight itself: the cast that the graph has saved holds other values now."""
    leaf, cache = Parameter(torch.ones(4, 4)), WeightCache()
    optimizer = OPTIMIZERS.get(kind, launching)([leaf])
    cache.follow(optimizer)
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(3):
        losses = []
        for _ in range(3):      # regions, each with a node of its own for the cast
            with autocast("cpu", BF16, cache=cache):
                losses.append(torch.mm(x, leaf).float().sum())
                losses[-1].backward(retain_graph=True)
        optimizer.step()
        with autocast("cpu", BF16, cache=cache):
            torch.mm(x, leaf)
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@every_optimizer
@pytest.mark.parametrize("torchs", [False, True])
def test_skipped_step_leaves_casts_valid(kind: str, torchs: bool) -> None:
    model, cache = model_of(), WeightCache()
    optimizer = OPTIMIZERS[kind](model.parameters())
    cache.follow(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if torchs else GradScaler("cpu", init_scale=4.0)
    for n in range(5):
        with autocast("cpu", FP16, cache=cache):
            loss = model(torch.ones(2, 4)).float().sum()
        scaler.scale(loss).backward()
        before = [p.detach().clone() for p in model.parameters()]
        if n in (1, 3):
            model[0].weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        assert (n in (1, 3)) is all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        optimizer.zero_grad()
        assert_right(cache)
        with autocast("cpu", FP16, cache=cache), torch.no_grad():
            got = model(torch.ones(2, 4))
        with autocast("cpu", FP16), torch.no_grad():
            assert torch.equal(got, model(torch.ones(2, 4)))
    if kind in WRITES_CASTS:
        assert cache.info().misses == 4


@pytest.mark.parametrize("kind", WRITES_CASTS)
def test_weight_that_was_written_before_a_skipped_step(kind: str) -> None:
    """Nothing brings its cast up to date."""
    leaf, cache = Parameter(torch.ones(4, 4)), WeightCache(verify=True)
    optimizer, scaler = OPTIMIZERS[kind]([leaf]), GradScaler("cpu", init_scale=4.0)
    cache.follow(optimizer)
    for n in range(3):
        with autocast("cpu", FP16, cache=cache):
            scaler.scale(torch.mm(torch.ones(2, 4), leaf).float().sum()).backward()
        leaf.detach().mul_(2)
        if n == 1:
            leaf.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("kind", WRITES_CASTS)
def test_hook_that_writes_after_the_optimizer_has(kind: str) -> None:
    leaf, cache = Parameter(torch.ones(4, 4)), WeightCache(verify=True)
    optimizer = OPTIMIZERS[kind]([leaf])

    def halve(*_: Any) -> None:
        leaf.data.mul_(0.5)

    optimizer.register_step_post_hook(halve)
    cache.follow(optimizer)
    for _ in range(3):
        with autocast("cpu", cache=cache):
            torch.mm(torch.ones(2, 4), leaf).float().sum().backward()
        optimizer.step()


@every_optimizer
def test_gradients_arrive_in_the_order_of_torchs(kind: str) -> None:
    """Each region has autograd nodes of its own."""
    model, cache = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), WeightCache()
    optimizer = OPTIMIZERS[kind](model.parameters())
    cache.follow(optimizer)
    orders = orders_of_arrival(model, cache, after=optimizer.step)
    assert orders[1:] == [orders[0]] * 3


CHANGES: dict[str, Callable[[nn.Sequential, Any], Any]] = {
    "in place": lambda model, _: model[0].weight.detach().mul_(2),
    "data replaced": lambda model, _: setattr(model[0].weight, "data", model[0].weight.data * 2),
    "data transposed": lambda model, _: setattr(model[0].weight, "data", model[0].weight.data.t().contiguous().t()),
    "loaded": lambda model, _: model.load_state_dict(model_of(1).state_dict()),
    "moved and back": lambda model, _: model.double().float(),
    "frozen": lambda model, _: model[0].requires_grad_(False),
    "no gradient": lambda model, _: setattr(model[0].weight, "grad", None),
    "parameter taken out": lambda _, optimizer: optimizer.param_groups[0]["params"].pop(0),
    "parameter put in": lambda _, optimizer: optimizer.add_param_group({"params": [Parameter(torch.ones(2))]}),
    "state loaded": lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "another lr": lambda _, optimizer: optimizer.param_groups[0].update(lr=0.5),
}


@every_optimizer
@pytest.mark.parametrize("when", ["before backward", "before the step", "after the step"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps(kind: str, when: str, change: str) -> None:
    """No matter what a user does, every cast that is used is right: `verify` compares."""
    model, cache = model_of(), WeightCache(verify=True)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    cache.follow(optimizer)
    for n in range(4):
        with autocast("cpu", BF16, cache=cache):
            loss = model(torch.ones(2, 4)).float().sum()
        if when != "before backward" or n != 1:
            loss.backward()
        if when != "after the step" and n == 1:
            CHANGES[change](model, optimizer)
        for param in model.parameters():
            if param.grad is not None and param.grad.dtype is not param.dtype:
                param.grad = None
        for group in optimizer.param_groups if kind == "through .data" else []:
            for param in group["params"]:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        optimizer.step()
        if when == "after the step" and n == 1:
            CHANGES[change](model, optimizer)
        for param in model.parameters():
            if param.grad is not None:
                param.grad = torch.zeros_like(param)
    with autocast("cpu", BF16, cache=cache):
        got = model(torch.ones(2, 4))
    with autocast("cpu", BF16):
        assert torch.equal(got, model(torch.ones(2, 4)))


def test_two_dtypes_and_two_caches_and_the_users_own_copies() -> None:
    """A launch writes one copy of a weight: the user's, else the first cache's; the rest follows in a call."""
    model, caches = model_of(), [WeightCache(), WeightCache()]
    optimizer = ampkit.optim.AdamW(model.parameters(), lr=0.1)
    mine = {model[0].weight: model[0].weight.detach().half()}
    optimizer.write_copies(mine)
    for cache in (*caches, caches[0]):
        cache.follow(optimizer)
    for _ in range(4):
        losses = []
        for cache, dtype in ((caches[0], BF16), (caches[0], FP16), (caches[1], BF16)):
            with autocast("cpu", dtype, cache=cache):
                losses.append(model(torch.ones(2, 4)).float().sum())
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(mine[model[0].weight], model[0].weight.detach().half())
        for cache in caches:
            assert_right(cache)
    # In the first cache three of four bfloat16 casts are written in the launch, in the second none.
    assert [cache.info().misses for cache in caches] == [8 + 3 * 5, 4 + 3 * 4]


def test_two_optimizers_of_one_cache() -> None:
    model, cache = model_of(), WeightCache()
    optimizers = [
        ampkit.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1),
        torch.optim.SGD(model[1].parameters(), lr=0.1),
    ]
    for optimizer in optimizers[:2]:
        cache.follow(optimizer)
    for n in range(3):
        before = cache.info().misses
        with autocast("cpu", cache=cache):
            model(torch.ones(2, 4)).float().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert cache.info().misses - before == (2 if n else 4)
        assert_right(cache)


def test_weights_that_one_of_two_optimizers_holds_and_does_not_follow() -> None:
    """Its step outdates what the other wrote."""
    leaf, cache = Parameter(torch.ones(4, 4)), WeightCache(verify=True)
    followed, other = ampkit.optim.SGD([leaf], lr=0.5), torch.optim.SGD([leaf], lr=0.5, fused=True)
    cache.follow(followed)
    for _ in range(3):
        with autocast("cpu", cache=cache):
            torch.mm(torch.ones(2, 4), leaf).float().sum().backward()
        followed.step()
        other.step()
    assert cache.info().misses == 3


def test_cast_that_no_region_used_since_the_last_step_is_dropped() -> None:
    for kind in OPTIMIZERS:
        first, second = Parameter(torch.ones(4, 4)), Parameter(torch.ones(4, 4))
        optimizer, cache = OPTIMIZERS[kind]([first, second]), WeightCache()
        cache.follow(optimizer)
        first.grad, second.grad = torch.ones(4, 4), torch.ones(4, 4)
        for used in ((first, second), (first,), (first,)):
            with autocast("cpu", cache=cache):
                for leaf in used:
                    torch.mm(torch.ones(2, 4), leaf)
            optimizer.step()
        assert cache.info().entries == 1, kind


def test_bounded_caches_and_memory() -> None:
    """The memory of a cast stays where it is; a bound holds."""
    model, cache = model_of(), WeightCache(max_bytes=80)
    optimizer = ampkit.optim.AdamW(model.parameters(), lr=0.1)
    cache.follow(optimizer)
    train(model, optimizer, cache)
    assert cache.info().bytes <= 80
    assert_right(cache)
    whole = WeightCache()
    whole.follow(optimizer)
    train(model, optimizer, whole, 1)
    places = {entry.cast.data_ptr() for entry in whole._entries.values()}
    train(model, optimizer, whole)
    assert {entry.cast.data_ptr() for entry in whole._entries.values()} == places


def test_nothing_is_kept_alive() -> None:
    for kind in OPTIMIZERS:
        model, cache = model_of(), WeightCache()
        optimizer = OPTIMIZERS[kind](model.parameters())
        cache.follow(optimizer)
        train(model, optimizer, cache)
        alive = [weakref.ref(optimizer), *map(weakref.ref, model.parameters())]
        held = weakref.ref(cache)
        twin = copy.deepcopy(optimizer)
        del optimizer, model
        gc.collect()
        assert [ref() for ref in alive] == [None] * 7
        assert cache.info()[:2] == (0, 0)
        del cache
        gc.collect()
        assert held() is None
        del twin


def test_copies_follow_nothing() -> None:
    model, cache = model_of(), WeightCache(max_bytes=1000)
    optimizer = ampkit.optim.AdamW(model.parameters(), lr=0.1)
    cache.follow(optimizer)
    train(model, optimizer, cache, 2)
    for again in (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        twin, twins_model = again((optimizer, model))
        train(twins_model, twin, None, 1)
        other = again(cache)
        assert other.info() == CacheInfo(0, 0, 0, 0)
        assert train(model, optimizer, other, 2) == [4, 4]
    assert train(model, optimizer, cache, 2) == [4, 0]      # unused by then, and dropped


def test_step_that_is_interrupted_while_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    import ampkit_kernels as kernels

    model, cache = model_of(), WeightCache(verify=True)
    optimizer = ampkit.optim.AdamW(model.parameters(), lr=0.1)
    cache.follow(optimizer)
    train(model, optimizer, cache, 2)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "cast_", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, cache, 1)
    optimizer.zero_grad()
    assert train(model, optimizer, cache, 2)[1] == 0


@pytest.mark.parametrize("kind", WRITES_CASTS)
def test_closure_that_opens_regions(kind: str) -> None:
    model, cache = model_of(), WeightCache(verify=True)
    optimizer = OPTIMIZERS[kind](model.parameters())
    cache.follow(optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with autocast("cpu", cache=cache):
            loss = model(torch.ones(2, 4)).float().pow(2).sum()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    assert_right(cache)


def test_step_that_is_captured_into_a_graph_writes_no_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays would write to their memory for ever, whoever has it then; and from then on none is kept."""
    model, cache = model_of(), WeightCache(verify=True)
    optimizer = ampkit.optim.AdamW(model.parameters(), lr=0.1)
    cache.follow(optimizer)
    assert train(model, optimizer, cache, 2) == [4, 0]
    monkeypatch.setattr(optimizer_steps.seen, "captured", False)
    with monkeypatch.context() as patch:
        for module in (optimizer_steps, followed_casts):
            patch.setattr(module, "capturing", lambda: True)
        before = {key: entry.cast.detach().clone() for key, entry in cache._entries.items()}
        train(model, optimizer, cache, 1)
        for key, entry in cache._entries.items():
            assert torch.equal(entry.cast.detach(), before[key])
    assert train(model, optimizer, cache, 2) == [8, 4]


def test_compiled_step() -> None:
    torch._dynamo.reset()
    model, cache = model_of(), WeightCache(verify=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    cache.follow(optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    for n in range(3):
        with autocast("cpu", cache=cache):
            model(torch.ones(2, 4)).float().sum().backward()
        step()
        assert cache.info().misses == 4 * (n + 1)


def test_step_inside_an_open_region() -> None:
    for kind in OPTIMIZERS:
        model, cache = model_of(), WeightCache(verify=True)
        optimizer = OPTIMIZERS[kind](model.parameters())
        cache.follow(optimizer)
        with autocast("cpu", cache=cache):
            for _ in range(4):
                model(torch.ones(2, 4)).float().sum().backward()
                optimizer.step()
        if kind in WRITES_CASTS:
            assert cache.info().misses == 4


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_launches_write_casts_by_plan() -> None:
    """Weights with a cast and those without are two launches, planned once."""
    from ampkit_kernels.triton_ops.steps import Plan

    results, runs = [], []
    run = Plan.run
    for follows in (False, True):
        model, cache = model_of(), WeightCache()
        optimizer = ampkit.optim.AdamW(model.parameters(), lr=0.1, impl="triton")
        if follows:
            cache.follow(optimizer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Plan, "run", lambda self, *args: runs.append(run(self, *args)) or runs[-1])
            made = train(model, optimizer, cache, dtype=FP16)
        assert made == ([4, 0, 0, 0] if follows else [4] * 4)
        assert runs == [True] * (8 if follows else 4)
        runs.clear()
        results.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_no_optimizer() -> None:
    cache = WeightCache()
    for wrong in (None, model_of(), torch.optim.SGD):
        with pytest.raises(TypeError, match=r"follow takes a torch.optim.Optimizer, got .*; of what wraps"):
            cache.follow(wrong)
    assert cache._followed is None
