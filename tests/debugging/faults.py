"""Faults drawn at random, each with what a report must say of it; and an intervention that checks what it says.

A network of blocks computes in one precision. One call of one block goes through an operator that cannot cope with
its input there. What is expected comes from how the fault was built; whether the named operator is to blame is
decided by changing its result in a run of its own, with no part of the tool.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

WIDTH = 8
# name: (the operator that fails, what makes it of a healthy x around 1, whether a wider dtype would help)
OPERATORS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor], bool]] = {
    "mul": ("aten::mul.Tensor", lambda x, big: x * big, True),
    "add": ("aten::add.Tensor", lambda x, big: big + big, True),
    "sub": ("aten::sub.Tensor", lambda x, big: -big - big, True),
    "mm": ("aten::mm", lambda x, big: x @ big, True),
    "bmm": ("aten::bmm", lambda x, big: torch.bmm(x[None], big[None])[0], True),
    "square": ("aten::pow.Tensor_Scalar", lambda x, big: big.square(), True),
    "pow": ("aten::pow.Tensor_Scalar", lambda x, big: big.pow(3), True),
    "cumsum": ("aten::cumsum", lambda x, big: big.cumsum(-1), True),
    "sum": ("aten::sum.dim_IntList", lambda x, big: big.sum(-1, keepdim=True) + x, True),
    "prod": ("aten::prod.dim_int", lambda x, big: big.prod(-1, keepdim=True) + x, True),
    "addcmul": ("aten::addcmul", lambda x, big: torch.addcmul(x, big, big), True),
    "lerp": ("aten::lerp.Scalar", lambda x, big: torch.lerp(big, x, -3.0), True),
    "in-place": ("aten::mul_.Tensor", lambda x, big: big.clone().mul_(big), True),
    "in-place slice": ("aten::mul_.Tensor", lambda x, big: _on_a_slice(big), True),
    "division": ("aten::div.Tensor", lambda x, big: big / (x * 0 + 0.001), True),
    "exp": ("aten::exp", lambda x, big: (x * 0 + 95).exp(), True),
    "cosh": ("aten::cosh", lambda x, big: (x * 0 + 95).cosh(), True),
    "expm1": ("aten::expm1", lambda x, big: (x * 0 + 95).expm1(), True),
    "pole": ("aten::div.Tensor", lambda x, big: x / (x * 0), False),
    "log": ("aten::log", lambda x, big: (x * 0).log(), False),
    "rsqrt": ("aten::rsqrt", lambda x, big: (x * 0).rsqrt(), False),
    "reciprocal": ("aten::reciprocal", lambda x, big: (x * 0).reciprocal(), False),
    "sqrt": ("aten::sqrt", lambda x, big: (x * 0 - 1).sqrt(), False),
    "acos": ("aten::acos", lambda x, big: (x * 0 + 2).acos(), False),
    "atanh": ("aten::atanh", lambda x, big: (x * 0 + 1).atanh(), False),
    "fmod": ("aten::fmod.Tensor", lambda x, big: torch.fmod(x, x * 0), False),
}
LIMITS = {torch.float16: 65504.0, torch.bfloat16: 3.3895e38, torch.float32: 3.4028e38}


def _on_a_slice(big: Tensor) -> Tensor:
    out = big.clone()
    out[:, 0] = 1
    out[:, 1:].mul_(big[:, 1:])
    return out


def apply(name: str, x: Tensor) -> Tensor:
    """The operator on a healthy x, with a partner close to the end of its dtype."""
    big = torch.full((WIDTH, WIDTH), LIMITS[x.dtype] * 0.75, dtype=x.dtype) if x.numel() else x
    return OPERATORS[name][1](x, big)


class InBackward(torch.autograd.Function):
    """The identity, with an operator applied to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:    # type: ignore[override]
        return apply(ctx.name, grad * 0 + 1.5), None


class Block(nn.Module):
    """A linear layer and a norm; an armed one goes wrong in one of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fault = Fault()

    def forward(self, x: Tensor) -> Tensor:
        return self.fault(torch.tanh(self.linear(x)))   # type: ignore[no-any-return]


class Fault(nn.Module):
    """Where it goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.direction = "forward"
        self.in_call = 1
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.name or (not torch.is_grad_enabled() and self.direction == "backward"):
            return x
        self.calls += 1
        if self.calls != self.in_call:
            return x
        if self.direction == "backward":
            return InBackward.apply(x, self.name)   # type: ignore[no-any-return]
        return x * 0.5 + apply(self.name, x.detach() * 0 + 1.5) * 0.5   # detached: one fault, not a second in backward


class Plain(torch.optim.Optimizer):
    """Gradient descent that applies an operator to its update."""

    def __init__(self, parameters: Any, name: str) -> None:
        super().__init__(parameters, {})
        self.name = name

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:    # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if self.name and parameter.shape == (WIDTH, WIDTH):
                    parameter.add_(apply(self.name, parameter.grad * 0 + 1.5), alpha=-0.01)
                else:
                    parameter.add_(parameter.grad, alpha=-0.01)


