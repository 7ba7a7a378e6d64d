"""The report on a skipped step: which gradients held inf or NaN, the likely origin first.

Backward reaches the parameters of most models about in the reverse of the order in which they are registered, so the
report lists them so. `ampkit.debugging` finds the operator where inf or NaN began, whatever the order.
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
    """A gradient that was counted: its parameter, the optimizer's name for it and its place there, and the counts."""

    param: Tensor
    name: str | None
    place: str              # "group 0, parameter 3"
    dtype: torch.dtype
    elements: int
    counts: Tensor          # of inf and of NaN


def count_nonfinite(optimizer: torch.optim.Optimizer) -> list[Counted]:
    """Count inf and NaN in every gradient of the optimizer, finite ones included. Never syncs."""
    masters = masters_of(optimizer)  # the model knows the names of its own parameters
    own = {} if masters is None else dict(zip(masters.masters(), masters.model_parameters(), strict=True))
    found = []
    for name, place, param in places(optimizer):
        for tensors in collect([param]).by_device.values():
            grad: Any = param.grad
            counts = [torch.stack((tensor.isinf().sum(), tensor.isnan().sum())) for tensor in tensors]
            found += [Counted(own.get(param, param), name, place, grad.dtype, grad.numel(), each) for each in counts]
    return found


class NonFiniteGradient(NamedTuple):
    """One parameter whose gradient was not finite.

    `name` comes from the model, or from an optimizer made with `named_parameters()`; else it reads `group 0, parameter
    3`. Complex elements count once per part.
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
    """The offending parameters of one skipped step, in reverse of the order in which they are registered.

    The first is where backward began to be not finite, if it goes through the model in that order.

    Attributes:
        finite_down_to: the parameter just before the first, still finite; None where nothing was finite before.
        named: False where a parameter has no name but its place in an optimizer.
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
        lines.append("by registration, from the last; debugging.find_nonfinite finds where it began in any model")
        return "\n".join(lines)


def _module(name: str) -> str:
    """The path of a parameter's module; for one of the model itself or without a name, its own name."""
    return name.rpartition(".")[0] or name


def report(counted: Sequence[Counted], model: torch.nn.Module | None) -> OverflowReport:
    """The report on all gradients that were counted, finite ones included. One host read."""
    names = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    order = {key: place for place, key in enumerate(names)}
    counts = [moved(each.counts, counted[0].counts.device) for each in counted]
    numbers = torch.stack(counts).tolist() if counts else []
    found = {id(each.param): (each, *both) for each, both in zip(counted, numbers, strict=True)}
    bad: list[NonFiniteGradient] = []
    finite_down_to = None
    for key in sorted(found, key=lambda key: order.get(key, -1))[::-1]:
        each, inf, nan = found[key]
        name = names.get(key) or each.name or each.place
        if inf or nan:
            bad.append(NonFiniteGradient(name, inf, nan, each.elements, each.dtype))
        elif not bad:
            finite_down_to = name
    answer = OverflowReport(bad)
    answer.finite_down_to = finite_down_to
    answer.named = all(key in names or each.name is not None for key, (each, *_) in found.items())
    return answer
