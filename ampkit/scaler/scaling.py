"""Multiplying what a user passes to `scale` by the scale: a loss, or a nested collection of outputs."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ampkit.gradients.transfer import moved
from ampkit.scaler.iteration import Iteration
from ampkit.scaler.live_scale import LiveScale
from ampkit.scaler.step_log import StepLog


class Scaling:
    """Scales losses, and notes them: their backward may run at any time."""

    def __init__(self, live: LiveScale, iteration: Iteration, log: StepLog) -> None:
        self._live = live
        self._iteration = iteration
        self._log = log

    def scale(self, outputs: Any, place: Callable[[torch.device], Any]) -> Any:
        """The outputs times the scale, which `place` puts on a device if it is on none."""
        iteration = self._iteration
        iteration.scale_calls += 1
        if iteration.records:
            iteration.keep_versions()
        copies: dict[torch.device, Tensor] = {}
        if isinstance(outputs, Tensor):
            if not outputs.requires_grad:
                self._warn_detached()
            return self._scale_one(outputs, copies, place)
        seen: list[bool] = []

        def scale_one(output: Tensor) -> Tensor:
            seen.append(output.requires_grad)
            return self._scale_one(output, copies, place)

        scaled = map_tensors(outputs, scale_one)
        if seen and not any(seen):
            self._warn_detached()
        return scaled

    def _scale_one(
        self, output: Tensor, copies: dict[torch.device, Tensor], place: Callable[[torch.device], Any]
    ) -> Tensor:
        live = self._live
        if live.scale is None:
            place(output.device)
        if self._log.order.wanted and not is_compiling():
            self._log.order.learn([output])
        if not live.strategy.scales_losses:
            return output
        scale = live.tensor if live.scale is None else live.scale
        if scale.device != output.device:
            if output.device not in copies:
                copies[output.device] = moved(scale, output.device)
            scale = copies[output.device]
        scaled = output * scale
        if scaled.requires_grad:
            self._iteration.shared.losses.append(weakref.ref(scaled))
        return scaled

    def _warn_detached(self) -> None:
        if torch.is_grad_enabled():
            self._log.warn_once(
                "detached",
                "scale() got a loss that does not require grad: backward() cannot reach any parameter from it. It "
                "may have been rebuilt with torch.tensor(), detached, converted by .item(), or computed under "
                "torch.no_grad().",
            )


def map_tensors(outputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`function` applied to every tensor in `outputs`, containers rebuilt as they were.

    Lists, tuples, named tuples and mappings keep their type; any other iterable becomes a lazy iterator, as in torch.

    Raises:
        ValueError: a leaf that is not a tensor, or a string.
    """
    if isinstance(outputs, Tensor):
        return function(outputs)
    if isinstance(outputs, str | bytes) or not isinstance(outputs, Iterable):
        raise ValueError(f"outputs must be a Tensor or an iterable of Tensors; got {type(outputs).__name__}")
    if isinstance(outputs, Mapping):
        values = {key: map_tensors(value, function) for key, value in outputs.items()}
        return values if type(outputs) is dict else _mapping_like(outputs, values)
    mapped = (map_tensors(value, function) for value in outputs)
    if hasattr(outputs, "_fields") and isinstance(outputs, tuple):
        return type(outputs)(*mapped)
    if isinstance(outputs, list | tuple):
        return type(outputs)(mapped)
    return mapped


def _mapping_like(mapping: Any, values: dict[Any, Any]) -> Any:
    """A mapping of the same type; one whose constructor takes no mapping (`defaultdict`) is copied and updated."""
    try:
        return type(mapping)(values)
    except TypeError:
        twin = copy.copy(mapping)
        twin.update(values)
        return twin