@dataclass(frozen=True)
class Drawn:
    """One fault."""

    seed: int
    name: str
    direction: Literal["forward", "backward", "optimizer"]
    dtype: torch.dtype
    depth: int
    place: int
    calls: int
    in_call: int
    recompute: Literal["no", "reentrant", "non-reentrant"]
    optimizer: str

    @property
    def op(self) -> str:
        return OPERATORS[self.name][0]

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("overflow", "too large") if OPERATORS[self.name][2] else ("undefined",)

    @property
    def lines(self) -> range:
        """Where the operator stands in this file."""
        code = _on_a_slice if self.name == "in-place slice" else OPERATORS[self.name][1]
        source, first = inspect.getsourcelines(code)
        return range(first, first + len(source))

    def build(self) -> tuple[nn.Module, Callable[[], Tensor]]:
        """The model, and its step, which starts from where the model is and returns the loss."""
        torch.manual_seed(self.seed)
        blocks = nn.ModuleList(Block() for _ in range(self.depth))
        model = Network(blocks, self.calls, self.recompute).to(self.dtype)
        fault = blocks[self.place].fault
        assert isinstance(fault, Fault)
        if self.direction != "optimizer":
            fault.name, fault.direction = self.name, self.direction
            fault.in_call = self.in_call
        x = torch.rand(WIDTH, WIDTH).to(self.dtype)
        named = self.name if self.direction == "optimizer" else ""
        optimizer: torch.optim.Optimizer
        if self.optimizer == "plain" or named:
            optimizer = Plain(model.parameters(), named)
        elif self.optimizer == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, foreach=self.optimizer == "foreach")

        def step() -> Tensor:
            fault.calls = 0
            optimizer.zero_grad()
            loss = model(x).float().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, step


class Network(nn.Module):
    """Blocks one after the other, `calls` times over."""

    def __init__(self, blocks: nn.ModuleList, calls: int, recompute: str) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = blocks
        self.calls = calls
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for _ in range(self.calls):
            for block in self.blocks:
                if self.recompute == "no":
                    x = block(x)
                else:
                    x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")   # type: ignore[assignment]
        return x


def draw(seed: int) -> Drawn:
    """A fault of a seed."""
    at = random.Random(seed)
    direction: Any = at.choice(["forward", "forward", "backward", "optimizer"])
    depth, calls = at.randint(1, 4), at.choice([1, 1, 2, 3])
    dtype = at.choice([torch.float16, torch.bfloat16, torch.float32])
    names = [name for name in OPERATORS if dtype == torch.float16 or name != "division"]
    # A block that counts its calls cannot tell a recompute from a call: one call where it is recomputed.
    recompute: Any = at.choice(["no", "reentrant", "non-reentrant"]) if calls == 1 and direction != "forward" else "no"
    return Drawn(
        seed, at.choice(names), direction, dtype, depth, at.randrange(depth), calls, at.randint(1, calls), recompute,
        at.choice(["sgd", "foreach", "loop", "plain"]),
    )


class Intervene(TorchDispatchMode):
    """Runs a step with the result of one operator call replaced by its float64 result, as far as the dtype holds it."""

    def __init__(self, index: int, is_view: Callable[[Any], bool]) -> None:
        super().__init__()
        self.index, self.is_view = index, is_view
        self.count = 0
        self.op = ""
        self.inputs_finite = self.output_finite = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_view(func):
            return func(*args, **(kwargs or {}))
        self.count += 1
        if self.count - 1 != self.index:
            return func(*args, **(kwargs or {}))
        self.op = func.name()
        given = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        floats = [one for one in given if one.is_floating_point()]
        self.inputs_finite = all(bool(one.isfinite().all()) for one in floats)

        def widened(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.double() if value.is_floating_point() else value
            return torch.float64 if isinstance(value, torch.dtype) else value

        wide_args, wide_kwargs = torch.utils._pytree.tree_map(widened, (args, kwargs or {}))
        exact = func(*wide_args, **wide_kwargs)
        result = func(*args, **(kwargs or {}))
        target = args[0] if func._schema.is_mutable else result
        self.output_finite = bool(target.isfinite().all())
        limit = torch.finfo(target.dtype).max
        fits = exact.abs() <= limit
        target.copy_(torch.where(fits, exact, torch.nan_to_num(exact, 0.0, limit, -limit).clamp(-limit, limit) / 1e3))
        return result


def broken(model: nn.Module, loss: Tensor) -> bool:
    """What a user would see."""
    tensors = [loss, *model.parameters(), *(one.grad for one in model.parameters() if one.grad is not None)]
    return not all(bool(one.isfinite().all()) for one in tensors)
