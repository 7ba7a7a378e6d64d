"""Small models that low precision breaks, and models like them that it does not: for `benchmarks.rehearse`.

Which is which was found by training: 300 steps in both precisions, from the same weights on the same batches. Each
fragile model has one module whose arithmetic needs more bits; `place` names it, and modules that feed it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampkit import Rule
from examples import demo

Batch = tuple[object, Tensor]
HUGE = 2e5  # of a constant channel, as of a massive activation


@dataclass(frozen=True)
class Model:
    """A model, its batches, and the precision that is tested: FP8 against bfloat16, or 16 bits against float32."""

    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[], Callable[[torch.Generator], Batch]]
    place: tuple[str, ...] = ()  # one of these modules is to be among the answers; () for a model that loses nothing
    rule: Rule | None = None
    dtype: torch.dtype = torch.bfloat16
    lr: float = 3e-3
    everyday: bool = True  # whether it is run unless it is named
    low_precision: str = ""  # a module that the tested policy runs in the region's dtype


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy, or the mean squared error for targets that are no classes."""
    inputs, targets = batch
    if targets.is_floating_point():
        return F.mse_loss(model(inputs).float(), targets)
    return F.cross_entropy(model(inputs).float().flatten(0, -2), targets.flatten())


def _frozen_zero_channel(layer: nn.Linear) -> nn.Linear:
    """Return the layer without its first input, whose weights stay 0."""
    with torch.no_grad():
        layer.weight[:, 0] = 0
    layer.weight.register_hook(lambda g: torch.cat([torch.zeros_like(g[:, :1]), g[:, 1:]], 1))
    layer.register_forward_pre_hook(
        lambda module, args: (torch.cat([torch.full_like(args[0][..., :1], HUGE), args[0][..., 1:]], -1),)
    )
    return layer


class Residual(nn.Module):
    """`x + down(gelu(up(norm(x))))`, the branch times `scale`."""

    def __init__(self, width: int, hidden: int, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.gamma = nn.Parameter(torch.full((width,), scale))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.down(F.gelu(self.up(self.norm(x)).float())).float()


def residual_mlp(blocks: int, width: int, hidden: int, scale: float = 1.0) -> nn.Sequential:
    """Digits by residual blocks."""
    layers = (Residual(width, hidden, scale) for _ in range(blocks))
    return nn.Sequential(nn.Flatten(1), nn.Linear(64, width), *layers, nn.Linear(width, 16))


def outlier_mlp(*blocks: int) -> nn.Module:
    """Return a model in which the input of these blocks' last layers has a channel that is 200,000 times the others."""
    model = residual_mlp(3, 64, 128)
    for block in blocks:
        _frozen_zero_channel(model.get_submodule(f"{block}.down"))  # type: ignore[arg-type]
    return model


def char_gpt(width: int, depth: int) -> nn.Module:
    """Return the demo's GPT, its vocabulary padded to a multiple of 16."""
    return demo.CharGPT(128, 32, width, depth, 4)


def outlier_gpt() -> nn.Module:
    """Return the same with such a channel before `down`."""
    model = char_gpt(48, 1)
    _frozen_zero_channel(model.get_submodule("blocks.0.down"))  # type: ignore[arg-type]
    return model


class Phases(nn.Module):
    """Sines and cosines of positions times frequencies, by a matrix product, which a region lowers."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies[None])

    def forward(self, positions: Tensor) -> Tensor:
        angles = (positions[:, None].float() @ self.get_buffer("frequencies")).float()
        return torch.cat([angles.sin(), angles.cos()], -1)


class Counter(nn.Module):
    """A class from a token and a position, which is an integer of up to 1024."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = Phases(torch.tensor([math.pi, math.pi / 2, math.pi / 4, 0.1, 0.03, 0.01, 0.003, 0.001]))
        self.token = nn.Embedding(8, 16)
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return self.layers(torch.cat([self.token(x[0]), self.rope(x[1])], -1))


class Denoiser(nn.Module):
    """Predicts the noise of points in the plane from the points and 1000 timesteps."""

    def __init__(self) -> None:
        super().__init__()
        self.time = Phases(torch.exp(-math.log(1e4) * torch.arange(16) / 16))
        self.inp, self.head = nn.Linear(34, 96), nn.Linear(96, 2)
        self.hidden = nn.ModuleList(nn.Linear(96, 96) for _ in range(2))

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        h = F.silu(self.inp(torch.cat([x[0], self.time(x[1])], -1))).float()
        for layer in self.hidden:
            h = h + F.silu(layer(h)).float()
        return self.head(h)


class Experts(nn.Module):
    """Two of 16 experts for each digit; a common offset of the router's logits leaves them few bits."""

    def __init__(self, offset: float, width: int = 32, n: int = 16) -> None:
        super().__init__()
        self.inp, self.router, self.head = nn.Linear(64, width), nn.Linear(width, n), nn.Linear(width, 10)
        self.up = nn.ModuleList(nn.Linear(width, 16) for _ in range(n))
        self.down = nn.ModuleList(nn.Linear(16, width) for _ in range(n))
        nn.init.constant_(self.router.bias, offset)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.inp(x.flatten(1)).float())
        weights, chosen = self.router(h).float().softmax(-1).topk(2, -1)
        out = h
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, k = (chosen == expert).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, weights[rows, k, None] * down(F.gelu(up(h[rows]))).float())
        return self.head(out)


