"""Shared by the tests of levels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampkit.amp import (
    initialize,
    scale_loss,
)

ids = {"ids": lambda value: str(value).removeprefix("torch.")}


class Net(nn.Module):
    """Convolution, batch norm, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.bn(self.conv(x))).flatten(1))


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batches(n: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 1, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator))
        for _ in range(n)
    ]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def backward(loss: Tensor, optimizer: object, **options: object) -> None:
    with scale_loss(loss, optimizer, **options) as scaled:  # type: ignore[arg-type]
        scaled.backward()


def set_up(opt_level: str, model: nn.Module | None = None, **options: object) -> tuple[nn.Module, torch.optim.SGD]:
    model = make() if model is None else model
    return initialize(model, sgd(model), opt_level, **{"verbosity": 0, **options})


def overflowing(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) * 1e30


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """A step per batch, as Apex's scripts have it; returns the losses."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        losses.append(F.cross_entropy(model(x), y))
        backward(losses[-1], optimizer)
        optimizer.step()
    return losses
