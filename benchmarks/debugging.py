"""The cost of debugging tools: a training step under each tool of ampkit and of other libraries."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampkit import autocast, debugging
from ampkit.debugging.checks import CHECKS, LoopOrder
from ampkit.debugging.checks.nonfinite import NonFinite
from benchmarks.case import Aim, Case, Side, WrongAnswerError
from benchmarks.workloads import DecoderBlock

PLAIN = "nothing"
DETECT, ALL, LOOP = "inf and NaN", "all checks", "the order of the loop"
ANOMALY, DEBUG_MODE = "torch's detect_anomaly", "torch's DebugMode"
TRANSFORMERS = "transformers' DebugUnderflowOverflow"
HEADS, BLOCKS, LENGTH, BATCH = 8, 4, 64, 8

Around = Callable[[nn.Module], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Watched(Case):
    """A bfloat16 step of a four-block transformer with AdamW, watched by one tool at a time."""

    width: int = 256
    family: str = "debugging"
    base: str = PLAIN

    def sides(self, device: torch.device) -> dict[str, Side]:
        return {name: _side(around, self.width, device) for name, around in _tools().items()}

    def check(self, sides: Mapping[str, Side]) -> None:
        """Under every tool the step is the same to the bit."""
        expected = sides[self.base].result()
        for name, side in sides.items():
            if not all(torch.equal(a, b) for a, b in zip(side.result(), expected, strict=True)):
                raise WrongAnswerError(f"{name} changes the step that it watches")


def _tools() -> dict[str, Around]:
    tools: dict[str, Around] = {
        PLAIN: lambda model: contextlib.nullcontext(),
        DETECT: lambda model: debugging.Examination(model, checks=[NonFinite]),
        ALL: lambda model: debugging.Examination(model, checks=CHECKS),
        LOOP: lambda model: debugging.Examination(model, checks=[LoopOrder]),
        ANOMALY: _anomaly,
    }
    with contextlib.suppress(ImportError):
        from torch.utils._debug_mode import DebugMode

        tools[DEBUG_MODE] = lambda model: DebugMode()
    with contextlib.suppress(ImportError):
        from transformers.debug_utils import DebugUnderflowOverflow

        tools[TRANSFORMERS] = lambda model: _transformers(DebugUnderflowOverflow, model)
    return tools


def _anomaly(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is slow
        return torch.autograd.detect_anomaly()


@contextlib.contextmanager
def _transformers(detector: Callable[..., Any], model: nn.Module) -> Iterator[None]:
    """Remove the hooks, which the detector never removes from a model."""
    detector(model)
    yield
    for module in model.modules():
        module._forward_hooks.clear()


def _side(around: Around, width: int, device: torch.device) -> Side:
    torch.manual_seed(0)
    model = nn.Sequential(*(DecoderBlock(width, HEADS) for _ in range(BLOCKS))).to(device)
    batch = torch.randn(BATCH, LENGTH, width, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run(calls: int) -> None:
        for _ in range(calls):
            with around(model):
                with autocast(device.type, dtype=torch.bfloat16):
                    loss = F.mse_loss(model(batch).float(), batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    def result() -> list[Tensor]:
        return [parameter.detach() for parameter in model.parameters()]

    return Side(run, result=result)


def cases() -> list[Case]:
    """Return the width that the aims are for, and a wider one."""
    aims = (Aim(DETECT, 2.5, PLAIN), Aim(DETECT, 1.0, ANOMALY), Aim(ALL, 20.0, PLAIN), Aim(LOOP, 1.1, PLAIN))
    return [
        Watched(name=f"width {width}", width=width, seconds=seconds, aims=aims, everyday=False, devices=("cpu",))
        for width, seconds in ((256, 20.0), (512, 40.0))
    ]
