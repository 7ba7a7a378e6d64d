"""The report on a skipped step: where in backward inf or NaN began, and where they spread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, NamedTuple

import torch
from torch import Tensor

import ampkit_kernels
from ampkit.gradients.collect import collect, places
from ampkit.gradients.masters import masters_of
from ampkit.torch_internals.autograd_graph import uses_of_leaves

_SHOWN_BEHIND = 6
_FIRST = -(2**63)


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
    """Count inf and NaN in every gradient of the optimizer, on the device. Reads each gradient once; never syncs."""
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
    counts = [(rows, ampkit_kernels.backend(local[0]).nonfinite_counts(local)) for rows, local in by_device.values()]
    return Counts(gradients, counts)


# In which order


Use = tuple[int, int]
"""When backward first and last reaches a parameter, as numbers that rise through it."""


class BackwardOrder:
    """The order in which backward reaches parameters, read from the graphs of losses: about a microsecond per node.

    Parameters are known by their ids and not referred to, not weakly either: `torch.utils.swap_tensors` and `Module.to`
    refuse tensors with weak references. So the owner clears `uses` when their ids may be those of other parameters.

    Attributes:
        wanted: whether to read the next loss: until a step has been taken, and again after a skipped one, since graphs
            may change.
        is_of_this_iteration: whether `uses` comes from losses of the current iteration.
        uses: when backward reaches a parameter, by its id. One that is in no graph (under FSDP, in a reentrant
            checkpoint) is missing.
    """

    def __init__(self) -> None:
        self.wanted = True
        self.is_of_this_iteration = False
        self.uses: dict[int, Use] = {}

    def learn(self, loss: Tensor) -> None:
        """Read the graph of a loss."""
        if not self.is_of_this_iteration:
            self.uses.clear()
            self.is_of_this_iteration = True
        for key, (_, first, last) in uses_of_leaves([loss]).items():
            self.uses[key] = first, last


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

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}: {self.inf} inf, {self.nan} NaN of {self.elements} ({dtype})"


class OverflowReport(tuple[NonFiniteGradient, ...]):
    """The offending parameters of one skipped step, in the order in which backward reached them.

    Prints the origin first.

    Attributes:
        origin: the first of them: those of one module, and shared parameters that may have come before it.
        first_bad: their modules, or where a module holds finite gradients too, their names.
        finite_down_to: the module or parameter that backward passed last before them, still finite, or that it reached
            together with them. None where nothing was finite before.
        behind: modules and parameters that went bad after them.
        ordered_by: "backward" if the order comes from a graph; "registration" if, at the origin at least, it is that of
            the parameters reversed: under FSDP, in compiled code and reentrant checkpoints, and when no loss went
            through `scale`.
        named: False where a parameter has no name but its place in an optimizer.
    """

    origin: tuple[NonFiniteGradient, ...] = ()
    first_bad: tuple[str, ...] = ()
    finite_down_to: str | None = None
    behind: tuple[str, ...] = ()
    ordered_by: Literal["backward", "registration"] = "backward"
    named: bool = True

    def __str__(self) -> str:
        if not self:
            return "no parameter held inf or NaN"
        first = ", ".join(self.first_bad)
        if self.finite_down_to is None:
            headline = f"no gradient was finite before {first}: it began there, or in the loss"
        else:
            headline = f"finite down to {self.finite_down_to}; first bad: {first}"
        if self.ordered_by == "registration":
            headline += " (by the order in which parameters are registered)"
        lines = [headline, *(f"  {gradient}" for gradient in self.origin)]
        if self.behind:
            rest = len(self.behind) - _SHOWN_BEHIND
            shown = ", ".join(self.behind[:_SHOWN_BEHIND]) + (f" and {rest} more" if rest > 0 else "")
            lines.append(f"  behind it {len(self) - len(self.origin)} more: {shown}")
        if not self.named:
            lines.append("for names call overflow_report(model), or make the optimizer with model.named_parameters()")
        return "\n".join(lines)


class _Reached(NamedTuple):
    """A gradient when backward reached its parameter."""

    time: int
    use: Use | None
    gradient: NonFiniteGradient     # finite, too

    @property
    def bad(self) -> bool:
        return bool(self.gradient.inf or self.gradient.nan)

    @property
    def module(self) -> str:
        """The path of the module; for a parameter of the model itself or without a name, its own name."""
        return self.gradient.name.rpartition(".")[0] or self.gradient.name


def report(counted: Sequence[Counts], order: BackwardOrder, model: torch.nn.Module | None) -> OverflowReport:
    """The report on all gradients of the optimizers that were counted, finite ones included."""
    names = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    found = {
        id(gradient.param): (gradient, numbers)
        for counts in counted
        for gradient, numbers in zip(counts.gradients, counts.read(), strict=True)
    }
    steps = _in_backward(found, names, order.uses)
    bad = [step for step in steps if step.bad]
    if not bad:
        return OverflowReport()
    finite = list(takewhile(lambda step: not step.bad, steps))
    before, first = finite[-1].time if finite else _FIRST, bad[0]
    # A shared parameter is listed at its last use, but may have been bad since its first.
    shared = [step for step in bad if step.use and step.use[0] != step.time and before < step.use[0] < first.time]
    origin = list(dict.fromkeys([*shared, *(step for step in bad if step.module == first.module)]))
    beside = [step for step in steps if (step.module, step.time, step.bad) == (first.module, first.time, False)]

    def labels(some: Iterable[_Reached]) -> tuple[str, ...]:
        """Names of modules whose gradients are all finite or all bad, else of the parameters."""
        mixed = {step.module for step in bad} & {step.module for step in steps if not step.bad}
        return tuple(dict.fromkeys(step.gradient.name if step.module in mixed else step.module for step in some))

    answer = OverflowReport(step.gradient for step in bad)
    answer.origin = tuple(step.gradient for step in origin)
    answer.first_bad = labels(origin)
    answer.finite_down_to = next(iter(labels(finite[-1:] or beside)), None)
    answer.behind = labels(step for step in bad if step not in origin)
    together = any(step.time == first.time and step.module != first.module for step in steps)
    answer.ordered_by = "registration" if together else "backward"
    answer.named = all(key in names or gradient.name is not None for key, (gradient, _) in found.items())
    return answer


def _in_backward(
    found: dict[int, tuple[Gradient, tuple[int, int]]], names: dict[int, str], uses: dict[int, Use]
) -> list[_Reached]:
    """Gradients in backward's order. One that is in no graph goes with those registered after it."""
    places = {key: place for place, key in enumerate(names)}
    steps = []
    time = _FIRST
    registered = sorted(found, key=lambda key: places.get(key, -1))
    for key in reversed(registered):
        (_, name, place, dtype, elements), (inf, nan) = found[key]
        use = uses.get(key)
        time = time if use is None else use[1]
        steps.append(_Reached(time, use, NonFiniteGradient(names.get(key) or name or place, inf, nan, elements, dtype)))
    return sorted(steps, key=lambda step: step.time)
