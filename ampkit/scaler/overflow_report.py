"""The report on a skipped step: which gradients held inf or NaN, the likely origin first.

In most models backward reaches parameters roughly in reverse registration order, so the report has that order.
`ampkit.debugging.examine` locates the operator where inf or NaN began in any model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampkit.dtypes import dtype_name
from ampkit.gradients.collect import collect, masters_of, moved, places
from ampkit.torch_private import foreach_clamp_max, foreach_clamp_min, foreach_mul, foreach_norm

_SHOWN = 6
_CHUNK = 1 << 26
"""Bytes of gradients that are counted together: counting takes as much memory, twice."""


class Counted(NamedTuple):
    """A gradient with its number of non-finite elements, which may be 0, and of NaNs among them."""

    param: Tensor
    name: str | None  # the optimizer's name for the parameter
    place: str  # in the optimizer: "group 0, parameter 3"
    dtype: torch.dtype
    elements: int
    nonfinite: Tensor
    nan: Tensor


def count_nonfinite(optimizer: torch.optim.Optimizer) -> list[Counted]:
    """Count inf and NaN in every gradient of the optimizer, finite ones included. Never synchronizes."""
    masters = masters_of(optimizer)  # the model has names for its own parameters, not for their masters
    of_model = {} if masters is None else dict(zip(masters.masters(), masters.model_parameters(), strict=True))
    described: list[tuple[Tensor, str | None, str, torch.dtype, int]] = []
    gradients: list[Tensor] = []
    for name, place, param in places(optimizer):
        for tensors in collect([param]).by_device.values():
            grad: Any = param.grad
            described += [(of_model.get(param, param), name, place, grad.dtype, grad.numel())] * len(tensors)
            gradients += tensors
    counts: list[tuple[Tensor, Tensor]] = []
    for _, group in groupby(gradients, lambda gradient: gradient.device):
        chunk, size = list[Tensor](), 0
        for gradient in group:
            if chunk and size + gradient.nbytes > _CHUNK:
                counts += _counts(chunk)
                chunk, size = [], 0
            chunk.append(gradient)
            size += gradient.nbytes
        counts += _counts(chunk)
    return [Counted(*description, *pair) for description, pair in zip(described, counts, strict=True)]


@torch.no_grad()
def _counts(tensors: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Count the non-finite elements of each tensor, and the NaNs, by a few operators over the list."""
    dtype = torch.float32 if tensors[0].device.type == "mps" else torch.float64  # counts beyond 2**24 need float64
    nonfinite = foreach_norm(foreach_mul(tensors, 0.0), 0, dtype=dtype)  # inf * 0 is NaN, which is not 0
    bounded = foreach_clamp_max(foreach_clamp_min(tensors, -1.0), 1.0)
    nan = foreach_norm(foreach_mul(bounded, 0.0), 0, dtype=dtype)
    return zip(nonfinite, nan, strict=True)


class NonFiniteGradient(NamedTuple):
    """A parameter whose gradient was not finite.

    Args:
        name: the model's name for it, or the name in an optimizer made with `named_parameters()`, or "group 0,
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
        last_finite: name of the parameter just before the first one, whose gradient was finite; None if there is none.
        named: whether all parameters have names, not only places in an optimizer.
    """

    last_finite: str | None = None
    named: bool = True

    def __str__(self) -> str:
        if not self:
            return "no parameter held inf or NaN"
        first, before = self[0].name, self.last_finite
        if before is None:
            lines = [f"no gradient was finite before {first}: it began there, or in the loss"]
        elif _module(first) == _module(before):
            lines = [f"last finite: {before}; first non-finite: {first}"]
        else:
            lines = [f"last finite: {_module(before)}; first non-finite: {_module(first)}"]
        lines += [f"  {gradient}" for gradient in self[:_SHOWN]]
        if len(self) > _SHOWN:
            lines.append(f"  and {len(self) - _SHOWN} more")
        if not self.named:
            lines.append("for names call overflow_report(model), or make the optimizer with model.named_parameters()")
        lines.append("parameters are in reverse registration order; debugging.examine locates the operator")
        return "\n".join(lines)


def _module(name: str) -> str:
    """Return the path of a parameter's module; if it has none, the parameter's name."""
    return name.rpartition(".")[0] or name


def report(gradients: Sequence[Counted], model: torch.nn.Module | None) -> OverflowReport:
    """Return the report on all counted gradients, finite ones included. Reads the device once."""
    names = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    order = {key: position for position, key in enumerate(names)}
    counts = [moved(count, gradients[0].nan.device) for each in gradients for count in (each.nonfinite, each.nan)]
    numbers = map(int, torch.stack(counts).tolist()) if counts else iter(())
    by_param = {
        id(gradient.param): (gradient, nonfinite - nan, nan)
        for gradient, nonfinite, nan in zip(gradients, numbers, numbers, strict=True)
    }
    nonfinite: list[NonFiniteGradient] = []
    last_finite = None
    for key in sorted(by_param, key=lambda key: order.get(key, -1))[::-1]:
        gradient, inf, nan = by_param[key]
        name = names.get(key) or gradient.name or gradient.place
        if inf or nan:
            nonfinite.append(NonFiniteGradient(name, inf, nan, gradient.elements, gradient.dtype))
        elif not nonfinite:
            last_finite = name
    found = OverflowReport(nonfinite)
    found.last_finite = last_finite
    found.named = all(key in names or gradient.name is not None for key, (gradient, _, _) in by_param.items())
    return found
