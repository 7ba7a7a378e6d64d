"""Assertions for a test suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn import Module

from ampkit.debugging.detect import detect_nonfinite
from ampkit.debugging.operator_facts import readable, tensors_in
from ampkit.debugging.precision import PrecisionComparison
from ampkit.debugging.shadow import deviation

__all__ = ["assert_close_to_reference", "assert_finite"]

T = TypeVar("T")


def assert_finite(step: Callable[[], T], model: Module | None = None, *, allow_skipped: bool = True) -> T:
    """Run a step; raise `AssertionError` with the report if inf or NaN reached its loss, a gradient or a parameter.

    What is absorbed inside, such as masks of -inf, passes. `allow_skipped`: whether an overflow that a GradScaler meets
    and skips passes too. Returns what the step returns.

    >>> import torch
    >>> assert_finite(lambda: torch.ones(2).log().sum().item())
    0.0
    """
    def run() -> Any:
        nonlocal result
        result = step()

    result: Any = None
    with detect_nonfinite(model, on_found="record") as report:
        run()
    if report or (report.skipped and not allow_skipped):
        raise AssertionError(str(report))
    return result


def assert_close_to_reference(
    step: Callable[[], T], model: Module | None = None, *, max_error: float, reference: torch.dtype = torch.float32
) -> T:
    """Run a step once, beside itself in `reference`; raise `AssertionError` with the report if it is too far from it.

    The errors that may not exceed `max_error`: of the tensors that the step returns, of the loss that backward began
    with, and of all gradients together, each a 2-norm relative to the reference's. Returns what the step returns.

    >>> model = torch.nn.Linear(8, 1)
    >>> _ = assert_close_to_reference(lambda: model(torch.ones(2, 8)), model, max_error=0.01)
    """
    if not max_error > 0:
        raise ValueError(f"max_error is {max_error}; expected a positive number, like 0.01")
    comparison = PrecisionComparison(model, reference)
    with comparison as report:
        result = step()
    errors = {}
    with torch.no_grad():
        for place, one in enumerate(readable(tensors_in(result))):
            errors[f"result {place}"] = deviation(one.detach(), comparison.run.memory.read(one)).relative
    if report.loss is not None and report.reference_loss is not None:
        errors["the loss"] = abs(report.loss - report.reference_loss) / (abs(report.reference_loss) or 1.0)
    if report.parameters:
        errors["gradients"] = report.gradient_error
    if not errors:
        raise ValueError("the step returned no tensor and left no gradient; expected something to compare")
    over = [f"{what}: {error:.3g}" for what, error in errors.items() if not error <= max_error]
    if over:
        raise AssertionError(f"{', '.join(over)}, more than {max_error:g}\n{report}\n{report.table(5)}")
    return result
