"""Shared by the tests of optimizers: torch's counterparts, and steps whose gradients depend on their number alone."""

import os
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from ampkit.optim import SGD, AdamW

PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "AdamW": (AdamW, torch.optim.AdamW, {"lr": 0.01}),
    "AdamW amsgrad maximize": (AdamW, torch.optim.AdamW, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "SGD": (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "SGD momentum": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "SGD nesterov": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
}
SKIPPED = (0, 7)  # the very first step among them
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(s, dtype=torch.complex64, generator=generator) for s in ((5, 3), (1,), (0,), (40, 6))]
    return [Parameter((value if dtype.is_complex else value.real.contiguous()).to(dtype)) for value in values]


def copies_of(params: list[Parameter], dtype: torch.dtype | None = None) -> list[Parameter]:
    return [Parameter(p.detach().clone().to(dtype)) for p in params]


def train(
    optimizer: Any,
    params: list[Parameter],
    steps: Iterable[int],
    skipped: tuple[int, ...] = (),
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> None:
    """Steps with gradients of `dtype` times `scale`, infinite in skipped ones; the second parameter's come late."""
    for step in steps:
        gradients = parameters(dtype or params[0].dtype, seed=100 + step)
        for index, (param, grad) in enumerate(zip(params, gradients, strict=True)):
            factor = torch.inf if step in skipped else scale
            param.grad = None if index == 1 and step < 2 else grad.detach().to(param.dtype) * factor
        if skipped:
            optimizer.found_inf = torch.tensor(float(step in skipped))
        optimizer.step()
