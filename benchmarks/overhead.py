"""What a region costs per operator, and what opening one costs.

Tensors are tiny, so that the time is overhead. Four ways: no region, torch's own autocast (in C++), ampkit, and a
`TorchDispatchMode` that does nothing, which is the cost of seeing operators from Python at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import Policy, autocast
from benchmarks.case import AMPKIT, SAME_LIST, TORCH, Aim, Case, Side
from benchmarks.timing import Run

Region = Callable[[], contextlib.AbstractContextManager[Any]]
PLAIN, BARE = "no region", "bare dispatch mode"


class PassThrough(TorchDispatchMode):
    """Sees every operator and does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def regions(device: str) -> dict[str, Region]:
    """The regions that are compared, all for bfloat16."""
    same = Policy.torch(device)
    return {
        PLAIN: contextlib.nullcontext,
        BARE: PassThrough,
        TORCH: lambda: torch.autocast(device, torch.bfloat16),
        AMPKIT: lambda: autocast(device, torch.bfloat16),
        SAME_LIST: lambda: autocast(device, torch.bfloat16, policy=same),
    }


def _tensors(device: torch.device, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    return [torch.randn(8, 8, device=device).to(dtype) for _ in range(count)]


def _unlisted(device: torch.device) -> Callable[[], object]:
    a, b = _tensors(device, torch.bfloat16, 2)
    return lambda: torch.add(a, b)


def _composite(device: torch.device) -> Callable[[], object]:
    (a,) = _tensors(device, torch.float32, 1)
    return lambda: a.reshape(4, 16)


def _nothing_to_cast(device: torch.device) -> Callable[[], object]:
    a, b = _tensors(device, torch.bfloat16, 2)
    return lambda: torch.mm(a, b)


def _activations(device: torch.device) -> Callable[[], object]:
    a, b = _tensors(device, torch.float32, 2)
    return lambda: torch.mm(a, b)


def _weight(device: torch.device) -> Callable[[], object]:
    (x,) = _tensors(device, torch.bfloat16, 1)
    layer = torch.nn.Linear(8, 8, device=device)
    # Without a region there is no cast, so the weight must have the input's dtype.
    plain = torch.nn.Linear(8, 8, device=device, dtype=torch.bfloat16)

    def call() -> object:
        chosen = layer if torch.is_autocast_enabled(device.type) else plain
        return functional.linear(x, chosen.weight, chosen.bias)

    return call


def _float32(device: torch.device) -> Callable[[], object]:
    (a,) = _tensors(device, torch.bfloat16, 1)
    return lambda: functional.mse_loss(a, a)


def _promote(device: torch.device) -> Callable[[], object]:
    a, b = _tensors(device, torch.float32, 2)
    return lambda: torch.cat((a, b))


OPERATORS: dict[str, tuple[str, Callable[[torch.device], Callable[[], object]]]] = {
    "add, unlisted": ("an operator that no list names", _unlisted),
    "reshape, unlisted composite": ("a view that no list names", _composite),
    "mm, nothing to cast": ("listed, both inputs bfloat16 already", _nothing_to_cast),
    "mm, two casts": ("listed, both inputs float32: two casts", _activations),
    "linear, cached weight": ("listed, bfloat16 input; weight and bias from the cache", _weight),
    "mse_loss, to float32": ("listed as float32, one input twice", _float32),
    "cat, promote": ("listed as promoting, nothing to cast", _promote),
}


@dataclass(frozen=True, kw_only=True)
class Operator(Case):
    """Calls of one operator inside an open region. One call is one operator."""

    operator: str = ""
    grad: bool = False
    family: str = "operators"
    sample_seconds: float = 2e-3

    def sides(self, device: torch.device) -> dict[str, Side]:
        torch.manual_seed(0)
        found = {}
        for name, region in regions(device.type).items():
            if name == BARE and "weight" in self.operator:
                continue        # the call depends on autocast being on, and a bare mode casts nothing
            call = OPERATORS[self.operator][1](device)
            found[name] = Side(repeated(call, region, grad=self.grad))
        return found


def repeated(call: Callable[[], object], region: Region, *, grad: bool) -> Run:
    """Calls inside one region."""

    def run(calls: int) -> None:
        with torch.set_grad_enabled(grad), region():
            call()      # weights are in the cache from here on
            for _ in range(calls):
                call()

    return run


@dataclass(frozen=True, kw_only=True)
class Entering(Case):
    """Opening and closing a region. One call is one region."""

    way: str = "outermost"
    family: str = "regions"
    sample_seconds: float = 2e-3

    def sides(self, device: torch.device) -> dict[str, Side]:
        same = Policy.torch(device.type)
        dtype, kind = torch.bfloat16, device.type
        makes: dict[str, Callable[[bool], contextlib.AbstractContextManager[Any]]] = {
            TORCH: lambda enabled: torch.autocast(kind, dtype, enabled),
            AMPKIT: lambda enabled: autocast(kind, dtype, enabled),
            SAME_LIST: lambda enabled: autocast(kind, dtype, enabled, policy=same),
        }
        return {name: Side(WAYS[self.way](make)) for name, make in makes.items()}


def _outermost(make: Callable[[bool], contextlib.AbstractContextManager[Any]]) -> Run:
    def run(calls: int) -> None:
        for _ in range(calls):
            with make(True):
                pass

    return run


def _reused(make: Callable[[bool], contextlib.AbstractContextManager[Any]]) -> Run:
    region = make(True)

    def run(calls: int) -> None:
        for _ in range(calls):
            with region:
                pass

    return run


def _island(make: Callable[[bool], contextlib.AbstractContextManager[Any]]) -> Run:
    def run(calls: int) -> None:
        with make(True):
            for _ in range(calls):
                with make(False):
                    pass

    return run


def _decorated(make: Callable[[bool], Any]) -> Run:
    @make(True)
    def function() -> None:
        return None

    def run(calls: int) -> None:
        for _ in range(calls):
            function()

    return run


WAYS: dict[str, Callable[[Callable[[bool], Any]], Run]] = {
    "outermost": _outermost,
    "one object, reused": _reused,
    "island inside": _island,
    "decorated function": _decorated,
}


def cases() -> list[Case]:
    """Every overhead case."""
    # The limit is relative to a mode that sees every operator from Python.
    unlisted = (Aim(AMPKIT, 1.35, BARE),)
    found: list[Case] = [
        Operator(name=name, operator=name, seconds=1.5, aims=unlisted if "unlisted" in name else ())
        for name in OPERATORS
    ]
    name = "linear, cached weight"
    found.append(Operator(name=f"{name}, with autograd", operator=name, grad=True, seconds=1.5))
    return found + [Entering(name=way, way=way, seconds=1.0) for way in WAYS]
