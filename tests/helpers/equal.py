"""Assertions over many tensors that print the first one that differs, and by how much."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Tensors = Iterable[Tensor] | Mapping[str, Tensor]


def assert_equal(got: Tensors, expected: Tensors, message: object = "") -> None:
    """Assert as many tensors on both sides, of equal dtype, device and values: -0.0 equals 0.0, NaN equals nothing."""
    pair = [dict(side) if isinstance(side, Mapping) else list(side) for side in (got, expected)]
    torch.testing.assert_close(*pair, rtol=0, atol=0, msg=lambda text: f"{message}\n{text}" if message != "" else text)


def equal_places(left: Iterable[Tensor], right: Iterable[Tensor]) -> list[int]:
    """The indices at which both sides have the same values."""
    return [index for index, (a, b) in enumerate(zip(left, right, strict=True)) if torch.equal(a, b)]
