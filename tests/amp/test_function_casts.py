"""half_function, float_function and promote_function: the dtypes that functions see, and registration."""

import asyncio
import inspect
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampkit import Policy, Rule, amp, autocast
from ampkit.region.stack import thread

LOW, TWICE = torch.bfloat16, "ampkit_function_casts::twice"


def seen(*args: Any, **kwargs: Any) -> list[torch.dtype]:
    """The dtypes of tensors among arguments, and of what a matrix product gives them now."""
    tensors = [*args, *kwargs.values()]
    return [t.dtype for t in tensors] + [torch.mm(tensors[0].reshape(1, 1), tensors[0].reshape(1, 1)).dtype]


@pytest.mark.parametrize(
    ("decorate", "expected"),
    [
        (amp.half_function, [LOW, LOW, LOW, torch.int64, LOW]),
        (amp.float_function, [torch.float32, torch.float32, torch.float32, torch.int64, torch.float32]),
        (amp.promote_function, [torch.float32, torch.float32, torch.float32, torch.int64, LOW]),
    ],
    ids=["half", "float", "promote"],
)
def test_what_a_function_sees(decorate: Callable[..., Any], expected: list[torch.dtype]) -> None:
    x, ids = torch.ones(1), torch.ones(1, dtype=torch.int64)
    args = (x, x.half(), x.to(LOW), ids)
    outside = [torch.float32, torch.float16, LOW, torch.int64, torch.float32]
    function = decorate(seen)
    assert function(*args) == outside
    with autocast("cpu", LOW):
        assert function(*args) == expected
        assert function(x, a=x.half(), b=x.to(LOW), c=ids) == expected
        with amp.disable_casts():
            assert function(*args) == outside
    with autocast("cpu", enabled=False):
        assert function(*args) == outside
    assert function.__name__ == "seen"
    assert function.__wrapped__ is seen


def test_containers_are_looked_into_and_casts_differentiated() -> None:
    """float64 passes."""
    x, wide = torch.ones(2, requires_grad=True), torch.ones(1).double()
    with autocast("cpu", LOW):
        y = amp.half_function(lambda batch: [batch["x"][0] * 2, batch["y"]])({"x": [x], "y": wide})
    y[0].float().sum().backward()
    assert [tensor.dtype for tensor in y] == [LOW, torch.float64]
    assert (x.grad.dtype, x.grad.tolist()) == (torch.float32, [2.0, 2.0])


def test_off_is_what_was_on_and_no_other_device() -> None:
    """The default policy writes a tag that looks like autocast for devices that no torch has."""

    def depth() -> int:
        return len(thread.regions)

    with autocast("cpu", LOW), autocast("xpu", LOW, enabled=False):
        with amp.disable_casts():
            assert depth() == 3
        assert amp.float_function(depth)() == 3


def angles(n: int) -> Tensor:
    """A product of tensors that no argument is."""
    return torch.arange(float(n))[:, None] @ torch.ones(1, 2)


@pytest.mark.parametrize("region", [autocast, torch.autocast])
def test_a_function_without_tensors_computes_in_float32(region: Any) -> None:
    with region("cpu", LOW):
        assert angles(3).dtype is LOW
        assert amp.float_function(angles)(3).dtype is torch.float32


def test_a_generator_computes_in_float32_and_its_caller_does_not() -> None:
    """Wherever it was begun."""
    x = torch.ones(1, 1)

    @amp.float_function
    def powers(x: Tensor) -> Iterator[Tensor]:
        product = x
        while True:
            product = product @ x
            product = product @ (yield product)

    assert inspect.isgeneratorfunction(powers)
    with autocast("cpu", LOW):
        generator = powers(x.to(LOW))
        dtypes = [next(generator).dtype, (x @ x).dtype, generator.send(x).dtype, (x @ x).dtype]
    assert dtypes == [torch.float32, LOW, torch.float32, LOW]
    begun = powers(x)
    next(begun)
    with autocast("cpu", LOW):
        assert begun.send(x).dtype is torch.float32


def test_a_coroutine_computes_in_float32_and_others_do_not() -> None:
    async def products(x: Tensor) -> list[torch.dtype]:
        before = (x @ x).dtype
        await asyncio.sleep(0)
        return [before, (x @ x).dtype]

    async def both() -> Any:
        x = torch.ones(1, 1)
        with autocast("cpu", LOW):
            return await asyncio.gather(amp.float_function(products)(x.to(LOW)), products(x))

    assert inspect.iscoroutinefunction(amp.float_function(products))
    assert asyncio.run(both()) == [[torch.float32] * 2, [LOW] * 2]

    async def streams() -> AsyncIterator[int]:
        yield 1

    with pytest.raises(TypeError, match="got an asynchronous generator function: decorate the functions that it calls"):
        amp.float_function(streams)


