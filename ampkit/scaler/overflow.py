"""Which parameters held inf or NaN in a skipped step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampkit.gradients import kernels
from ampkit.gradients.collect import collect
from ampkit.gradients.masters import masters_of


class LossScaleStuckError(RuntimeError):
    """Gradients keep overflowing although the loss scale has collapsed."""


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
    """The culprits of one skipped step, most non-finite elements first; prints as a table."""

    def merged(self, other: OverflowReport) -> OverflowReport:
        """Both reports as one, worst first."""
        return OverflowReport(sorted((*self, *other), key=lambda culprit: -culprit.inf - culprit.nan))

    def __str__(self) -> str:
        if not self:
            return "no parameter held inf or NaN"
        return "\n".join(map(str, self))


@dataclass(frozen=True)
class Examined:
    """Counts of inf and NaN in gradients, on their devices until `report` reads them.

    `gradients` says for each gradient its parameter, the optimizer's name for it, its dtype and size; `counts` are
    int64 `[n, 2]` tensors, one per device, with the places in `gradients` that their rows belong to.
    """

    gradients: list[tuple[Tensor, str, torch.dtype, int]]
    counts: list[tuple[list[int], Tensor]]

    def report(self, model: torch.nn.Module | None = None) -> OverflowReport:
        """Read the counts (one host read per device) and name the parameters."""
        names = {id(param): name for name, param in model.named_parameters()} if model is not None else {}
        culprits = []
        for places, counts in self.counts:
            for place, (inf, nan) in zip(places, counts.tolist(), strict=True):
                param, name, dtype, size = self.gradients[place]
                if inf or nan:
                    culprits.append((place, Culprit(names.get(id(param), name), inf, nan, size, dtype)))
        culprits.sort(key=lambda entry: (-entry[1].inf - entry[1].nan, entry[0]))
        return OverflowReport(culprit for _, culprit in culprits)


def examine(optimizer: torch.optim.Optimizer) -> Examined:
    """Count inf and NaN in every gradient of the optimizer, on the device. Reads each gradient once; never syncs."""
    gradients: list[tuple[Tensor, str, torch.dtype, int]] = []
    by_device: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
    masters = masters_of(optimizer)  # the model names their halves
    halves = {} if masters is None else dict(zip(masters.masters(), masters.halves(), strict=True))
    for name, param in named_parameters(optimizer):
        if param.grad is None:
            continue
        for device, tensors in collect([param]).by_device.items():
            places, local = by_device.setdefault(device, ([], []))
            places.append(len(gradients))
            local.extend(tensors)
        gradients.append((halves.get(param, param), name, param.grad.dtype, param.grad.numel()))
    return Examined(gradients, [(places, kernels.nonfinite_counts(local)) for places, local in by_device.values()])


def named_parameters(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's parameters with the names that it knows, or their places."""
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"group {g}, parameter {i}" for i in range(len(group["params"]))]
        yield from zip(names, group["params"], strict=True)


def fp16_refusal(optimizer: Any) -> str:
    """Why float16 gradients are not unscaled, and whose they are."""
    names = [
        name
        for name, param in named_parameters(optimizer)
        if param.grad is not None and param.grad.dtype is torch.float16
    ]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"Attempting to unscale FP16 gradients. Got float16 gradients of {shown}; expected float32 parameters: keep "
        "them in float32 and let autocast cast, or pass GradScaler(allow_fp16=True) where the optimizer keeps float32 "
        "master weights."
    )
