"""Counting inf and NaN in the gradients of a skipped step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampkit.gradients import kernels
from ampkit.gradients.collect import collect
from ampkit.gradients.masters import masters_of
from ampkit.scaler.overflow_report import Counted


class LossScaleStuckError(RuntimeError):
    """Gradients keep overflowing although the loss scale has collapsed."""


class Gradient(NamedTuple):
    """A gradient that was counted: its parameter, the optimizer's name for it and its place there; dtype and size."""

    param: Tensor
    name: str | None
    place: str
    dtype: torch.dtype
    elements: int


@dataclass(frozen=True)
class Examined:
    """Counts of inf and NaN in gradients, on their devices until `report` reads them.

    `counts` are int64 `[n, 2]` tensors, one per device, with the places in `gradients` that their rows belong to.
    """

    gradients: list[Gradient]
    counts: list[tuple[list[int], Tensor]]

    def read(self) -> Iterator[Counted]:
        """Every gradient with its counts, in the optimizer's order: one host read per device."""
        numbers = {
            place: row
            for places, counts in self.counts
            for place, row in zip(places, counts.tolist(), strict=True)
        }
        for place, gradient in enumerate(self.gradients):
            yield Counted(*gradient, *numbers.get(place, (0, 0)))


def examine(optimizer: torch.optim.Optimizer) -> Examined:
    """Count inf and NaN in every gradient of the optimizer, on the device. Reads each gradient once; never syncs."""
    gradients: list[Gradient] = []
    by_device: dict[torch.device, tuple[list[int], list[Tensor]]] = {}
    masters = masters_of(optimizer)  # the model names their halves
    halves = {} if masters is None else dict(zip(masters.masters(), masters.model_parameters(), strict=True))
    for name, place, param in _parameters(optimizer):
        if param.grad is None:
            continue
        for device, tensors in collect([param]).by_device.items():
            places, local = by_device.setdefault(device, ([], []))
            places.append(len(gradients))
            local.extend(tensors)
        gradients.append(Gradient(halves.get(param, param), name, place, param.grad.dtype, param.grad.numel()))
    return Examined(gradients, [(places, kernels.nonfinite_counts(local)) for places, local in by_device.values()])


def _parameters(optimizer: Any) -> Iterator[tuple[str | None, str, Tensor]]:
    """The optimizer's parameters, with its names for them, if any, and their places."""
    for g, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [None] * len(group["params"])
        for i, (name, param) in enumerate(zip(names, group["params"], strict=True)):
            yield name, f"group {g}, parameter {i}", param


def fp16_refusal(optimizer: Any) -> str:
    """The error for float16 gradients, with the names of their parameters."""
    names = [
        name or place
        for name, place, param in _parameters(optimizer)
        if param.grad is not None and param.grad.dtype is torch.float16
    ]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"Attempting to unscale FP16 gradients. Got float16 gradients of {shown}; expected float32 parameters: keep "
        "them in float32 and let autocast cast, or pass GradScaler(allow_fp16=True) where the optimizer keeps float32 "
        "master weights."
    )
