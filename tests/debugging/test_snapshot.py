"""A snapshot restores buffers that a step wrote or replaced."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import Tensor, nn

from ampkit.debugging.snapshot import TrainingSnapshot


class Counting(nn.Module):
    """Writes to the first buffer in place, and replaces the second by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("written", torch.zeros(3), persistent=False)
        self.register_buffer("replaced", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.written += 1  # type: ignore[operator,assignment]
        self.replaced = self.get_buffer("replaced") + 1
        return self.norm(x)


@pytest.mark.parametrize("error", [None, ValueError()])
def test_buffers_are_put_back(error: Exception | None) -> None:
    model = Counting()
    before = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in before.items()}
    with contextlib.suppress(ValueError), TrainingSnapshot(model):
        model(torch.randn(8, 3))
        for name, buffer in model.named_buffers():
            assert not torch.equal(buffer, values[name]), name
        if error is not None:
            raise error
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    for name, buffer in after.items():
        assert buffer is before[name]
        assert torch.equal(buffer, values[name]), name


def test_an_optimizer_that_a_step_makes_is_freed() -> None:
    """Else a rehearsal would keep the moments of each of its trainings."""
    model = nn.Linear(2, 2)
    with TrainingSnapshot(model) as snapshot:
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert snapshot.owners == [optimizer]
        del optimizer
        gc.collect()
        assert snapshot.owners == []
