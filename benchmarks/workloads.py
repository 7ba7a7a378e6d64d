"""What is trained: a model at its real size, batches for it, its loss, and how much work a step is.

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

from benchmarks import work
from benchmarks.case import UnavailableError
from benchmarks.models import Decoder, ResNet

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, where its micro-batches come from, and the FLOPs of one micro-batch forward and backward."""

    name: str
    build: Callable[[], nn.Module]
    batches: Callable[[int, torch.Generator], list[Batch]]
    """That many micro-batches, on the CPU."""
    samples: int
    """Samples in a micro-batch: images, or sequences."""
    flops: int
    lr: float = 3e-4


class VisionTransformer(nn.Module):
    """A ViT: square images (N, 3, size, size) to logits (N, classes). Its encoder is torch's own, pre-norm."""

    def __init__(
        self, size: int = 224, patch: int = 16, width: int = 768, heads: int = 12, blocks: int = 12, classes: int = 1000
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, blocks, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], 1) + self.position
        return self.head(self.blocks(tokens)[:, 0])


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


def gpt(name: str, width: int, blocks: int, batch: int, length: int, tokens: int, heads: int) -> Workload:
    """A GPT-like model over random tokens."""

    def build() -> nn.Module:
        model = Decoder(tokens, width, heads, blocks, length)
        for table in (model.embedding, model.position):     # as in GPT-2; torch's unit normal would dominate the blocks
            nn.init.normal_(table.weight, std=0.02)
        return model

    batches = _token_batches(tokens, batch, length)
    return Workload(name, build, batches, batch, work.decoder(batch, length, width, blocks, tokens))


def resnet(name: str, width: int, depths: tuple[int, ...], batch: int, size: int, classes: int) -> Workload:
    """A bottleneck ResNet over random images."""
    return Workload(
        name, lambda: ResNet(width, depths, classes), _image_batches(size, batch, classes), batch,
        work.resnet(batch, size, width, depths, classes),
    )


def vit(
    name: str, width: int, heads: int, blocks: int, batch: int, size: int, patch: int, classes: int
) -> Workload:
    """A ViT over random images."""
    return Workload(
        name, lambda: VisionTransformer(size, patch, width, heads, blocks, classes),
        _image_batches(size, batch, classes), batch,
        work.vision_transformer(batch, size, patch, width, blocks, classes),
    )


def lstm(name: str, width: int, layers: int, batch: int, length: int, tokens: int = 256) -> Workload:
    """An LSTM language model over random tokens."""
    return Workload(
        name, lambda: RecurrentLanguageModel(tokens, width, layers), _token_batches(tokens, batch, length), batch,
        work.recurrent(batch, length, width, layers, tokens), lr=3e-3,
    )


def _demo_batches(task: str, *sizes: int) -> Callable[[int, torch.Generator], list[Batch]]:
    def draw(count: int, generator: torch.Generator) -> list[Batch]:
        from examples.demo import TASKS

        try:
            source = TASKS[task](torch.device("cpu"), *sizes)
        except ImportError as error:    # the digits come with scikit-learn
            raise UnavailableError(f"the {task} need {error.name}, which is not installed") from error
        return [source.batch(generator) for _ in range(count)]

    return draw


def digits(samples: int = 64) -> Workload:
    """The demo's CNN on real handwritten digits."""

    def build() -> nn.Module:
        from examples.demo import DigitsNet

        return DigitsNet()

    return Workload("digits CNN", build, _demo_batches("digits", samples), samples, work.digits(samples), lr=5e-3)


def characters(samples: int = 32, length: int = 32, width: int = 128, blocks: int = 3) -> Workload:
    """The demo's GPT on the real text of Python's language reference."""
    from examples.demo import Characters, CharGPT

    alphabet = len(Characters(torch.device("cpu")).alphabet)

    def build() -> nn.Module:
        return CharGPT(alphabet, length, width, blocks)

    flops = work.decoder(samples, length, width, blocks, alphabet)
    return Workload("char-GPT", build, _demo_batches("gpt", samples, length), samples, flops, lr=5e-3)
