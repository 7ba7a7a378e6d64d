"""What parts of ampkit add to a step in a region: module rules, custom autograd functions, checkpoints, records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampkit import Policy, autocast, custom_bwd, custom_fwd, record_casts
from benchmarks import workloads
from benchmarks.case import AMPKIT, TORCH, Aim, Case, Side
from benchmarks.workloads import loss_of

WIDTH, LAYERS, ROWS = 32, 100, 16

Region = Callable[[], contextlib.AbstractContextManager[Any]]


def _step(model: nn.Module, region: Region, device: torch.device, around: Region = contextlib.nullcontext) -> Side:
    """Forward, in the region, and backward of a model on rows of `WIDTH` numbers."""
    model.to(device)
    x = torch.randn(ROWS, WIDTH, device=device, generator=torch.Generator(device).manual_seed(0))

    def run(calls: int) -> None:
        for _ in range(calls):
            with around():
                with region():
                    loss = model(x).float().sum()
                loss.backward()
            model.zero_grad()

    return Side(run)


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


@dataclass(frozen=True, kw_only=True)
class ModuleRules(Case):
    """A step of 200 modules, some of them bound to float32. Without rules it is torch.amp's job."""

    family: str = "features"
    seconds: float = 1.5

    def sides(self, device: torch.device) -> dict[str, Side]:
        def torch_region() -> Any:
            return torch.autocast(device.type, torch.bfloat16)

        sides = {TORCH: _step(_layers(), torch_region, device)}
        for count in (0, 1, 10, 100):
            model = _layers()
            # Every 2nd, 20th or 200th module: a linear layer.
            keys = [str(n) for n in range(0, 2 * LAYERS, 2 * LAYERS // count)] if count else []
            policy = Policy.default(device.type)
            policy = policy.for_modules(model, dict.fromkeys(keys, torch.float32)) if keys else policy
            region = lambda policy=policy: autocast(device.type, torch.bfloat16, policy=policy)  # noqa: E731
            sides[AMPKIT if count == 0 else f"ampkit, {count} with a rule"] = _step(model, region, device)
        return sides


class _Functions(nn.Module):
    """Ten matrix products by a custom autograd function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.apply_function = function.apply
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = self.apply_function(x, weight)
        return x


def _function(fwd: Any, bwd: Any) -> Any:
    class Product(torch.autograd.Function):
        @staticmethod
        @fwd
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x.mm(weight)

        @staticmethod
        @bwd
        def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            x, weight = ctx.saved_tensors
            return grad.mm(weight.t()), x.t().mm(grad)

    return Product


@dataclass(frozen=True, kw_only=True)
class CustomFunctions(Case):
    """A step of ten custom autograd functions under `custom_fwd` and `custom_bwd`."""

    family: str = "features"
    seconds: float = 1.5

    def sides(self, device: torch.device) -> dict[str, Side]:
        kind = device.type
        theirs = _function(torch.amp.custom_fwd(device_type=kind), torch.amp.custom_bwd(device_type=kind))
        ours = _function(custom_fwd(device_type=kind), custom_bwd(device_type=kind))
        return {
            TORCH: _step(_Functions(theirs), lambda: torch.autocast(kind, torch.bfloat16), device),
            AMPKIT: _step(_Functions(ours), lambda: autocast(kind, torch.bfloat16), device),
        }


@dataclass(frozen=True, kw_only=True)
class Recorded(Case):
    """A step of 200 modules while its casts are recorded."""

    family: str = "features"
    seconds: float = 1.5

    def sides(self, device: torch.device) -> dict[str, Side]:
        def region() -> Any:
            return autocast(device.type, torch.bfloat16)

        return {
            TORCH: _step(_layers(), lambda: torch.autocast(device.type, torch.bfloat16), device),
            AMPKIT: _step(_layers(), region, device),
            "ampkit, record_casts": _step(_layers(), region, device, record_casts),
        }


class _Checkpointed(nn.Module):
    """A decoder whose blocks are recomputed in backward."""

    def __init__(self, model: workloads.Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embedding(ids) + self.model.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.model.head(self.model.norm(x))


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Case):
    """Forward and backward of a four-block transformer whose blocks are checkpointed, not reentrant."""

    family: str = "features"
    seconds: float = 1.5

    def sides(self, device: torch.device) -> dict[str, Side]:
        return {
            TORCH: self._side(lambda: torch.autocast(device.type, torch.bfloat16), device),
            AMPKIT: self._side(lambda: autocast(device.type, torch.bfloat16), device),
        }

    def _side(self, region: Region, device: torch.device) -> Side:
        torch.manual_seed(0)
        model: Any = _Checkpointed(workloads.Decoder(256, WIDTH, 2, 4, 16)).to(device)
        ids = torch.randint(256, (2, 16), device=device)

        def run(calls: int) -> None:
            for _ in range(calls):
                with region():
                    loss = loss_of(model(ids), ids)
                loss.backward()
                model.zero_grad()

        return Side(run)


def cases() -> list[Case]:
    """One case for each part."""
    return [
        ModuleRules(name="module rules, 200 modules", aims=(Aim("ampkit, 1 with a rule", 1.2),)),
        CustomFunctions(name="custom_fwd, 10 functions", aims=(Aim(AMPKIT, 1.2),)),
        Checkpoints(name="checkpoints, d=32", aims=(Aim(AMPKIT, 1.12),)),
        Recorded(name="record_casts, 200 modules", aims=(Aim("ampkit, record_casts", 1.5),)),
    ]
