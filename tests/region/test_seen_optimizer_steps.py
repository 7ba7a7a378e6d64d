"""Which casts an optimizer's step outdates: those of what it may have written, and no others. Never stale."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

import ampkit.optim
from ampkit import WeightCache, autocast
from ampkit.region import optimizer_steps
from tests.helpers.regions import BF16
from tests.helpers.weights import WritesThroughData

X = torch.eye(4, dtype=BF16)
FUSED = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1.0, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1.0, fused=True),
    "ampkit": lambda params: ampkit.optim.AdamW(params, lr=1.0),
}


def weight(*shape: int, frozen: bool = False, value: float = 1.0) -> Parameter:
    return Parameter(torch.full(shape or (4, 4), value), not frozen)


def stepped(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad:
                param.grad = torch.ones_like(param)
    optimizer.step()


class Casts:
    """A cache, and how many casts the weights need in a region of it."""

    def __init__(self, *weights: Parameter) -> None:
        self.cache = WeightCache()
        self.weights = weights
        self.made()

    def made(self) -> list[int]:
        """Which of the weights are cast anew now; and each cast is right."""
        fresh = []
        with autocast("cpu", cache=self.cache):
            for n, leaf in enumerate(self.weights):
                before = self.cache.info().misses
                assert torch.equal(torch.mm(X, leaf).detach(), leaf.detach().to(BF16)), f"weight {n} is stale"
                if self.cache.info().misses > before:
                    fresh.append(n)
        return fresh


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("everything", [False, True])
def test_frozen_base_is_cast_once_and_a_head_once_per_step(kind: str, everything: bool) -> None:
    """Also where the optimizer was given the frozen parameters too."""
    base = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))).requires_grad_(False)
    model = nn.Sequential(base, nn.Linear(8, 3))
    optimizer, cache = FUSED[kind]((model if everything else model[1]).parameters()), WeightCache()
    made = []
    for _ in range(4):
        before = cache.info().misses
        with autocast("cpu", cache=cache):
            loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        optimizer.step()
        made.append(cache.info().misses - before)
    assert made == [12, 2, 2, 2]
    assert cache.info().entries == 10


def test_step_of_one_optimizer_leaves_what_another_trains() -> None:
    """A discriminator's step, and the generator's casts; until the second is known, on the safe side."""
    generator, discriminator = weight(), weight()
    theirs, ours = torch.optim.SGD([generator], fused=True), torch.optim.SGD([discriminator], fused=True)
    casts = Casts(generator, discriminator)
    stepped(ours)
    assert casts.made() == [0, 1]
    stepped(theirs)
    assert casts.made() == [0]
    stepped(ours)
    assert casts.made() == [1]
    del theirs
    stepped(ours)
    assert casts.made() == [0, 1]


# What is written around a step in ways that nobody sees


def masters(p: Parameter) -> Callable[[], None]:
    """Weights that train, by way of copies that the optimizer holds."""
    master = weight()
    optimizer = torch.optim.SGD([master], lr=1.0)

    def step() -> None:
        stepped(optimizer)
        p.data.copy_(master.data)

    return step


def average(p: Parameter) -> Callable[[], None]:
    """A teacher, a target network, a moving average: frozen, and of the shape of what it follows."""
    p.requires_grad_(False)
    student = weight(value=9.0)
    optimizer = torch.optim.SGD([student], lr=1.0, fused=True)

    def step() -> None:
        stepped(optimizer)
        p.data.mul_(0.5).add_(student.data, alpha=0.5)

    return step


def target_that_requires_grad(p: Parameter) -> Callable[[], None]:
    """As reinforcement learning has them, which forget to freeze it."""
    optimizer = torch.optim.SGD([weight(3)], lr=1.0)

    def step() -> None:
        stepped(optimizer)
        p.data.mul_(0.5)

    return step


class WritesOthers(torch.optim.SGD):
    """An optimizer that writes a weight that is in no group of its own."""

    def __init__(self, params: Any, other: Parameter) -> None:
        super().__init__(params, lr=1.0)
        self.other = other

    def step(self, closure: Any = None) -> None:
        self.other.data.mul_(2)


def subclass(p: Parameter) -> Callable[[], None]:
    p.requires_grad_(False)
    optimizer = WritesOthers([weight(3)], p)
    return lambda: stepped(optimizer)


def of_its_own_hook(p: Parameter) -> Callable[[], None]:
    p.requires_grad_(False)
    optimizer = torch.optim.SGD([weight(3)])
    optimizer.register_step_post_hook(lambda *_: p.data.mul_(2))
    return lambda: stepped(optimizer)


def of_everybodys_hook(p: Parameter) -> Callable[[], None]:
    p.requires_grad_(False)
    optimizer = torch.optim.SGD([weight(3)])

    def write(*_: Any) -> None:
        p.data.mul_(2)

    def step() -> None:
        hook = register_optimizer_step_post_hook(write)
        stepped(optimizer)
        hook.remove()

    return step


def frozen_with_a_gradient(p: Parameter) -> Callable[[], None]:
    """Frozen after backward: optimizers look at gradients alone."""
    optimizer = torch.optim.SGD([p], lr=1.0, fused=True)

    def step() -> None:
        p.requires_grad_(False)
        p.grad = torch.ones_like(p)
        optimizer.step()

    return step


def unfrozen(p: Parameter) -> Callable[[], None]:
    """In the optimizer from the beginning, stepped later."""
    p.requires_grad_(False)
    optimizer = torch.optim.SGD([p], lr=1.0, fused=True)

    def step() -> None:
        optimizer.step()
        p.requires_grad_()
        stepped(optimizer)

    return step


def put_in_later(p: Parameter) -> Callable[[], None]:
    optimizer = torch.optim.SGD([weight(3)], lr=1.0, fused=True)

    def step() -> None:
        stepped(optimizer)
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [p]})
        stepped(optimizer)

    return step


def by_an_alias(p: Parameter) -> Callable[[], None]:
    """Another parameter in the same memory, of another shape."""
    p.requires_grad_(False)
    alias = Parameter(p.data.view(-1))
    optimizer = torch.optim.SGD([alias], lr=1.0, fused=True)
    return lambda: stepped(optimizer)


def through_data(p: Parameter) -> Callable[[], None]:
    optimizer = WritesThroughData([p])
    return lambda: stepped(optimizer)


def flat(p: Parameter) -> Callable[[], None]:
    """As sharding engines step: one flat parameter, of which weights are pieces."""
    whole = Parameter(torch.ones(32))
    p.data = whole.data[:16].view(4, 4)
    optimizer = torch.optim.SGD([whole], lr=1.0, fused=True)
    return lambda: stepped(optimizer)


def one_for_each_parameter(p: Parameter) -> Callable[[], None]:
    """Steps within backward."""
    optimizers = [torch.optim.SGD([leaf], lr=1.0, fused=True) for leaf in (weight(), p)]
    return lambda: [stepped(optimizer) for optimizer in optimizers] and None


def interrupted(p: Parameter) -> Callable[[], None]:
    class Interrupted(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            p.data.mul_(2)
            raise KeyboardInterrupt

    optimizer = Interrupted([weight(3)], {})

    def step() -> None:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()

    return step


WRITERS = (
    masters, average, target_that_requires_grad, subclass, of_its_own_hook, of_everybodys_hook, frozen_with_a_gradient,
    unfrozen, put_in_later, by_an_alias, through_data, flat, one_for_each_parameter, interrupted,
)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_what_a_step_may_have_written_is_cast_anew(writer: Callable[[Parameter], Callable[[], None]]) -> None:
    leaf = weight()
    step = writer(leaf)
    casts = Casts(leaf)
    for _ in range(3):
        before = leaf.detach().clone()
        step()
        assert not torch.equal(leaf.detach(), before), "this writes nothing"
        casts.made()


@pytest.mark.parametrize("writer", [*WRITERS[:6], through_data, interrupted], ids=lambda writer: writer.__name__)
def test_what_a_step_may_have_written_in_an_open_region(writer: Callable[[Parameter], Callable[[], None]]) -> None:
    leaf = weight()
    step = writer(leaf)
    with autocast("cpu", cache=WeightCache()):
        for _ in range(3):
            assert torch.equal(torch.mm(X, leaf).detach(), leaf.detach().to(BF16))
            step()


def test_step_of_an_alias_in_an_open_region() -> None:
    """What stays is looked over: whoever else has its memory may be what was stepped."""
    leaf = weight()
    theirs = torch.optim.SGD([leaf])
    stepped(theirs)
    with autocast("cpu", cache=WeightCache()):
        torch.mm(X, leaf)
        stepped(torch.optim.SGD([Parameter(leaf.data.view(-1))], lr=1.0, fused=True))
        alias = leaf.data
        assert torch.equal(torch.mm(X, leaf).detach(), leaf.detach().to(BF16))
        del alias


def test_casts_made_in_the_closure_of_a_step() -> None:
    """It is evaluated within the step, before the weights are written."""
    base, head = weight(frozen=True), weight(4, 2)
    optimizer = torch.optim.SGD([head], lr=1.0, fused=True)
    casts = Casts(base, head)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with autocast("cpu", cache=casts.cache):
            loss = torch.mm(torch.mm(X, base), head).float().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert casts.made() == [1]


def test_cast_made_while_another_thread_steps_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the cast itself is where the other thread's step comes to its end."""
    from ampkit.region import weight_cache

    leaf, cache = weight(), WeightCache()
    optimizer, recorded = torch.optim.SGD([leaf], lr=1.0, fused=True), weight_cache.recorded

    def slow(*args: Any) -> Tensor:
        made = recorded(*args)
        stepped(optimizer)
        return made

    monkeypatch.setattr(weight_cache, "recorded", slow)
    with autocast("cpu", cache=cache):
        torch.mm(X, leaf)
        monkeypatch.undo()
        assert torch.equal(torch.mm(X, leaf).detach(), leaf.detach().to(BF16))


