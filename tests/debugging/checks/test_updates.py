"""Gradients that are 0 or missing, and updates that are rounded away."""

import torch
from torch import Tensor, nn

from tests.debugging.models import mlp
from tests.debugging.planted import findings, line_of, trained


def test_a_gradient_that_rounding_makes_zero() -> None:
    """With the cast that does it; a gradient that is 0 in exact arithmetic, or missing, is no finding."""
    model, batch = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]), torch.randn(8, 4)

    def loss(scale: float) -> Tensor:
        y = model[0](batch)
        z = (y * scale).half()  # small
        return model[1](z.float() / scale).square().mean() + (y.detach() * 0 * model[2].bias).sum()

    found = findings(trained(model, lambda: loss(1.0)), model)
    assert [(each.grade, each.kind, each.what) for each in found] == [
        ("note", "zero gradient", "the gradient of 2.bias is exactly 0"),
        ("note", "no gradient", "the gradient of 2.weight is missing"),
    ]
    found = findings(trained(model, lambda: loss(1e-9)), model)
    assert ("zeros", "underflow", line_of(__file__, "small")) in [
        (each.check, each.kind, each.place.line) for each in found
    ]


def test_updates_that_are_rounded_away() -> None:
    model, batch = mlp(8, 16, 1).bfloat16(), torch.randn(8, 8).bfloat16()
    found = next(
        p for p in findings(trained(model, lambda: model(batch).square().mean()), model) if p.check == "updates"
    )
    assert (found.grade, found.kind, found.place.op) == ("precision loss", "update rounded away", "aten::add_.Tensor")
    assert "masters" in found.fix.code
