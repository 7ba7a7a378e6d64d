"""The report on a skipped step: where in backward inf or NaN began, and where they spread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ampkit.scaler.backward_order import Use

_SHOWN_BEHIND = 6
_FIRST = -(2**63)


@dataclass(frozen=True)
class Culprit:
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


class OverflowReport(tuple[Culprit, ...]):
    """The culprits of one skipped step in the order in which backward reached them; prints the origin first.

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

    origin: tuple[Culprit, ...] = ()
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
        lines = [headline, *(f"  {culprit}" for culprit in self.origin)]
        if self.behind:
            rest = len(self.behind) - _SHOWN_BEHIND
            shown = ", ".join(self.behind[:_SHOWN_BEHIND]) + (f" and {rest} more" if rest > 0 else "")
            lines.append(f"  behind it {len(self) - len(self.origin)} more: {shown}")
        if not self.named:
            lines.append("for names call overflow_report(model), or make the optimizer with model.named_parameters()")
        return "\n".join(lines)


class Counted(NamedTuple):
    """A gradient, and what was counted in it."""

    param: Tensor
    name: str | None        # the optimizer's
    place: str              # "group 0, parameter 3"
    dtype: torch.dtype
    elements: int
    inf: int
    nan: int


class _Reached(NamedTuple):
    """A gradient when backward reached its parameter."""

    time: int
    use: Use | None
    culprit: Culprit        # finite, too

    @property
    def bad(self) -> bool:
        return bool(self.culprit.inf or self.culprit.nan)

    @property
    def module(self) -> str:
        """The path of the module; for a parameter of the model itself or without a name, its own name."""
        return self.culprit.name.rpartition(".")[0] or self.culprit.name


def arrange(
    counted: Iterable[Counted], use_of: Callable[[Tensor], Use | None], model: torch.nn.Module | None
) -> OverflowReport:
    """The report on all gradients of a step, finite ones included, given in the order of their optimizers."""
    names = {} if model is None else {id(param): name for name, param in model.named_parameters()}
    gradients = {id(each.param): each for each in counted}
    steps = _in_backward(gradients, names, use_of)
    bad = [step for step in steps if step.bad]
    if not bad:
        return OverflowReport()
    finite = list(takewhile(lambda step: not step.bad, steps))
    before, first = finite[-1].time if finite else _FIRST, bad[0]
    # A shared parameter is listed at its last use, but may have been bad since its first.
    shared = [step for step in bad if step.use and step.use.first != step.time and before < step.use.first < first.time]
    origin = list(dict.fromkeys([*shared, *(step for step in bad if step.module == first.module)]))
    beside = [step for step in steps if (step.module, step.time, step.bad) == (first.module, first.time, False)]

    def labels(some: Iterable[_Reached]) -> tuple[str, ...]:
        """Names of modules whose gradients are all finite or all bad, else of the parameters."""
        mixed = {step.module for step in bad} & {step.module for step in steps if not step.bad}
        return tuple(dict.fromkeys(step.culprit.name if step.module in mixed else step.module for step in some))

    report = OverflowReport(step.culprit for step in bad)
    report.origin = tuple(step.culprit for step in origin)
    report.first_bad = labels(origin)
    report.finite_down_to = next(iter(labels(finite[-1:] or beside)), None)
    report.behind = labels(step for step in bad if step not in origin)
    together = any(step.time == first.time and step.module != first.module for step in steps)
    report.ordered_by = "registration" if together else "backward"
    report.named = all(key in names or each.name is not None for key, each in gradients.items())
    return report


def _in_backward(
    gradients: dict[int, Counted], names: dict[int, str], use_of: Callable[[Tensor], Use | None]
) -> list[_Reached]:
    """Gradients in backward's order. One that is in no graph goes with those registered after it."""
    places = {key: place for place, key in enumerate(names)}
    steps = []
    time = _FIRST
    registered = sorted(gradients, key=lambda key: places.get(key, -1))
    for key in reversed(registered):
        param, name, place, dtype, elements, inf, nan = gradients[key]
        use = use_of(param)
        time = time if use is None else use.last
        steps.append(_Reached(time, use, Culprit(names.get(key) or name or place, inf, nan, elements, dtype)))
    return sorted(steps, key=lambda step: step.time)
