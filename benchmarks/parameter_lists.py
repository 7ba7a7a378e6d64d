"""The parameter lists of the benchmarks: those of real models, and one of very many tiny tensors."""

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.workloads import Decoder, ResNet

Shape = tuple[int, ...]


def shapes_of(build: Callable[[], nn.Module]) -> list[Shape]:
    """Return the shapes of a model's parameters, which take no memory here."""
    with torch.device("meta"):
        return [tuple(param.shape) for param in build().parameters()]


def tiny(n: int = 5000) -> list[Shape]:
    """Very many tensors of 1 to 199 elements, where launches dominate the time."""
    return [(1 + (37 * i) % 199,) for i in range(n)]


LISTS: dict[str, Callable[[], list[Shape]]] = {
    "GPT-2 124M": lambda: shapes_of(lambda: Decoder(50257, 768, 12, 12, 1024)),
    "GPT-2 1.5B": lambda: shapes_of(lambda: Decoder(50257, 1600, 25, 48, 1024)),
    "ResNet-50": lambda: shapes_of(lambda: ResNet(64, (3, 4, 6, 3), 1000)),
    "5000 tiny": tiny,
}
REHEARSAL: dict[str, Callable[[], list[Shape]]] = {
    "small GPT": lambda: shapes_of(lambda: Decoder(64, 16, 2, 2, 16)),
    "20 tiny": lambda: tiny(20),
}