class Net(nn.Module):
    """A method in float32 between two layers in 16 bits."""

    def __init__(self, decorate: Callable[..., Any] = amp.float_function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inside, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.mixed = nn.Parameter(torch.rand(4, 4))
        self.decorated = decorate(type(self).between)

    def between(self, x: Tensor, *, more: Any) -> Tensor:
        return (self.inside(x) @ self.mixed).exp() + more["x"][0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.decorated(self, x, more={"x": [x]})).float().square().mean()


def by_hand(between: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Net, x: Tensor, *, more: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return between(self, x.float(), more={"x": [more["x"][0].float()]})

    return call


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def in_region(run: Callable[[Tensor], Tensor], policy: Policy = Policy.default("cpu")) -> Tensor:  # noqa: B008
    with autocast("cpu", LOW, policy=policy):
        return run(X)


def bits(model: nn.Module, loss: Tensor) -> list[Tensor]:
    """The loss and the gradients."""
    loss.backward()
    return [loss.detach(), *[param.grad for param in model.parameters() if param.grad is not None]]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) == 8 and all(map(torch.equal, a, b))


@pytest.mark.parametrize("policy", [Policy.default("cpu"), Policy.torch("cpu")], ids=["default", "torch"])
def test_float32_bits_forward_and_backward(policy: Policy) -> None:
    """Those of torch's own way to write it; also recomputed."""
    hand, net = Net(by_hand), Net()
    wanted = bits(hand, in_region(hand, policy))
    assert same(bits(net, in_region(net, policy)), wanted)
    for reentrant in (False, True):
        net = Net()
        loss = in_region(lambda x: checkpoint(net, x.clone().requires_grad_(), use_reentrant=reentrant), policy)  # noqa: B023
        assert same(bits(net, loss), wanted)


@pytest.mark.parametrize("decorate", [amp.float_function, amp.half_function, amp.promote_function])
def test_compiled_in_one_graph_with_the_bits_of_eager(decorate: Callable[..., Any]) -> None:
    eager, net = Net(decorate), Net(decorate)
    wanted = bits(eager, in_region(eager))
    compiled = torch.compile(lambda: in_region(net), backend="aot_eager", fullgraph=True)
    assert same(bits(net, compiled()), wanted)


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict: bool) -> None:
    net = Net()
    program = torch.export.export(InRegion(net), (X,), strict=strict)
    assert torch.equal(program.module()(X), in_region(net))


class InRegion(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return in_region(self.net)


def test_transforms() -> None:
    product = amp.float_function(lambda x: x @ torch.ones(2, 2))
    x = torch.ones(3, 2, 2, dtype=LOW)
    with autocast("cpu", LOW):
        assert torch.vmap(product)(x).dtype is torch.float32
        assert torch.func.grad(lambda x: product(x).sum())(x[0]).tolist() == [[2.0, 2.0]] * 2


@torch.library.custom_op(TWICE, mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x + x


@pytest.mark.parametrize(
    ("register", "owner", "name", "operator", "rule"),
    [
        (amp.register_half_function, torch, "cumsum", "aten::cumsum", Rule.LOWER),
        (amp.register_half_function, F, "softmax", "aten::softmax.int", Rule.LOWER),
        (amp.register_half_function, F, "cross_entropy", "aten::cross_entropy_loss", Rule.LOWER),
        (amp.register_float_function, torch.Tensor, "mm", "aten::mm", Rule.FLOAT32),
        (amp.register_float_function, torch.linalg, "norm", "aten::linalg_norm", Rule.FLOAT32),
        (amp.register_promote_function, torch.Tensor, "lerp", "aten::lerp.Tensor", Rule.PROMOTE),
        (amp.register_half_function, sys.modules[__name__], "twice", TWICE, Rule.LOWER),
        (amp.register_float_function, torch.ops.ampkit_function_casts, "twice", TWICE, Rule.FLOAT32),
    ],
)
def test_operators_get_rules_and_functions_stay(
    register: Callable[..., None], owner: Any, name: str, operator: str, rule: Rule
) -> None:
    """Of torch and of `torch.library`."""
    function = getattr(owner, name)
    register(owner, name)
    assert getattr(owner, name) is function
    assert Policy.default("cpu").explain(operator).rule is rule


def test_other_functions_are_wrapped_where_they_are_once() -> None:
    module = types.ModuleType("somebody_elses")
    module.fast = lambda x: x.dtype  # type: ignore[attr-defined]
    amp.register_half_function(module, "fast")
    wrapped = module.fast
    amp.register_half_function(module, "fast")
    assert module.fast is wrapped
    with autocast("cpu", LOW):
        assert module.fast(torch.ones(1)) is LOW
    assert module.fast(torch.ones(1)) is torch.float32


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"half_function takes a function, got <class 'torch.nn.modules.linear"):
        amp.half_function(torch.nn.Linear)
    with pytest.raises(TypeError, match="float_function takes a function, got 3"):
        amp.float_function(3)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="torch has no function 'bmmm' to register"):
        amp.register_half_function(torch, "bmmm")
    with pytest.raises(ValueError, match=r"functional.multi_head_attention_forward is not a single operator, and"):
        amp.register_half_function(F, "multi_head_attention_forward")
