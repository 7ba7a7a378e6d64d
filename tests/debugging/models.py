"""Small models for the debugging tools, each with a batch, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.workloads import Decoder


class Middle(nn.Module):
    """A function of an input and of layers, as a layer."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.layers)


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with a tanh between them."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def filled(model: nn.Sequential, value: float) -> nn.Sequential:
    """The model, all weights of its first layer one number."""
    nn.init.constant_(model.get_parameter("0.weight"), value)
    return model


def cnn() -> nn.Module:
    """Convolutions, batch norm with its counters, and pooling, whose winners differ in low precision."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 4),
    )


def gpt() -> nn.Module:
    """Tied embeddings, fused attention, and the loss."""
    return nn.Sequential(Decoder(), Middle(lambda logits: F.cross_entropy(logits.flatten(0, 1), torch.arange(16))))


def attention(x: Tensor, qkv: nn.Module) -> Tensor:
    q, k, v = qkv(x).chunk(3, -1)
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    return (q @ k.transpose(-1, -2)).masked_fill(later, float("-inf")).softmax(-1).to(v.dtype) @ v


def recomputed(x: Tensor, layers: nn.Module) -> Tensor:
    return checkpoint(layers, x, use_reentrant=False)  # type: ignore[return-value]


def gated(x: Tensor, gate: nn.Module, expert: nn.Module) -> Tensor:
    """Which rows go on depends on their values; what was computed is written over in place."""
    chosen = gate(x).softmax(-1).argmax(-1) == 0
    y = torch.zeros_like(x)
    y[chosen] = expert(x[chosen]).to(y.dtype)
    y.clamp_(-1, 1).add_(x)
    return y


def dropout(inplace: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5, inplace), nn.Linear(8, 4))


def rows(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, 8)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), rows(4)),
    "gpt": (gpt, lambda: torch.randint(32, (2, 8))),
    "attention": (lambda: Middle(attention, nn.Linear(8, 24)), rows(2, 6)),
    "checkpoint": (lambda: Middle(recomputed, mlp(8, 16, 4)), rows(4)),
    "cnn": (cnn, lambda: torch.randn(4, 3, 16, 16)),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=True), rows(2, 5)),
    "shared": (lambda: Middle(lambda x, layer: layer(layer(layer(x).tanh()).tanh()).tanh(), nn.Linear(8, 8)), rows(4)),
    "dropout": (lambda: dropout(False), rows(4)),
    "dropout in place": (lambda: dropout(True), rows(4)),
    "gated": (lambda: Middle(gated, nn.Linear(8, 2), nn.Linear(8, 8)), rows(6)),
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
