"""The report on a skipped step: which gradients held inf or NaN, the likely origin first.

Backward reaches the parameters of most models about in the reverse of the order in which they are registered, so the
report lists them so. `ampkit.debugging` finds the operator where inf or NaN began, whatever the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ampkit.gradients.collect import collect, places
from ampkit.gradients.masters import masters_of

_SHOWN_BEHIND = 6


# What was counted


class Gradient(NamedTuple):
    """A gradient that was counted: its parameter, the optimizer's name for it and its place there; dtype and size."""

    param: Tensor
    name: str | None
    place: str              # "group 0, parameter 3"
    dtype: torch.dtype
    elements: int


class Counts(NamedTuple):
    """Counts of inf and NaN in an optimizer's gradients, on their devices until a report reads them.

    `by_device` holds int64 `[n, 2]` tensors, with the places in `gradients` that their rows belong to.
    """

    gradients: list[Gradient]
    by_device: list[tuple[list[int], Tensor]]

    def read(self) -> list[tuple[int, int]]:
        """The numbers of inf and of NaN for each gradient: one host read per device."""
        numbers = [(0, 0)] * len(self.gradients)
        for rows, counts in self.by_device:
            for row, (inf, nan) in zip(rows, counts.tolist(), strict=True):
                numbers[row] = inf, nan
        return numbers


def count_nonfinite(optimizer: torch.optim.Optimizer) -> Counts:
    """Count inf and NaN in every gradient of the optimizer, on the device. Never syncs."""
    gradients: list[Gradient] = []
    by_device: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
    masters = masters_of(optimizer)  # the model knows the names of its own parameters
    own = {} if masters is None else dict(zip(masters.masters(), masters.model_parameters(), strict=True))
    for name, place, param in places(optimizer):
        if param.grad is None:
            continue
        for device, tensors in collect([param]).by_device.items():
            rows, local = by_device.setdefault(device, ([], []))
            rows.append(len(gradients))
            local.extend(tensors)
        gradients.append(Gradient(own.get(param, param), name, place, param.grad.dtype, param.grad.numel()))
    counts = [
        (rows, torch.stack([torch.stack((tensor.isinf().sum(), tensor.isnan().sum())) for tensor in local]))
        for rows, local in by_device.values()
    ]
    return Counts(gradients, counts)


# The report


@dataclass(frozen=True)
class NonFiniteGradient:
    """One parameter whose gradient was not finite.

    `name` comes from the model, or from an optimizer made with `named_parameters()`; else it reads `group 0, parameter
    3`. Complex elements count once per part.
    """

    name: str
    inf: int
    nan: int
    elements: int
    dtype: torch.dtype

    @property
    def module(self) -> str:
        """The path of the module; for a parameter of the model itself or without a name, its own name."""
        return self.name.rpartition(".")[0] or self.name

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}: {self.inf} inf, {self.nan} NaN of {self.elements} ({dtype})"


class OverflowReport(tuple[NonFiniteGradient, ...]):
    """The offending parameters of one skipped step, in reverse of the order in which they are registered.

    Prints the origin first: where backward began to be not finite, if it goes through the model in that order.

    Attributes:
        origin: the first of them: those of one module.
        first_bad: their module, or where that holds finite gradients too, their names.
        finite_down_to: the module or parameter just before them, still finite, or a finite one of the same module. None
            where nothing was finite before.
        behind: modules and parameters after them.
        named: False where a parameter has no name but its place in an optimizer.
    """

    origin: tuple[NonFiniteGradient, ...] = ()
    first_bad: tuple[str, ...] = ()
    finite_down_to: str | None = None
    behind: tuple[str, ...] = ()
    named: bool = True

    def __str__(self) -> str:
        if not self:
            return "no parameter held inf or NaN"
        first = ", ".join(self.first_bad)
        if self.finite_down_to is None:
            headline = f"no gradient was finite before {first}: it began there, or in the loss"
        else:
            headline = f"finite down to {self.finite_down_to}; first bad: {first}"
        lines = [headline, *(f"  {gradient}" for gradient in self.origin)]
        if self.behind:
            rest = len(self.behind) - _SHOWN_BEHIND
            shown = ", ".join(self.behind[:_SHOWN_BEHIND]) + (f" and {rest} more" if rest > 0 else "")
            lines.append(f"  behind it {len(self) - len(self.origin)} more: {shown}")
        if not self.named:
            lines.append("for names call overflow_report(model), or make the optimizer with model.named_parameters()")
        lines.append("by registration, from the last; debugging.find_nonfinite finds where it began in any model")
        return "\n".join(lines)


def report(counted: Sequence[Counts], model: torch.nn.Module | None) -> OverflowReport:
    """The report on all gradients of the optimizers that were counted, finite ones included."""
    names = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    found = {
        id(gradient.param): (gradient, numbers)
        for counts in counted
        for gradient, numbers in zip(counts.gradients, counts.read(), strict=True)
    }
    places = {key: place for place, key in enumerate(names)}
    gradients: list[NonFiniteGradient] = []     # finite ones too
    for key in sorted(found, key=lambda key: places.get(key, -1))[::-1]:
        (_, name, place, dtype, elements), (inf, nan) = found[key]
        gradients.append(NonFiniteGradient(names.get(key) or name or place, inf, nan, elements, dtype))
    bad = [each for each in gradients if each.inf or each.nan]
    answer = OverflowReport(bad)
    if not bad:
        return answer
    finite = [each for each in gradients if not (each.inf or each.nan)]
    mixed = {each.module for each in bad} & {each.module for each in finite}

    def labels(some: Iterable[NonFiniteGradient]) -> tuple[str, ...]:
        """Names of modules whose gradients are all finite or all bad, else of the parameters."""
        return tuple(dict.fromkeys(each.name if each.module in mixed else each.module for each in some))

    answer.origin = tuple(each for each in bad if each.module == bad[0].module)
    before = gradients[: gradients.index(bad[0])][-1:] or [each for each in finite if each.module == bad[0].module]
    answer.first_bad, answer.finite_down_to = labels(answer.origin), next(iter(labels(before)), None)
    answer.behind = labels(each for each in bad if each not in answer.origin)
    answer.named = all(key in names or gradient.name is not None for key, (gradient, _) in found.items())
    return answer
