"""Values that a dtype cannot hold, and sums inside an operator, are found at their line; their neighbors are silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampkit.debugging import Examination
from ampkit.debugging.finding import Finding

IDS = torch.arange(300)
TIMES = torch.arange(64, dtype=torch.float64) * 10 + 1.7e9
COARSE = torch.from_numpy(TIMES.numpy().astype("float32"))  # a cast that torch does not do
HALF = torch.from_numpy(torch.arange(6000).numpy().astype("float16"))
IMAGE = torch.arange(256, dtype=torch.uint8)


def found(run: Callable[[], Any]) -> list[Finding]:
    torch.manual_seed(0)
    with Examination() as report:
        run()
    return [each for each in report.findings if each.check in ("casts", "sums", "state in place")]


def replaced(rounded: Callable[[nn.Module], Any], *, steps: int = 3, first: int = 1) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        optimizer.zero_grad()
        if step >= first:
            rounded(model)
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


def embedded(dtype: torch.dtype, ids: Tensor) -> None:
    weight = torch.ones(4, 8, dtype=dtype, requires_grad=True)
    F.embedding(ids, weight).sum().backward()


def quantized(x: Tensor) -> None:
    """As in quantization-aware training: weights on 255 numbers, with a gradient as if they were not rounded."""
    layer = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        step = layer.weight.detach().abs().max() / 127
        rounded = (layer.weight / step).round().clamp(-127, 127)
        weight = layer.weight + (rounded * step - layer.weight).detach()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.linear(x, weight, layer.bias).float().square().mean()
        loss.backward()
        optimizer.step()
        assert rounded.to(torch.int8).unique().numel() > 8


LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    "ids in uint8": (lambda: IDS.to(torch.uint8), "precision loss"),
    "ids in int8": (lambda: torch.tensor([1, 2, 200]).char(), "precision loss"),
    "ids written to int16": (
        lambda: torch.zeros(2, dtype=torch.int16).copy_(torch.tensor([1, 40000])),
        "precision loss",
    ),
    "an image of 256": (lambda: (torch.linspace(0, 1, 9) * 256).to(torch.uint8), "precision loss"),
    "difference of images": (lambda: IMAGE - IMAGE.flip(0), "precision loss"),
    "sum in place": (lambda: IMAGE.clone().add_(10), "precision loss"),
    "labels in half": (lambda: torch.arange(3000).half(), "note"),
    "ids in bfloat16": (lambda: torch.arange(4096).bfloat16(), "precision loss"),
    "positions by cumsum": (lambda: torch.ones(1000).bfloat16().cumsum(0), "note"),
    "timestamps in float32": (lambda: TIMES.float(), "precision loss"),
    "large ids in float32": (lambda: (torch.arange(64) + 2**27).float(), "precision loss"),
    "offsets in half": (lambda: (torch.arange(64) / 64 + 1000).half(), "precision loss"),
    "differences of data": (lambda: COARSE - COARSE.flip(0), "precision loss"),
    "pressures in bfloat16": (lambda: (torch.randn(64) * 5 + 1013).requires_grad_().bfloat16() * 2, "note"),
    "ids of a table in half": (lambda: HALF.long(), "note"),
    "weights replaced": (lambda: replaced(lambda model: model.bfloat16().float()), "error"),
    "weights copied": (
        lambda: replaced(lambda m: m.load_state_dict({k: v.half() for k, v in m.state_dict().items()})),
        "error",
    ),
    "index_put": (
        lambda: torch.zeros(2).half().index_put_((torch.zeros(4000).long(),), torch.ones(4000).half(), True),
        "precision loss",
    ),
    "gradient of an embedding": (lambda: embedded(torch.bfloat16, torch.zeros(2000).long()), "precision loss"),
}
SILENT: dict[str, Callable[[], Any]] = {
    "ids that fit": lambda: (IDS[:256].to(torch.uint8), IDS.to(torch.int16), IDS.float(), IDS[:200].half()),
    "bits": lambda: ((IDS & 255).to(torch.uint8), (IDS > 5).to(torch.uint8), IMAGE // 2 + IMAGE // 2),
    "a clamped image": lambda: (torch.randn(64) * 255).clamp(0, 255).to(torch.uint8),
    "activations": lambda: (
        torch.randn(4096).bfloat16(),
        torch.rand(4096).half(),
        (1 + 0.1 * torch.randn(4096)).bfloat16(),
    ),
    "differences of timestamps": lambda: (TIMES - TIMES[0]).float(),
    "large numbers": lambda: (torch.randn(64) * 1e4).bfloat16() - (torch.rand(64) * 1e9).bfloat16(),
    "a constant": lambda: torch.full((64,), 1e9) - torch.full((64,), 1e9),
    "float64 to float32": lambda: (
        torch.randn(4096, dtype=torch.float64).float(),
        torch.linspace(0, 1, 4096).double().float(),
    ),
    "weights rounded once": lambda: replaced(lambda model: model.bfloat16().float(), first=0, steps=1),
    "a copy in 16 bits": lambda: replaced(lambda model: nn.Linear(4, 4).bfloat16().load_state_dict(model.state_dict())),
    "few in one place": lambda: torch.zeros(64).half().index_put_((torch.arange(64) % 8,), torch.rand(64).half(), True),
    "quantization": lambda: quantized(torch.randn(64, 16)),
    "classes and images": lambda: (F.one_hot(IDS % 8).bfloat16(), IMAGE.bfloat16() / 255, IMAGE.half().long()),
    "cumsum": lambda: torch.rand(64).bfloat16().cumsum(0),
    "gradient in float32": lambda: embedded(torch.float32, torch.zeros(2000).long()),
}


@pytest.mark.parametrize(("run", "grade"), LOSSES.values(), ids=LOSSES)
def test_values_that_are_lost(run: Callable[[], Any], grade: str) -> None:
    findings = found(run)
    assert [each.grade for each in findings] == [grade]
    assert findings[0].place.file.endswith("test_casts.py")


@pytest.mark.parametrize("run", SILENT.values(), ids=SILENT)
def test_values_that_are_not_lost(run: Callable[[], Any]) -> None:
    assert found(run) == []
