"""The workloads of the training cases: a model, batches for it, its loss.

The digits and the characters are real data, which ships with scikit-learn and Python. The others have random batches,
drawn once and repeated: their loss falls because they overfit, which is enough to see that every way of training
reaches the same loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.case import UnavailableError

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, and the function that draws its micro-batches."""

    build: Callable[[], nn.Module]
    batches: Callable[[int, torch.Generator], list[Batch]]
    """That many micro-batches, on the CPU."""
    lr: float = 3e-4


class DecoderBlock(nn.Module):
    """Pre-norm block with causal `scaled_dot_product_attention`: (N, T, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """GPT-like language model: token ids (N, T) to logits (N, T, tokens); output weights tied to the embedding."""

    def __init__(self, tokens: int = 32, width: int = 16, heads: int = 2, blocks: int = 2, length: int = 16) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(DecoderBlock(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


class ResidualBlock(nn.Module):
    """The bottleneck of a ResNet: 1x1, 3x3 and 1x1 convolutions with batch norm, and a projected shortcut."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """A bottleneck ResNet: images (N, 3, H, W) to logits (N, classes)."""

    def __init__(self, width: int = 8, depths: tuple[int, ...] = (1, 2), classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        stages: list[nn.Module] = []
        inputs = width
        for stage, depth in enumerate(depths):
            outputs = 4 * width * 2**stage
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(ResidualBlock(inputs, width * 2**stage, outputs, stride))
                inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.stages(self.stem(images)), 1).flatten(1))


class RecurrentLanguageModel(nn.Module):
    """Embedding, LSTM and a linear head: token ids (N, T) to logits (N, T, tokens)."""

    def __init__(self, tokens: int = 256, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, tokens)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over samples, or over samples and positions."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _token_batches(tokens: int, batch: int, length: int) -> Callable[[int, torch.Generator], list[Batch]]:
    def draw(count: int, generator: torch.Generator) -> list[Batch]:
        ids = [torch.randint(tokens, (batch, length + 1), generator=generator) for _ in range(count)]
        return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]

    return draw


def _image_batches(size: int, batch: int, classes: int) -> Callable[[int, torch.Generator], list[Batch]]:
    def draw(count: int, generator: torch.Generator) -> list[Batch]:
        return [
            (
                torch.randn(batch, 3, size, size, generator=generator),
                torch.randint(classes, (batch,), generator=generator),
            )
            for _ in range(count)
        ]

    return draw


def gpt(width: int, blocks: int, batch: int, length: int, tokens: int, heads: int) -> Workload:
    """Return a GPT-like model over random tokens."""

    def build() -> nn.Module:
        model = Decoder(tokens, width, heads, blocks, length)
        for table in (model.embedding, model.position):  # as in GPT-2; torch's unit normal would dominate the blocks
            nn.init.normal_(table.weight, std=0.02)
        return model

    return Workload(build, _token_batches(tokens, batch, length))


def mlp(width: int, batch: int = 16, classes: int = 10) -> Workload:
    """Four linear layers with GELU and a head, over random rows."""

    def build() -> nn.Module:
        layers = (module for _ in range(4) for module in (nn.Linear(width, width), nn.GELU()))
        return nn.Sequential(*layers, nn.Linear(width, classes))

    def draw(count: int, generator: torch.Generator) -> list[Batch]:
        return [
            (torch.randn(batch, width, generator=generator), torch.randint(classes, (batch,), generator=generator))
            for _ in range(count)
        ]

    return Workload(build, draw)


def resnet(width: int, depths: tuple[int, ...], batch: int, size: int, classes: int) -> Workload:
    """Return a bottleneck ResNet over random images."""
    return Workload(lambda: ResNet(width, depths, classes), _image_batches(size, batch, classes))


def lstm(width: int, layers: int, batch: int, length: int, tokens: int = 256) -> Workload:
    """Return an LSTM language model over random tokens."""
    batches = _token_batches(tokens, batch, length)
    return Workload(lambda: RecurrentLanguageModel(tokens, width, layers), batches, lr=3e-3)


def _demo_batches(task: str, *sizes: int) -> Callable[[int, torch.Generator], list[Batch]]:
    def draw(count: int, generator: torch.Generator) -> list[Batch]:
        from examples.demo import TASKS

        try:
            source = TASKS[task](torch.device("cpu"), *sizes)
        except ImportError as error:  # the digits come with scikit-learn
            raise UnavailableError(f"the {task} need {error.name}, which is not installed") from error
        return [source.batch(generator) for _ in range(count)]

    return draw


def digits(samples: int = 64) -> Workload:
    """Return the demo's CNN on real handwritten digits."""

    def build() -> nn.Module:
        from examples.demo import DigitsNet

        return DigitsNet()

    return Workload(build, _demo_batches("digits", samples), lr=5e-3)


def characters(samples: int = 32, length: int = 32, width: int = 128, blocks: int = 3) -> Workload:
    """Return the demo's GPT on the real text of Python's language reference."""
    from examples.demo import Characters, CharGPT

    alphabet = len(Characters(torch.device("cpu")).alphabet)

    def build() -> nn.Module:
        return CharGPT(alphabet, length, width, blocks)

    return Workload(build, _demo_batches("gpt", samples, length), lr=5e-3)
