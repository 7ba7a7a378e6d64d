"""The monitor's numbers are counted by hand here, and a run does not know that it is monitored."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ampkit import GradScaler, autocast
from ampkit.debugging import TensorMonitor
from tests.debugging.models import Middle, loss_of, make


def n_hooks() -> int:
    return len(torch_module._global_forward_hooks) + len(torch_module._global_forward_pre_hooks)


class Fixed(nn.Module):
    """Returns what it was made with."""

    def __init__(self, *values: float, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values, dtype=dtype))

    def forward(self, factor: float) -> torch.Tensor:
        return self.values * factor


def test_headroom_underflow_and_broken_elements_are_counted() -> None:
    inner = Fixed(1024.0, 1e-5, 0.0, -3e-6)
    model = Middle(lambda x, inner: inner(x) + inner(2 * x), inner)
    nothing = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with TensorMonitor(model) as monitor:
        (model(1.0).float() * torch.tensor([32.0, 1e-6, 1.0, 0.0])).sum().backward()
        nothing.step()
    assert monitor.last is not None
    nearer = pytest.approx(math.log2(65504 / 2048))  # of the two calls
    assert monitor.last["outputs"]["layers.0"] == {"headroom": nearer, "underflow": 0.5}
    assert monitor.last["gradients"]["layers.0"] == {
        "headroom": pytest.approx(math.log2(65504 / 32)),
        "underflow": 0.25,
    }
    assert monitor.last["lost_updates"] == {}
    with torch.no_grad():
        inner.values[0] = math.inf
    with TensorMonitor(model) as monitor:
        model(1.0)
        nothing.step()
    assert monitor.last is not None
    assert monitor.last["outputs"]["layers.0"] == {"headroom": 0.0, "underflow": 0.5}


def test_updates_that_are_lost_are_counted() -> None:
    """1 and 256 have bfloat16 neighbors 2**-7 and 2 apart: an update of 0.1 moves one of them."""
    model = Fixed(1.0, 256.0, 256.0, 1.0, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with TensorMonitor(model) as monitor:
        (model(1.0) * torch.tensor([1.0, 1.0, 1.0, 0.0])).float().sum().backward()
        optimizer.step()
    assert monitor.last is not None
    assert monitor.last["lost_updates"] == {"values": pytest.approx(2 / 3)}
    assert "updates      66.7% lost of values" in str(monitor)
    large = nn.Linear(1000, 300, bias=False).bfloat16()  # evenly spaced elements are looked at
    with torch.no_grad():
        large.weight.fill_(256.0)
        large.weight[:75] = 1.0
    optimizer = torch.optim.SGD(large.parameters(), lr=0.1)
    with TensorMonitor(large) as monitor:
        large.weight.grad = torch.ones_like(large.weight)
        large(torch.ones(1, 1000).bfloat16())
        optimizer.step()
    assert monitor.last is not None
    assert monitor.last["lost_updates"]["weight"] == pytest.approx(0.75, abs=1e-3)


def test_hooks_are_there_on_sampled_steps_only(tmp_path: Path) -> None:
    model, batch = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    before, seen = n_hooks(), []
    file = tmp_path / "run.jsonl"
    assert str(TensorMonitor()) == "no step was sampled"
    with TensorMonitor(model, every=3, path=file):
        for _ in range(7):
            seen.append(n_hooks() > before)
            with autocast("cpu", dtype=torch.float16):
                loss = loss_of(model(batch))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert seen == [True, False, False, True, False, False, True]
    assert n_hooks() == before
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [0, 3, 6]
    assert set(samples[0]["outputs"]) == {"0", "1", "2", "Sequential"}
    assert set(samples[0]["lost_updates"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
