"""The matrix: programs that mix a region with something else torch does, and what must hold of each.

A program is a function of a region that returns tensors. It runs under torch.autocast and under ampkit with torch's
list, which must agree to the bit; and under ampkit's default policy, which must be as near to float32 as bfloat16
allows.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import ampkit
from ampkit import Policy

Region = Callable[[], contextlib.AbstractContextManager[Any]]

# torch's own: what forward-mode differentiation, linearize and nested tensors say when they are used.
QUIET = [
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is (deprecated|not supported)"),
    pytest.mark.filterwarnings(r"ignore:Attempted to insert a get_attr Node:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]


def native() -> contextlib.AbstractContextManager[Any]:
    """torch.autocast."""
    return torch.autocast("cpu", torch.bfloat16)


def ours() -> contextlib.AbstractContextManager[Any]:
    """ampkit's region with torch's list."""
    return ampkit.autocast("cpu", torch.bfloat16, policy=Policy.torch("cpu"))


def default() -> contextlib.AbstractContextManager[Any]:
    """ampkit's region as it comes."""
    return ampkit.autocast("cpu", torch.bfloat16)


class Net(nn.Module):
    """Linear, layer norm, tanh, linear: (..., 6) to (..., 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.norm(self.enter(x))))


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of a model's parameters, those without one left out."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def weights() -> tuple[Tensor, Tensor, Tensor]:
    """An input and two weight matrices, leaves without gradients, for functional transforms."""
    return torch.randn(4, 6), torch.randn(8, 6) / 3, torch.randn(3, 8) / 3


class Program(NamedTuple):
    """One program."""

    name: str
    function: Callable[[Region], Any]

    def run(self, region: Region) -> list[Tensor]:
        """Every tensor in the program's answer, from the same seed."""
        torch.manual_seed(0)
        found = [leaf.detach() for leaf in tree_leaves(self.function(region)) if isinstance(leaf, Tensor)]
        assert found, "the program returned nothing to compare"
        return found

    def check_bits(self) -> None:
        """Under torch's list the program has torch.autocast's bits."""
        expected, got = self.run(native), self.run(ours)
        assert [value.dtype for value in got] == [value.dtype for value in expected]
        different = [index for index, pair in enumerate(zip(got, expected, strict=True)) if not torch.equal(*pair)]
        assert not different, f"values {different} of {len(got)} differ"
        assert not torch.is_autocast_enabled("cpu")

    def check_near_float32(self) -> None:
        """Under the default policy the program computes what it computes in float32, up to bfloat16's error."""
        exact, got = self.run(contextlib.nullcontext), self.run(default)
        assert len(got) == len(exact)
        for value, wanted in zip(got, exact, strict=True):
            assert value.shape == wanted.shape
            if wanted.is_floating_point():
                error = (value.double() - wanted.double()).norm()
                assert error <= 0.06 * wanted.double().norm() + 1e-3, (value, wanted)


class Programs(list[Program]):
    """The programs of a file; `add` is a decorator."""

    def add(self, function: Callable[[Region], Any]) -> Callable[[Region], Any]:
        """Add a function."""
        self.append(Program(function.__name__, function))
        return function
