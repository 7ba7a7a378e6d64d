"""Small models of common kinds, with random data.

Nothing here imports ampkit. Every model is a plain `nn.Module`, sized by its arguments; a `Case` has a function that
builds it, one that draws a batch, and a loss. Building draws from torch's global random state, so seed it. The
benchmarks train the decoder and the ResNet at full size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import Batch, Decoder, ResNet, loss_of


class Case(NamedTuple):
    """A model, a batch for it and the loss between them."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]  # inputs and targets, new at every call
    loss: Callable[[Tensor, Tensor], Tensor] = loss_of

    def loss_of(self, model: nn.Module) -> Tensor:
        """The loss of a model on a new batch."""
        inputs, targets = self.batch()
        return self.loss(model(inputs), targets)


def conv_net() -> nn.Module:
    """Convolutions with batch norm, a pool and a linear head: images (N, 3, H, W) to logits (N, 4)."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=2),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def encoder() -> nn.Module:
    """torch's own layers with dropout over token ids."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(32, 16), layers, nn.Linear(16, 32))


class Recurrent(nn.Module):
    """A convolution in time, then an LSTM and a GRU: (N, T, 6) to logits (N, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 8, 3, padding=1)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.gru, self.head = nn.GRU(16, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return self.head(self.gru(hidden)[0][:, -1])


class UNet(nn.Module):
    """Down, up by `interpolate` and by transposed convolution, with skips: images (N, 1, H, W) to logits alike.

    Group norm throughout; H and W are multiples of four.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = self._block(1, width)
        self.down1, self.down2 = self._block(width, 2 * width), self._block(2 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2)
        self.merge1, self.merge2 = self._block(4 * width, 2 * width), self._block(3 * width, width)
        self.leave = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.SiLU())

    def forward(self, images: Tensor) -> Tensor:
        full = self.enter(images)
        half = self.down1(F.avg_pool2d(full, 2))
        quarter = self.down2(F.max_pool2d(half, 2))
        half = self.merge1(torch.cat([half, self.up1(quarter)], 1))
        up = F.interpolate(half, scale_factor=2, mode="bilinear", align_corners=False)
        return self.leave(self.merge2(torch.cat([full, up], 1)))


def _images(size: int, memory_format: torch.memory_format = torch.contiguous_format) -> Callable[[], Batch]:
    return lambda: (torch.randn(4, 3, size, size).contiguous(memory_format=memory_format), torch.randint(4, (4,)))


def _channels_last_resnet() -> nn.Module:
    return ResNet().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  its stubs lack this form


def _segmentation() -> Batch:
    images = torch.randn(2, 1, 16, 16)
    return images, (F.avg_pool2d(images, 3, 1, 1) > 0).float()


def _language() -> Batch:
    ids = torch.randint(32, (4, 13))
    return ids[:, :-1], ids[:, 1:]


CASES = {
    "convnet": Case(conv_net, _images(8)),
    "encoder": Case(encoder, _language),
    "decoder": Case(Decoder, _language),
    "recurrent": Case(Recurrent, lambda: (torch.randn(4, 7, 6), torch.randint(4, (4,)))),
    "unet": Case(UNet, _segmentation, F.binary_cross_entropy_with_logits),
    "resnet": Case(_channels_last_resnet, _images(32, torch.channels_last)),
}
