"""Faults without a float that explains them: numbers, integers, literals; and those in code that backward calls."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ampkit.debugging import detect_nonfinite
from ampkit.debugging.report import NonFiniteReport
from tests.debugging.wild import Middle

Function = Callable[[Tensor], Tensor]


def report_of(function: Function, dtype: torch.dtype = torch.float32) -> NonFiniteReport:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Middle(function)).to(dtype)
    with detect_nonfinite(model, on_found="record") as report:
        model(torch.randn(8, 16).to(dtype)).float().mean().backward()
    return report


def lines_of(function: Any) -> range:
    source, first = inspect.getsourcelines(function)
    return range(first, first + len(source))


FAULTS: list[tuple[Function, str, str, torch.dtype]] = [
    (lambda x: x / 0.0, "aten::div.Tensor", "undefined", torch.float32),
    (lambda x: x / 0, "aten::div.Tensor", "undefined", torch.float32),
    (lambda x: x / torch.zeros(8, 1, dtype=torch.int64), "aten::div.Tensor", "undefined", torch.float32),
    (lambda x: x * ((x > 9).sum() / (x > 9).sum()), "aten::div.Tensor", "undefined", torch.float32),
    (lambda x: x * torch.arange(16).log(), "aten::log", "undefined", torch.float32),
    (lambda x: x * (torch.arange(16) * 5000).half(), "aten::_to_copy", "overflow", torch.float16),
    (lambda x: x * torch.arange(0, 80000, 5000, dtype=x.dtype), "aten::arange.start_step", "overflow", torch.float16),
    (lambda x: x * torch.linspace(0, math.inf, 16), "aten::linspace", "constant", torch.float32),
    (lambda x: x + 2.0 ** (x * 0 + 2000), "aten::pow.Scalar", "too large", torch.float32),
    (lambda x: x * (x * 0 + 1e30).exp(), "aten::exp", "too large", torch.float32),
    (lambda x: x * torch.tensor([math.nan] + [0.0] * 15), "", "arrived", torch.float32),
    (lambda x: F.ctc_loss(x[:, None].log_softmax(-1), torch.ones(1, 8, dtype=torch.int64), torch.tensor([8]),
                          torch.tensor([8])), "aten::_ctc_loss.Tensor", "undefined", torch.float32),
]


@pytest.mark.parametrize(("function", "op", "kind", "dtype"), FAULTS)
def test_a_cause(function: Function, op: str, kind: str, dtype: torch.dtype) -> None:
    finding = report_of(function, dtype).findings[0]
    assert (finding.origin.op, finding.cause.kind, finding.origin.module) == (op, kind, "2"), str(finding)
    assert finding.origin.line in lines_of(function)
    assert finding.suggestion is not None
    assert not finding.suggestion.code.startswith("none is known")


def test_a_literal_that_is_a_mask_is_no_finding() -> None:
    mask = [0.0] * 8 + [-math.inf] * 8
    assert not report_of(lambda x: (x + torch.tensor(mask)).softmax(-1))
    assert not report_of(lambda x: x + torch.tensor(mask).clamp(min=0.0))


# --- code that backward calls


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:     # type: ignore[override]
        large = grad * 0 + 100
        return large.exp()


def test_the_line_is_that_of_a_functions_own_backward() -> None:
    origin = report_of(Exponential.apply).findings[0].origin
    assert (origin.op, origin.phase, origin.module) == ("aten::exp", "backward", "2")
    assert origin.backward_of == "aten::mul.Tensor"
    assert origin.line == lines_of(Exponential.backward)[-1]


def normalised(grad: Tensor) -> Tensor:
    return grad / grad.sum(-1, keepdim=True).mul(0)


def test_the_line_is_that_of_a_hook() -> None:
    def function(x: Tensor) -> Tensor:
        x.register_hook(normalised)
        return x * 1

    origin = report_of(function).findings[0].origin
    assert (origin.op, origin.phase) == ("aten::div.Tensor", "backward")
    assert origin.line in lines_of(normalised)


def test_the_line_of_any_other_operator_is_that_of_its_forward() -> None:
    """And not of who calls backward, from inside forward too."""
    def function(x: Tensor) -> Tensor:
        y = x * 0
        y = y.sqrt()
        grad, = torch.autograd.grad(y.sum(), x, create_graph=True)
        return grad

    origin = report_of(function).findings[0].origin
    assert (origin.phase, origin.backward_of, origin.line) == ("backward", "aten::sqrt", lines_of(function)[2])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_function_in_a_checkpoint_belongs_to_the_module_that_called_it(use_reentrant: bool) -> None:
    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda y: (y * 0).sqrt() + y, x, use_reentrant=use_reentrant)   # type: ignore[return-value]

    origin = report_of(function).findings[0].origin
    assert (origin.phase, origin.backward_of, origin.module) == ("backward", "aten::sqrt", "2")
    assert origin.line in lines_of(function)