def test_frozen_weight_that_is_written_is_still_seen() -> None:
    """Between steps as ever: by version, by address, by whoever else has its memory."""
    module = nn.Linear(4, 4, bias=False).requires_grad_(False)
    base = module.weight
    casts, optimizer = Casts(base), torch.optim.SGD([weight(3)])
    for write in (
        lambda: base.add_(1), lambda: setattr(base, "data", base.data + 1),
        lambda: module.load_state_dict({"weight": torch.ones(4, 4)}),
    ):
        stepped(optimizer)
        assert casts.made() == []
        write()
        stepped(optimizer)
        assert casts.made() == [0]


def test_interrupt_while_caches_are_told_drops_every_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    leaf, optimizer = weight(), torch.optim.SGD([weight(3)])
    casts = Casts(leaf)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(optimizer_steps.Step, "outdates_unwritten", interrupt)
        with pytest.raises(KeyboardInterrupt):
            stepped(optimizer)
    assert casts.cache.info().entries == 0


def test_graph_captured_before_anybody_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold a step, whose replays call no hook: nothing is kept from region to region."""

    class Graph:
        """Of a GPU that is not there."""

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
        monkeypatch.setattr(optimizer_steps, name, lambda hook: None)
    leaf, graphs = weight(), []
    for expected in ([], [0]):
        monkeypatch.setattr(optimizer_steps.seen, "watched", False)
        monkeypatch.setattr(optimizer_steps.seen, "captured", False)
        assert Casts(leaf).made() == expected
        graphs.append(Graph())


def test_copies_of_an_optimizer_are_optimizers_of_their_own() -> None:
    leaf = weight()
    optimizer = torch.optim.SGD([leaf], lr=1.0, fused=True)
    stepped(optimizer)
    twin = copy.deepcopy(optimizer)
    casts = Casts(leaf, twin.param_groups[0]["params"][0])
    stepped(twin)
    assert casts.made() == [1]


# Compiled steps


@pytest.mark.parametrize("whole", [False, True], ids=["step", "a function around it"])
def test_compiled_step_outdates_what_it_may_have_written(whole: bool) -> None:
    torch._dynamo.reset()
    base, head, other = weight(frozen=True), weight(4, 2), weight(4, 3)
    optimizer = torch.optim.SGD([head], lr=1.0, fused=True)
    others = torch.optim.SGD([other], lr=1.0)
    stepped(others)

    def step() -> None:
        optimizer.step()

    compiled = torch.compile(step if whole else optimizer.step, backend="eager")
    casts = Casts(base, head, other)
    for _ in range(4):
        head.grad = torch.ones_like(head)
        compiled()
        assert casts.made() == [1]
    assert not optimizer_steps.untold


def test_two_compiled_steps_between_two_regions() -> None:
    torch._dynamo.reset()
    base, heads = weight(frozen=True), [weight(4, 2), weight(4, 3)]
    optimizers = [torch.optim.SGD([head], lr=1.0, fused=True) for head in heads]
    compiled = [torch.compile(optimizer.step, backend="eager") for optimizer in optimizers]
    casts = Casts(base, *heads)
    for head in heads:
        head.grad = torch.ones_like(head)
    for _ in range(3):
        for step in compiled:
            step()
        assert casts.made() == [1, 2]


def test_compiled_step_of_an_optimizer_that_is_gone() -> None:
    """Nobody can say what it wrote."""
    base = weight(frozen=True)
    casts = Casts(base)
    optimizer = torch.optim.SGD([head := weight(4, 2)], lr=1.0)
    flag = optimizer_steps._flag_of(id(optimizer))
    setattr(optimizer_steps._flags, flag, True)
    del optimizer, head
    assert casts.made() == [0]
