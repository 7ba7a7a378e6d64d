"""Models with layers that need float32, planted; the metric is the distance from float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ampkit import Policy, autocast

__all__ = ["PLANTS", "Plant", "build"]

LIMIT = {torch.float16: 0.02, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Plant:
    """Which blocks are broken, and how."""

    kind: str
    culprits: tuple[int, ...]
    n_blocks: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.kind}-{self.culprits}-of-{self.n_blocks}"


class Block(nn.Module):
    """A residual block whose norm hides what its first layer does to magnitudes, and not what it does to precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * torch.tanh(self.outer(self.norm(self.inner(x)))).float()


class Scores(nn.Module):
    """Attention in plain products; with an offset, scores are alike and large, and their differences are lost."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        y = x - x.mean(-1, keepdim=True) + self.offset
        scores = torch.matmul(y, y.transpose(-1, -2))
        return x + 0.5 * torch.matmul(scores.softmax(-1), x).float()


def build(plant: Plant) -> tuple[nn.Module, Tensor, set[str]]:
    """The model, a batch, and the paths of the modules that need float32."""
    torch.manual_seed(hash(plant.culprits) % 1000)
    width = 16
    blocks: list[nn.Module] = []
    culprits = set()
    for i in range(plant.n_blocks):
        block: Any = Block(width)
        if i in plant.culprits:
            culprits.add(f"{i}.inner")
            with torch.no_grad():
                if plant.kind == "overflow":
                    block.inner.weight.mul_(1e6)
                elif plant.kind == "underflow":
                    block.inner.weight.mul_(1e-9)
                    block.inner.bias.mul_(1e-9)
                    block.norm.eps = 1e-30
                elif plant.kind == "cancellation":
                    block.inner.bias.add_(300.0)
                elif plant.kind == "scores":
                    culprits.remove(f"{i}.inner")
                    culprits.add(str(i))
                    block = Scores(20.0)
        blocks.append(block)
    return nn.Sequential(*blocks).eval(), torch.randn(4, 6, width), culprits


def error_of(model: nn.Module, batch: Tensor, dtype: torch.dtype) -> Callable[[Policy], float]:
    """The metric: the largest distance of the output from that of float32."""
    with torch.no_grad():
        exact = model(batch)

    def evaluate(policy: Policy) -> float:
        with torch.no_grad(), autocast("cpu", dtype=dtype, policy=policy):
            return float((model(batch).float() - exact).abs().max())

    return evaluate


def passes(dtype: torch.dtype) -> Callable[[float], bool]:
    """Whether the metric is good enough; NaN is not."""
    return lambda error: error < LIMIT[dtype]


F16, B16 = torch.float16, torch.bfloat16
PLANTS = [
    Plant(kind, culprits, n, dtype)
    for (kind, dtype), (culprits, n) in itertools.chain(
        zip(itertools.repeat(("overflow", F16)), [((3,), 8), ((1, 6), 12), ((0, 4, 9), 12), ((2, 3, 7, 8), 10)],
            strict=False),
        zip(itertools.repeat(("underflow", F16)), [((5,), 8), ((2, 3), 6), ((1, 5, 6), 8), ((0, 3, 6, 9), 12)],
            strict=False),
        zip(itertools.repeat(("cancellation", B16)), [((0,), 6), ((2, 5), 8), ((1, 2, 4), 6), ((0, 2, 4, 6), 8)],
            strict=False),
        zip(itertools.repeat(("scores", B16)), [((4,), 6), ((1, 3), 5), ((2,), 4)], strict=False),
    )
]
