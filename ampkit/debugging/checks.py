"""Assertions for a test suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.nn import Module

from ampkit.debugging.detect import detect_nonfinite

__all__ = ["assert_finite"]

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
    with detect_nonfinite(model, "now", on_found="record") as report:
        run()
    if report or (report.skipped and not allow_skipped):
        raise AssertionError(str(report))
    return result
