"""Random programs whose tensors are used more than once: `Policy.torch` computes torch.amp's bits, gradients included.

Gradients of a tensor with several uses are added up in the order in which autograd recorded them, so the order of the
casts shows in the last bits. Tensors here are given twice to one operator, shared by operators and used again
afterwards, inside transforms of `torch.func` too.
"""

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vmap

from ampkit import Policy, autocast, record_casts

SEEDS = 150     # of the normal run; AMPKIT_SOAK_SECONDS goes on from there
N = 4           # every tensor is (N, N, N) before the transforms

Operator = Callable[..., Tensor]

# Each takes tensors of shape (N, N, N) and gives one.
OPERATORS: dict[str, tuple[int, Operator]] = {
    "bmm": (2, torch.bmm),
    "matmul": (2, torch.matmul),
    "baddbmm": (3, torch.baddbmm),
    "addbmm": (3, lambda a, b, c: torch.addbmm(a[0], b, c).expand(N, N, N)),
    "addmm": (3, lambda a, b, c: torch.addmm(a[0], b[1], c[2]).expand(N, N, N)),
    "mm": (2, lambda a, b: torch.mm(a[1], b[1]).expand(N, N, N)),
    "linear": (2, lambda a, b: F.linear(a, b[0])),
    "linear_bias": (3, lambda a, b, c: F.linear(a, b[0], c[0, 0])),
    "einsum": (2, lambda a, b: torch.einsum("bij,bkj->bik", a, b)),
    "attention": (3, F.scaled_dot_product_attention),
    "conv1d": (3, lambda a, b, c: F.conv1d(a, b, c[0, 0], padding=2)[..., :N]),
    "conv_transpose1d": (2, lambda a, b: F.conv_transpose1d(a, b)[..., :N]),
    "prelu": (2, lambda a, b: F.prelu(a, b[0, 0])),
    "cdist": (2, lambda a, b: torch.cdist(a, b)),
    "mse": (2, lambda a, b: a + F.mse_loss(a, b)),
    "smooth_l1": (2, lambda a, b: b + F.smooth_l1_loss(a, b)),
    "kl": (2, lambda a, b: a + F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")),
    "cat": (3, lambda a, b, c: torch.cat([a, b, c])[1:N + 1]),
    "stack": (2, lambda a, b: torch.stack([a, b]).sum(0)),
    "index_copy": (2, lambda a, b: torch.index_copy(a, 0, torch.tensor([1, 0]), b[:2])),
    "gru_cell": (3, lambda a, b, c: torch.gru_cell(a[0], b[0], c.reshape(-1, N)[:3 * N], a.reshape(-1, N)[:3 * N])
                 .expand(N, N, N)),
    "add": (2, torch.add),
    "mul": (2, torch.mul),
    "tanh": (1, torch.tanh),
    "copy": (1, lambda a: a * 1.0),
    "norm": (1, lambda a: F.layer_norm(a, (N,))),
    "softmax": (1, lambda a: a.softmax(-1)),
    "low": (1, lambda a: a.to(torch.get_autocast_dtype("cpu"))),
    "float": (1, torch.Tensor.float),
}
# These fail under transforms in torch itself, or batch other dimensions.
PLAIN_ONLY = {"index_copy", "gru_cell", "cdist", "kl"}

Region = Callable[[torch.dtype], Any]


def native(dtype: torch.dtype) -> Any:
    return torch.autocast("cpu", dtype)


def ours(dtype: torch.dtype) -> Any:
    return autocast("cpu", dtype, policy=Policy.torch("cpu"))


def recorded(dtype: torch.dtype) -> Any:
    """With the kernels that handle any operator, which a region has while its casts are recorded."""
    stack = contextlib.ExitStack()
    stack.enter_context(record_casts())
    stack.enter_context(ours(dtype))
    return stack


Step = tuple[str, tuple[int, ...]]


class Program:
    """Operators and the tensors each is given, by number: leaves and inputs first, then results."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.seed = seed
        self.dtype = draw.choice((torch.bfloat16, torch.float16))
        self.transform = draw.choice(("none", "none", "vmap", "grad", "jvp", "vmap_of_grad"))
        names = [name for name in OPERATORS if self.transform == "none" or name not in PLAIN_ONLY]
        self.steps: list[Step] = []
        n = 4
        for _ in range(draw.randint(2, 6)):
            name = draw.choice(names)
            few = [draw.randrange(n) for _ in range(draw.randint(1, 2))]      # so that some are given twice
            self.steps.append((name, tuple(draw.choice(few) for _ in range(OPERATORS[name][0]))))
            n += 1
        self.reused = [draw.randrange(n) for _ in range(draw.randint(1, 4))]     # after the transform, or at its end

    def __repr__(self) -> str:
        return f"{self.transform} of {self.steps}, then {self.reused}, {self.dtype}, seed {self.seed}"

    def body(self, leaves: Sequence[Tensor], x: Tensor) -> Tensor:
        values = [*leaves, x, x * 1.0]
        for name, places in self.steps:
            values.append(OPERATORS[name][1](*(values[place] for place in places)))
        return torch.stack([values[place].float() for place in self.reused]).sum(0) + values[-1].float()

    def run(self, region: Region) -> list[Tensor]:
        """The result and the gradients of the leaves."""
        torch.manual_seed(self.seed)
        leaves = [torch.randn(N, N, N, requires_grad=True) for _ in range(2)]
        x = torch.randn(N, N, N, requires_grad=True)
        with region(self.dtype):
            out = self.transformed(leaves, x)
            out = out + torch.bmm(leaves[0], out) + out @ leaves[1]
        (out.float().sin().sum() * 8).backward()
        return [out.detach(), *(torch.zeros(1) if each.grad is None else each.grad for each in (*leaves, x))]

    def transformed(self, leaves: Sequence[Tensor], x: Tensor) -> Tensor:
        if self.transform == "vmap":
            return vmap(lambda row: self.body(leaves, row))(torch.stack([x, x * 2]))[1]
        if self.transform == "grad":
            found = grad(lambda leaf, x: self.body((leaf, leaves[1]), x).sum(), (0, 1))(leaves[0], x)
            return found[0] + found[1]
        if self.transform == "jvp":
            return sum(jvp(lambda x: self.body(leaves, x), (x,), (x.detach().cos(),)), torch.zeros(()))
        if self.transform == "vmap_of_grad":
            per_sample = vmap(grad(lambda leaf, x: self.body((leaf, leaves[1]), x).sum()), (None, 0))
            return per_sample(leaves[0], torch.stack([x, x * 2]))[1]
        return self.body(leaves, x)


def attempt(program: Program, region: Region) -> list[Tensor] | None:
    try:
        return program.run(region)
    except RuntimeError:        # promotion of 16-bit types, an operator without a batching rule
        return None


def check(program: Program) -> bool:
    """Compare a program's bits; False where torch.amp refuses it."""
    expected = attempt(program, native)
    if expected is None:
        return False
    for region in (ours, recorded):
        found = program.run(region)
        for name, a, b in zip(("the result", "leaf 0", "leaf 1", "the input"), expected, found, strict=True):
            same = a.dtype is b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
            assert same, f"{name} under {region.__name__} differs: {program!r}"
    return True


def seeds() -> Iterator[int]:
    yield from range(SEEDS)
    end = time.monotonic() + float(os.environ.get("AMPKIT_SOAK_SECONDS", 0))
    for seed in itertools.count(SEEDS):
        if time.monotonic() > end:
            return
        yield seed


@pytest.mark.filterwarnings("ignore")       # of torch's: fallbacks of vmap, casts of scalars
def test_random_programs() -> None:
    compared = [check(Program(seed)) for seed in seeds()]
    assert sum(compared) > len(compared) * 0.8


TWICE = {
    "bmm": lambda y: torch.bmm(y, y) + y,
    "matmul": lambda y: y @ y + y,
    "attention": lambda y: F.scaled_dot_product_attention(y, y, y) + y,
    "linear": lambda y: F.linear(y[0], y[0]) + y[0],
    "baddbmm": lambda y: torch.baddbmm(y, y, y) + y,
    "cdist": lambda y: torch.cdist(y.bfloat16(), y.bfloat16()) + y,
    "conv": lambda y: F.conv1d(y, y, padding=4)[..., :8] + y,
    "keywords": lambda y: F.scaled_dot_product_attention(query=y, key=y, value=y, attn_mask=y) + y,
    "cross_entropy": lambda y: F.cross_entropy(y, y) + y,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TWICE)
def test_tensor_given_twice_and_used_again(name: str, dtype: torch.dtype) -> None:
    """The casts of one operator's arguments are made in torch's order: the last argument first."""
    for seed in range(4):
        found = []
        for region in (native, ours, recorded):
            torch.manual_seed(seed)
            leaf = torch.randn(8, 8, 8, requires_grad=True)
            with region(dtype):
                out = TWICE[name](leaf * 1.0)
            out.float().sin().sum().backward()
            assert leaf.grad is not None
            found.append((out.detach(), leaf.grad))
        for out, gradient in found[1:]:
            assert torch.equal(out, found[0][0])
            assert torch.equal(gradient, found[0][1])
