"""The report on a skipped step: which gradients held inf or NaN, the likely origin first.

In most models backward reaches parameters roughly in reverse registration order, so the report has that order.
`ampkit.debugging.examine` locates the operator where inf or NaN began in any model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampkit.dtypes import dtype_name
from ampkit.gradients.collect import collect, masters_of, moved, places

_SHOWN = 6


class Counted(NamedTuple):
    """A gradient with its numbers of inf and NaN, finite ones included."""

    param: Tensor
    name: str | None  # the optimizer's name for the parameter
    place: str  # in the optimizer: "group 0, parameter 3"
    dtype: torch.dtype
    elements: int
    counts: Tensor  # of inf, of NaN


def count_nonfinite(optimizer: torch.optim.Optimizer) -> list[Counted]:
    """Count inf and NaN in every gradient of the optimizer, finite ones included. Never synchronizes."""
    masters = masters_of(optimizer)  # the model has names for its own parameters, not for their masters
    of_model = {} if masters is None else dict(zip(masters.masters(), masters.model_parameters(), strict=True))
    gradients = []
    for name, place, param in places(optimizer):
        for tensors in collect([param]).by_device.values():
            grad: Any = param.grad
            counts = [torch.stack((tensor.isinf().sum(), tensor.isnan().sum())) for tensor in tensors]
            counted_for = of_model.get(param, param)
            gradients += [Counted(counted_for, name, place, grad.dtype, grad.numel(), pair) for pair in counts]
    return gradients


class NonFiniteGradient(NamedTuple):
    """A parameter whose gradient was not finite.

    Args:
        name: the model's name for it, or that of an optimizer made with `named_parameters()`, else "group 0,
            parameter 3".
        inf: number of elements that are inf; real and imaginary parts count each.
        nan: number of elements that are NaN, likewise.
        elements: number of elements of the gradient.
        dtype: dtype of the gradient.
    """

    name: str
    inf: int
    nan: int
    elements: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = dtype_name(self.dtype)
        return f"{self.name}: {self.inf} inf, {self.nan} NaN of {self.elements} ({dtype})"


class OverflowReport(tuple[NonFiniteGradient, ...]):
    """The parameters with non-finite gradients in one skipped step, in reverse registration order.

    If backward goes through the model in this order, the first is where inf or NaN began.

    Args:
        iterable: the `NonFiniteGradient`s.

    Attributes:
        finite_down_to: name of the parameter just before the first one, whose gradient was finite; None if there is
            none.
        named: whether all parameters have names, not only places in an optimizer.
    """

    finite_down_to: str | None = None
    named: bool = True

    def __str__(self) -> str:
        if not self:
            return "no parameter held inf or NaN"
        first, before = self[0].name, self.finite_down_to
        if before is None:
            lines = [f"no gradient was finite before {first}: it began there, or in the loss"]
        elif _module(first) == _module(before):
            lines = [f"finite down to {before}; first bad: {first}"]
        else:
            lines = [f"finite down to {_module(before)}; first bad: {_module(first)}"]
        lines += [f"  {gradient}" for gradient in self[:_SHOWN]]
        if len(self) > _SHOWN:
            lines.append(f"  and {len(self) - _SHOWN} more")
        if not self.named:
            lines.append("for names call overflow_report(model), or make the optimizer with model.named_parameters()")
        lines.append(
            "parameters are listed in reverse registration order; debugging.examine locates the operator"
        )
        return "\n".join(lines)


def _module(name: str) -> str:
    """The path of a parameter's module; if it has none, the parameter's name."""
    return name.rpartition(".")[0] or name


def report(gradients: Sequence[Counted], model: torch.nn.Module | None) -> OverflowReport:
    """The report on all counted gradients, finite ones included. Reads the device once."""
    names = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    order = {key: position for position, key in enumerate(names)}
    counts = [moved(gradient.counts, gradients[0].counts.device) for gradient in gradients]
    numbers = torch.stack(counts).tolist() if counts else []
    counted = zip(gradients, numbers, strict=True)
    by_param = {id(gradient.param): (gradient, inf, nan) for gradient, (inf, nan) in counted}
    nonfinite: list[NonFiniteGradient] = []
    finite_down_to = None
    for key in sorted(by_param, key=lambda key: order.get(key, -1))[::-1]:
        gradient, inf, nan = by_param[key]
        name = names.get(key) or gradient.name or gradient.place
        if inf or nan:
            nonfinite.append(NonFiniteGradient(name, inf, nan, gradient.elements, gradient.dtype))
        elif not nonfinite:
            finite_down_to = name
    answer = OverflowReport(nonfinite)
    answer.finite_down_to = finite_down_to
    answer.named = all(key in names or gradient.name is not None for key, (gradient, _, _) in by_param.items())
    return answer
