"""Casts in hooks that turn gradients into 0."""

import pytest
import torch

from tests.debugging.models import mlp
from tests.debugging.planted import findings, line_of, trained


@pytest.mark.parametrize("factor", [1e-6, 1.0])
def test_a_cast_in_a_hook(factor: float) -> None:
    """It loses what float16 cannot hold; what it only rounds is no finding."""
    torch.manual_seed(0)
    model = mlp(8, 8, 1)
    for weight in model.parameters():
        weight.register_hook(lambda gradient: (gradient * factor).half().float() / factor)  # hook
    found = findings(trained(model, lambda: model(torch.ones(2, 8)).square().mean()))
    if factor == 1:
        assert not found
    else:
        assert (found[0].grade, found[0].kind, found[0].place.line) == (
            "precision loss",
            "underflow",
            line_of(__file__, "hook"),
        )
