"""Shared by the tests of whole models: a network, its data, optimizers, and steps as Apex's scripts have them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampkit import optim
from ampkit.amp import initialize, scale_loss
from ampkit.dtypes import SIXTEEN_BIT
from ampkit.half_precision.half import half

both_dtypes = pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=["float16", "bfloat16"])
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch-adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "torch-sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "ampkit-adamw": lambda params: optim.AdamW(params, lr=1e-2),
    "ampkit-sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
}


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


def make_half(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Net:
    """A 16-bit convolution and head around a float32 norm."""
    return half(make(seed), dtype, cast_outputs=torch.float32)


def batches(n: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 1, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator))
        for _ in range(n)
    ]


(BATCH,) = batches(1)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor] = BATCH) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["torch-sgd"](model.parameters())


def set_up(
    opt_level: str, model: Any = None, optimizer_of: Callable[[nn.Module], Any] = sgd, **options: Any
) -> tuple[Any, Any]:
    """Initialize a model (`Net` by default) and its optimizer without output, and return both."""
    model = make() if model is None else model
    return initialize(model, optimizer_of(model), opt_level, **{"verbosity": 0, **options})


def backward(loss: Tensor, optimizer: Any, **options: Any) -> None:
    with scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()


def train(model: nn.Module, optimizer: Any, data: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """A step per batch; returns the losses."""
    losses = []
    for batch in data:
        optimizer.zero_grad()
        losses.append(loss_of(model, batch))
        backward(losses[-1], optimizer)
        optimizer.step()
    return losses
