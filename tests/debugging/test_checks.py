"""The assertions for test suites pass what is close, and say why not."""

import pytest
import torch

from ampkit.debugging import assert_close_to_reference
from tests.debugging.models import loss_of, make


def half_step(name: str = "mlp", dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    model, batch = make(name)
    with torch.autocast("cpu", dtype=dtype):
        loss = loss_of(model(batch))
    loss.backward()
    half_step.model = model      # type: ignore[attr-defined]
    return loss


def test_close_passes_and_far_does_not() -> None:
    assert torch.equal(assert_close_to_reference(half_step, max_error=0.05), half_step())
    with pytest.raises(AssertionError, match=r"gradients: 0\.0\d+, more than 0\.0001\ngradients are"):
        assert_close_to_reference(half_step, max_error=1e-4)


def test_results_are_compared_without_any_gradient() -> None:
    x = torch.linspace(0.1, 1, 8)
    assert_close_to_reference(lambda: [x.half() * 3], max_error=1e-3)
    with pytest.raises(AssertionError, match=r"result 0: 0\.000\d+, more than 1e-05"):
        assert_close_to_reference(lambda: [x.half() * 3], max_error=1e-5)
    with pytest.raises(AssertionError, match="result 0: inf, more than 1"):
        assert_close_to_reference(lambda: (x * 1e6).half(), max_error=1)


def test_float64_as_the_reference() -> None:
    x = torch.linspace(0.1, 1, 8)
    with pytest.raises(AssertionError, match="result 0"):
        assert_close_to_reference(x.exp, max_error=1e-12, reference=torch.float64)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="max_error is 0; expected a positive number"):
        assert_close_to_reference(lambda: None, max_error=0)
    with pytest.raises(ValueError, match="returned no tensor and left no gradient; expected something to compare"):
        assert_close_to_reference(lambda: None, max_error=1)
