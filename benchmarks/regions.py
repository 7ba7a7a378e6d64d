"""The cost of a region: for each operator in it, to enter and leave it, and to cast the weights used in it.

Tensors are tiny, so that the time is overhead. Operators run without a region, under torch's own autocast (in C++),
under ampkit, and under a `TorchDispatchMode` that does nothing: the least cost of seeing operators from Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit import Policy, autocast
from benchmarks.case import AMPKIT, OUTER, SAME_LIST, TORCH, Aim, Case, Side
from benchmarks.counts import peak_and_copies
from benchmarks.timing import Run

Region = Callable[[], contextlib.AbstractContextManager[Any]]
PLAIN, BARE = "no region", "bare dispatch mode"
WIDTH = 64  # of the weights that are cast


class PassThrough(TorchDispatchMode):
    """Sees every operator and does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def regions(device: str) -> dict[str, Region]:
    """Return the regions that are compared, all for bfloat16."""
    same = Policy.torch(device)
    return {
        PLAIN: contextlib.nullcontext,
        BARE: PassThrough,
        TORCH: lambda: torch.autocast(device, torch.bfloat16),
        AMPKIT: lambda: autocast(device, torch.bfloat16),
        SAME_LIST: lambda: autocast(device, torch.bfloat16, policy=same),
        OUTER: lambda: _inside_an_outer_region(autocast(device, torch.bfloat16, policy=same)),
    }


@contextlib.contextmanager
def _inside_an_outer_region(region: autocast) -> Any:
    with autocast(region.spec.device_type, enabled=False), region:
        yield


# --- one operator


def _tensors(device: torch.device, dtype: torch.dtype, count: int) -> list[Tensor]:
    return [torch.randn(8, 8, device=device).to(dtype) for _ in range(count)]


def _linear(device: torch.device) -> Callable[[], object]:
    (x,) = _tensors(device, torch.bfloat16, 1)
    layer = torch.nn.Linear(8, 8, device=device)
    # Without a region there is no cast, so the weight must have the input's dtype.
    plain = torch.nn.Linear(8, 8, device=device, dtype=torch.bfloat16)

    def call() -> object:
        chosen = layer if torch.is_autocast_enabled(device.type) else plain
        return functional.linear(x, chosen.weight, chosen.bias)

    return call


# Name: the dtype and the number of the operator's inputs, and the operator.
CALLS: dict[str, tuple[torch.dtype, int, Callable[..., object]]] = {
    "add, unlisted": (torch.bfloat16, 2, torch.add),
    "reshape, unlisted composite": (torch.float32, 1, lambda a: a.reshape(4, 16)),
    "mm, nothing to cast": (torch.bfloat16, 2, torch.mm),
    "mm, two casts": (torch.float32, 2, torch.mm),
    "mse_loss, to float32": (torch.bfloat16, 1, lambda a: functional.mse_loss(a, a)),
    "cat, promote": (torch.float32, 2, lambda a, b: torch.cat((a, b))),
    "layer_norm, not on torch's list": (torch.float32, 1, lambda a: functional.layer_norm(a, (8,))),
}
LINEAR = "linear, cached weight"


@dataclass(frozen=True, kw_only=True)
class Operator(Case):
    """Calls of one operator inside an open region; `disabled`: with torch's autocast disabled inside the region.

    One call is one operator.
    """

    operator: str = ""
    grad: bool = False
    disabled: bool = False
    family: str = "operators"
    seconds: float = 1.5
    sample_seconds: float = 2e-3

    def sides(self, device: torch.device) -> dict[str, Side]:
        torch.manual_seed(0)
        compared = regions(device.type)
        del compared[OUTER]
        if self.operator == LINEAR:
            del compared[BARE]  # the call depends on autocast being on, and a bare mode casts nothing
        return {name: Side(self._repeated(region, device)) for name, region in compared.items()}

    def _repeated(self, region: Region, device: torch.device) -> Run:
        if self.operator == LINEAR:
            call = _linear(device)
        else:
            dtype, count, function = CALLS[self.operator]
            inputs = _tensors(device, dtype, count)
            call = lambda: function(*inputs)  # noqa: E731

        def run(calls: int) -> None:
            inner = torch.autocast(device.type, enabled=False) if self.disabled else contextlib.nullcontext()
            with torch.set_grad_enabled(self.grad), region(), inner:
                call()  # weights are in the cache from here on
                for _ in range(calls):
                    call()

        return run


# --- one region


@dataclass(frozen=True, kw_only=True)
class Entering(Case):
    """Making, entering and leaving a region; `nested`: with autocast disabled, inside an open one."""

    nested: bool = False
    family: str = "regions"
    seconds: float = 1.0
    sample_seconds: float = 2e-3

    def sides(self, device: torch.device) -> dict[str, Side]:
        device_type, same = device.type, Policy.torch(device.type)
        makes: dict[str, Callable[[bool], contextlib.AbstractContextManager[Any]]] = {
            TORCH: lambda enabled: torch.autocast(device_type, torch.bfloat16, enabled),
            AMPKIT: lambda enabled: autocast(device_type, torch.bfloat16, enabled),
            SAME_LIST: lambda enabled: autocast(device_type, torch.bfloat16, enabled, policy=same),
        }
        return {name: Side(self._repeated(make)) for name, make in makes.items()}

    def _repeated(self, make: Callable[[bool], contextlib.AbstractContextManager[Any]]) -> Run:
        def run(calls: int) -> None:
            with make(True) if self.nested else contextlib.nullcontext():
                for _ in range(calls):
                    with make(not self.nested):
                        pass

        return run


# --- casts of weights


@dataclass(frozen=True, kw_only=True)
class WeightCasts(Case):
    """A forward over `weights` matrices of 64 x 64, each used `uses` times in one region, with one row of input.

    The casts are made in each region.
    """

    weights: int = 10
    uses: int = 2
    family: str = "weights"

    def sides(self, device: torch.device) -> dict[str, Side]:
        generator = torch.Generator(device).manual_seed(0)
        weights = [
            torch.nn.Parameter(torch.randn(WIDTH, WIDTH, device=device, generator=generator) / 8)
            for _ in range(self.weights)
        ]
        x = torch.randn(1, WIDTH, device=device, generator=generator).bfloat16()
        ways = regions(device.type)
        return {name: self._side(ways[name], weights, x) for name in (TORCH, AMPKIT, SAME_LIST, OUTER)}

    def _side(self, region: Region, weights: list[torch.nn.Parameter], x: Tensor) -> Side:
        def run(calls: int) -> None:
            for _ in range(calls):
                with region():
                    for _ in range(self.uses):
                        for weight in weights:
                            functional.linear(x, weight)

        return Side(run, facts=lambda: {"casts": peak_and_copies(lambda: run(1), x.device)["copies"]})


def cases() -> list[Case]:
    """Every case of the three kinds."""
    unlisted = (Aim(AMPKIT, 1.35, BARE),)  # relative to a mode that sees every operator from Python
    all_cases: list[Case] = [
        Operator(name=name, operator=name, aims=unlisted if "unlisted" in name else ()) for name in (*CALLS, LINEAR)
    ]
    all_cases += [
        Operator(name=f"{LINEAR}, with autograd", operator=LINEAR, grad=True),
        Operator(name="mm, disabled inside", operator="mm, nothing to cast", disabled=True),
        Entering(name="make, enter and leave"),
        Entering(name="disabled, inside another", nested=True),
    ]
    return all_cases + [WeightCasts(name=f"{count} weights", weights=count) for count in (10, 100, 1000)]
