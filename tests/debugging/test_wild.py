"""Faults as people write them are named: operator, phase, module, line, cause."""

from __future__ import annotations

import math

import pytest
import torch

from ampkit.debugging import detect_nonfinite
from tests.debugging.wild import WILD, Wild, step_of

pytestmark = pytest.mark.filterwarnings("ignore:std.*degrees of freedom")


@pytest.mark.parametrize("fault", WILD, ids=lambda fault: fault.name)
def test_a_fault_is_named(fault: Wild) -> None:
    model, step = step_of(fault)
    with detect_nonfinite(model, on_found="record") as report:
        step()
    origin, cause = report.findings[0].origin, report.findings[0].cause
    assert (origin.op if fault.phase == "forward" else origin.backward_of) == fault.op
    assert origin.phase == fault.phase
    assert origin.module == "2"
    assert origin.line in fault.lines
    assert cause.kind in fault.kinds, cause
    assert report.findings[0].suggestion is not None


def test_numbers_that_something_masks_out_are_no_finding() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with detect_nonfinite(on_found="record") as report:
        best = torch.full((), math.inf)
        scores = torch.cat([torch.where(x > 0, x, -math.inf), torch.zeros(4, 1)], 1)
        y = x.clone()
        y[0] = -math.inf
        loss = scores.softmax(-1).sum() + torch.minimum(best, x.sum(-1)).sum() + y.sigmoid().sum()
        loss.backward()
        best = torch.minimum(best, loss.detach())
        torch.full((4,), math.inf)      # nobody reads it
    assert not report


def test_in_inference_mode_operators_come_apart_too() -> None:
    """There, `to` arrives whole, and its schema says that it may be a view."""
    layer = torch.nn.Linear(4, 4)
    with torch.inference_mode(), detect_nonfinite(on_found="record") as report:
        y = layer(torch.ones(2, 4) * 1e6).to(torch.float16)
        (y - y).sum()
    assert [one.origin.op for one in report.findings] == ["aten::_to_copy"]
    assert report.findings[0].cause.kind == "overflow"
