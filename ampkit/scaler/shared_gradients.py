"""Gradients that two optimizers share: each is unscaled once, and again after another backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.scaler.optimizer_record import OptimizerRecord

_MARK = "_ampkit_unscaled_for"


Part = tuple[list[Tensor], OptimizerRecord | None]
"""Parameters of an optimizer, and the record of the other optimizer that unscaled their gradients, if any."""


class SharedGradients:
    """Knows which gradients have been unscaled in this iteration, by marks on them.

    A shared gradient holds scaled values again if a backward pass may have run since and its version counter changed.
    Neither alone is proof: users clip gradients, and a loss reaches only some of them. So version counters are noted
    when a pass may begin: at the next `scale`, or when the backward of a loss that was scaled earlier begins.
    `losses` are scaled losses, whose backward may run at any time.
    """

    def __init__(self) -> None:
        self.losses: list[weakref.ref[Tensor]] = []

    def split(self, optimizer: Any, params: list[Tensor], records: Mapping[int, OptimizerRecord]) -> list[Part]:
        """The optimizer's parameters: first those not unscaled yet, then the others by who unscaled them."""
        others = {
            record.mark: record
            for record in records.values()
            if record.mark is not None and record.stage is not OptState.READY and record.optimizer is not optimizer
        }
        parts: dict[object, list[Tensor]] = {}
        for param in params:
            grad: Any = param.grad
            mark = getattr(grad, _MARK, None)
            if mark in others:
                versions = others[mark].versions
                if versions is not None and versions.get(id(grad), grad._version) != grad._version:
                    mark = None  # scaled values again
            parts.setdefault(mark, []).append(param)
        fresh = [param for mark, marked in parts.items() if mark not in others for param in marked]
        return [(fresh, None), *((marked, others[mark]) for mark, marked in parts.items() if mark in others)]

    def mark(
        self, record: OptimizerRecord, grads: Sequence[Tensor], before_backward: Callable[[Tensor], None]
    ) -> None:
        """Mark gradients that this optimizer has unscaled, in case another one shares them.

        `before_backward`, which notes versions, is called when the backward of a loss that was scaled before begins.
        """
        mark = record.mark
        if mark is None:
            mark = record.mark = object()  # holds nothing: a gradient must not keep an optimizer alive
        record.versions = None
        if len(self.losses) > 1:
            for reference in self.losses:
                if (loss := reference()) is not None:
                    loss.register_hook(before_backward)
            self.losses = []
        for grad in grads:
            setattr(grad, _MARK, mark)

    def keep_versions(self, records: Mapping[int, OptimizerRecord]) -> None:
        """Note the version counters of all marked gradients, unless noted already: a backward pass may follow."""
        for record in records.values():
            if record.mark is not None and record.versions is None:
                grads = (param.grad for group in record.optimizer.param_groups for param in group["params"])
                record.versions = {
                    id(grad): grad._version for grad in grads if getattr(grad, _MARK, None) is record.mark
                }
