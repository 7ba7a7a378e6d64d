"""Small models for the debugging tools, each with a batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

__all__ = ["MODELS", "Middle", "filled", "loss_of", "make", "mlp"]


class Middle(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with a tanh between them."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def filled(model: nn.Sequential, value: float) -> nn.Sequential:
    """The model, all weights of its first layer one number."""
    nn.init.constant_(model.get_parameter("0.weight"), value)
    return model


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / (width / self.heads) ** 0.5
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            y = scores.masked_fill(later, float("-inf")).softmax(-1).to(v.dtype) @ v
        x = x + self.proj(y.transpose(1, 2).reshape(n, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tied embeddings, two blocks."""

    def __init__(self, *, fused: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block(16, 2, fused=fused) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.roll(-1, 1).flatten())


class CNN(nn.Module):
    """Convolutions, batch norm with its counters, and pooling, whose winners differ in low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.out = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.conv1(x)).relu(), 2)
        x = F.max_pool2d(self.conv2(x).relu_(), 2)
        return self.out(x.flatten(1))


class Shared(nn.Module):
    """One layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x


class Gated(nn.Module):
    """Which rows go on depends on their values; what was computed is written over in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).softmax(-1).argmax(-1) == 0
        y = torch.zeros_like(x)
        y[chosen] = self.expert(x[chosen]).to(y.dtype)
        y.clamp_(-1, 1).add_(x)
        return y


def _tokens() -> Tensor:
    return torch.randint(32, (2, 8))


MODELS: dict[str, tuple[Any, Any]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), lambda: torch.randn(4, 8)),
    "gpt": (GPT, _tokens),
    "gpt_fused": (lambda: GPT(fused=True), _tokens),
    "gpt_checkpoint": (lambda: GPT(recompute=True), _tokens),
    "cnn": (CNN, lambda: torch.randn(4, 3, 16, 16)),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), lambda: torch.randn(2, 5, 16)
    ),
    "shared": (Shared, lambda: torch.randn(4, 8)),
    "gated": (Gated, lambda: torch.randn(6, 8)),
}


def make(name: str) -> tuple[nn.Module, Tensor]:
    """A model and a batch, the same each time."""
    torch.manual_seed(0)
    model, batch = MODELS[name]
    return model(), batch()


def loss_of(output: Any) -> Tensor:
    """A scalar of what a model returns."""
    output = output[0] if isinstance(output, tuple) else output
    return output if output.ndim == 0 else (output.float() * torch.linspace(0, 1, output.shape[-1])).sum()
