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


Sides = Callable[[torch.device], dict[str, Side]]


@dataclass(frozen=True, kw_only=True)
class Feature(Case):
    """A step with one part of ampkit. `parts` makes the sides."""

    parts: Sides
    family: str = "features"
    seconds: float = 1.5

    def sides(self, device: torch.device) -> dict[str, Side]:
        return self.parts(device)


def _theirs(device: torch.device) -> Region:
    return lambda: torch.autocast(device.type, torch.bfloat16)


def _ours(device: torch.device, policy: Policy | None = None) -> Region:
    return lambda: autocast(device.type, torch.bfloat16, policy=policy)


def _step(model: nn.Module, region: Region, device: torch.device, around: Region = contextlib.nullcontext) -> Side:
    """Forward, in the region, and backward of a model on rows of `WIDTH` numbers."""
    model.to(device)
    x = torch.randn(ROWS, WIDTH, device=device, generator=torch.Generator(device).manual_seed(0))
    return _side(model, lambda: model(x).float().sum(), region, around)


def _side(model: nn.Module, loss_of_step: Callable[[], Tensor], region: Region, around: Region) -> Side:
    def run(calls: int) -> None:
        for _ in range(calls):
            with around():
                with region():
                    loss = loss_of_step()
                loss.backward()
            model.zero_grad()

    return Side(run)


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


def _module_rules(device: torch.device) -> dict[str, Side]:
    """Return a step of 200 modules, of which some have a rule for float32. torch.amp does the job without rules."""
    sides = {TORCH: _step(_layers(), _theirs(device), device), AMPKIT: _step(_layers(), _ours(device), device)}
    for count in (1, 10, 100):
        model = _layers()
        keys = map(str, range(0, 2 * LAYERS, 2 * LAYERS // count))  # linear layers: every 2nd, 20th or 200th module
        policy = Policy.default(device.type).for_modules(model, dict.fromkeys(keys, torch.float32))
        sides[f"ampkit, {count} with a rule"] = _step(model, _ours(device, policy), device)
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


def _custom_functions(device: torch.device) -> dict[str, Side]:
    """Return a step of ten custom autograd functions under `custom_fwd` and `custom_bwd`."""
    kind = device.type
    theirs = _function(torch.amp.custom_fwd(device_type=kind), torch.amp.custom_bwd(device_type=kind))
    ours = _function(custom_fwd(device_type=kind), custom_bwd(device_type=kind))
    return {
        TORCH: _step(_Functions(theirs), _theirs(device), device),
        AMPKIT: _step(_Functions(ours), _ours(device), device),
    }


def _recorded(device: torch.device) -> dict[str, Side]:
    """Return a step of 200 modules while its casts are recorded."""
    return {
        TORCH: _step(_layers(), _theirs(device), device),
        AMPKIT: _step(_layers(), _ours(device), device),
        "ampkit, record_casts": _step(_layers(), _ours(device), device, record_casts),
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


def _checkpoints(device: torch.device) -> dict[str, Side]:
    """Forward and backward of a four-block transformer with checkpointed blocks, not reentrant."""

    def side(region: Region) -> Side:
        torch.manual_seed(0)
        model = _Checkpointed(workloads.Decoder(256, WIDTH, 2, 4, 16)).to(device)
        ids = torch.randint(256, (2, 16), device=device)
        return _side(model, lambda: loss_of(model(ids), ids), region, contextlib.nullcontext)

    return {TORCH: side(_theirs(device)), AMPKIT: side(_ours(device))}


def cases() -> list[Case]:
    """One case for each part."""
    return [
        Feature(name="module rules, 200 modules", parts=_module_rules, aims=(Aim("ampkit, 1 with a rule", 1.2),)),
        Feature(name="custom_fwd, 10 functions", parts=_custom_functions, aims=(Aim(AMPKIT, 1.2),)),
        Feature(name="checkpoints, d=32", parts=_checkpoints, aims=(Aim(AMPKIT, 1.12),)),
        Feature(name="record_casts, 200 modules", parts=_recorded, aims=(Aim("ampkit, record_casts", 1.5),)),
    ]