class DifferenceNorm(nn.Module):
    """A norm whose variance is E[x^2] - E[x]^2: it cancels where the mean is large."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * (variance.float().clamp_min(1e-3) ** -0.5)


class Normed(nn.Module):
    """Digits, with such a norm behind a layer whose bias is 100."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm, self.head = nn.Linear(64, 48), DifferenceNorm(), nn.Linear(48, 10)
        self.a, self.b = nn.Linear(48, 48), nn.Linear(48, 48)
        nn.init.constant_(self.inp.bias, 100.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.inp(x.flatten(1))).float()
        return self.head(F.gelu(self.b(F.gelu(self.a(h)))))


class Accumulator(nn.Module):
    """Adds small numbers to a large one, 48 times, by a product with the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("identity", torch.eye(width))

    def forward(self, u: Tensor) -> Tensor:
        h = torch.full_like(u[:, 0], 4.0)
        for t in range(u.shape[1]):
            h = h @ self.get_buffer("identity") + 0.02 * u[:, t]
        return h.float() - 4.0


class Ones(nn.Module):
    """Counts the ones of a sequence, in eight classes."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.inp, self.cell = nn.Embedding(2, 16), nn.Linear(16, 16), Accumulator(16)
        self.a, self.head = nn.Linear(16, 48), nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.a(self.cell(self.inp(self.emb(x)).float()))))


class Recurrent(nn.Module):
    """Characters by two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(128, 32), nn.Linear(64, 128)
        self.first, self.second = nn.LSTM(32, 64, batch_first=True), nn.LSTM(64, 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.second(self.first(self.emb(x))[0])[0]))


def digits(noise: float = 0.3) -> Callable[[torch.Generator], Batch]:
    """Digits with noise, so that no model learns them by heart."""
    data = demo.Digits(torch.device("cpu"), 64)

    def batch(generator: torch.Generator) -> Batch:
        images, labels = data.batch(generator)
        return images + noise * torch.randn(images.shape, generator=generator), labels

    return batch


def characters() -> Callable[[torch.Generator], Batch]:
    """16 windows of 32 characters."""
    return demo.Characters(torch.device("cpu"), 16, 32).batch


def counts(largest: int) -> Callable[[], Callable[[torch.Generator], Batch]]:
    """Tokens and positions below `largest`, and their sums modulo 8."""

    def batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(8, (128,), generator=generator)
        positions = torch.randint(largest, (128,), generator=generator)
        return (tokens, positions), (tokens + positions) % 8

    return lambda: batch


def ones() -> Callable[[torch.Generator], Batch]:
    """Sequences of 48 bits, and the class of their sum."""

    def batch(generator: torch.Generator) -> Batch:
        share = torch.rand(64, 1, generator=generator)
        bits = (torch.rand(64, 48, generator=generator) < share).long()
        return bits, bits.sum(1) * 8 // 49

    return batch


def noisy_points() -> Callable[[torch.Generator], Batch]:
    """Points near a circle with noise by timestep, and the noise."""

    def batch(generator: torch.Generator) -> Batch:
        timestep = torch.randint(1000, (256,), generator=generator)
        angle = torch.randint(8, (256,), generator=generator) * math.pi / 4
        points = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(256, 2, generator=generator)
        noise = torch.randn(256, 2, generator=generator)
        left = torch.cos(timestep / 1000 * math.pi / 2)[:, None]
        return (left * points + (1 - left * left).sqrt() * noise, timestep), noise

    return batch


F16 = torch.float16
TENSOR, ROW = Rule.FLOAT8_TENSORWISE, Rule.FLOAT8_ROWWISE
MODELS = [
    Model("positions to 1024", Counter, counts(1024), ("rope",)),
    Model("positions to 200", Counter, counts(200), ("rope",)),
    Model("norm by a difference", Normed, digits, ("norm", "inp")),
    Model("accumulator", Ones, ones, ("cell",)),
    Model("outliers in an MLP, FP8", lambda: outlier_mlp(2, 3, 4), digits, ("2.down", "3.down"), TENSOR, lr=2e-3),
    Model("an outlier in an MLP, FP8", lambda: outlier_mlp(3), digits, ("3.down",), TENSOR, lr=2e-3),
    Model("an outlier in a GPT, FP8", outlier_gpt, characters, ("blocks.0.down",), TENSOR, everyday=False),
    Model("diffusion", Denoiser, noisy_points, lr=2e-3),
    Model("experts with an offset", lambda: Experts(60.0), digits),
    Model("experts", lambda: Experts(0.0), digits),
    Model("layer scale 1e-5, float16", lambda: residual_mlp(4, 48, 96, 1e-5), digits, dtype=F16),
    Model("LSTM", Recurrent, characters, lr=5e-3),
    Model("GPT", lambda: char_gpt(64, 2), characters),
    Model("GPT, FP8 by row", lambda: char_gpt(48, 1), characters, rule=ROW),
    Model("GPT, FP8 by tensor", lambda: char_gpt(64, 2), characters, rule=TENSOR),
    Model(
        "GPT of docs/float8.md, FP8 by row",
        lambda: char_gpt(128, 4),
        characters,
        rule=ROW,
        low_precision="head",
        everyday=False,
    ),
]
