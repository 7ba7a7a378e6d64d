"""What a scaler knows about optimizers, and gradients that two of them share: each is unscaled once.

A shared gradient is unscaled again if it holds scaled values again: if a backward pass may have run since and its
version counter has changed. Neither alone is proof: users clip gradients, and a loss reaches only some of them. So
version counters are noted when a pass may begin: at the next `scale`, or when the backward of a loss that was scaled
earlier begins. Gradients are known by a mark on them, an integer: it keeps nothing alive, refers to no parameter, and
`torch.load` takes a saved gradient that has one.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.scaler.overflow_report import Counts

MARK = "_ampkit_unscaled_for"
"""The attribute of a gradient that holds the `Notes.mark` of the optimizer that unscaled it."""

# Begins anywhere: a gradient that was loaded from a file bears the mark of another process, which must mean nothing.
_marks = itertools.count(secrets.randbits(62))


def ready() -> dict[str, Any]:
    """An optimizer's record at the beginning of an iteration, as torch's scaler makes it."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}


@dataclass(eq=False)
class LastStep:
    """How an optimizer's last step ended.

    Attributes:
        holds_shards: whether the optimizer holds shards of FSDP1.
        found_inf: the flag, 0-d; None before the first step.
        skipped: whether the step was skipped, as far as the host knows; None: only the device knows.
        counts: inf and NaN in its gradients, None where they were not counted.
        idle_steps: steps without gradients so far; -1 once a step has found some.
        takes_scaler: whether the optimizer's `step` takes the scaler itself; None: not looked at yet.
    """

    holds_shards: bool
    found_inf: Tensor | None = None
    skipped: bool | None = None
    counts: Counts | None = None
    idle_steps: int = 0
    takes_scaler: bool | None = None


@dataclass(eq=False)
class Notes:
    """What is known about an optimizer's gradients in an iteration, beside torch's record of it.

    Attributes:
        optimizer: the optimizer.
        state: torch's record, a dict with "stage" and "found_inf_per_device". Other code may hold it.
        last_step: what lasts beyond the iteration.
        groups: process groups whose ranks must skip together.
        clip_factor: what `step` has still to multiply gradients by, to unscale and clip them.
        residual: the factor that still unscales a stepped optimizer's gradients, and the flag without which the step
            has unscaled them; None if they are unscaled.
        mark: set on the gradients that this optimizer has unscaled.
        versions: version counters of the marked gradients when the last backward pass began, by id.
    """

    optimizer: Any
    state: dict[str, Any]
    last_step: LastStep
    groups: Sequence[Any] = ()
    clip_factor: Tensor | None = None
    residual: tuple[Tensor, Tensor | None] | None = None
    mark: int = field(default_factory=_marks.__next__)
    versions: dict[int, int] | None = None


    def residual_inv_scale(self) -> Tensor | None:
        """The factor that unscales the gradients that the optimizer's step has left; None if they are unscaled."""
        if self.residual is None:
            return None
        inv_scale, skipped = self.residual
        # torch's fused kernels write the unscaled gradients back unless they skip
        return inv_scale if skipped is None else torch.where(skipped != 0, inv_scale, 1.0)


Part = tuple[list[Tensor], Notes | None]
"""Parameters of an optimizer, and the notes of the other optimizer that unscaled their gradients, if any."""


def split(optimizer: Any, params: Iterable[Tensor], everyone: Iterable[Notes]) -> list[Part]:
    """The optimizer's parameters: first those not unscaled yet, then the others by who unscaled them."""
    others = {
        notes.mark: notes
        for notes in everyone
        if notes.state["stage"] is not OptState.READY and notes.optimizer is not optimizer
    }
    fresh: list[Tensor] = []
    unscaled: dict[int, list[Tensor]] = {}
    for param in params:
        grad: Any = param.grad
        mark = getattr(grad, MARK, None)
        versions = others[mark].versions if mark in others else None
        if mark not in others or (versions is not None and versions.get(id(grad), grad._version) != grad._version):
            fresh.append(param)
        else:
            unscaled.setdefault(mark, []).append(param)
    return [(fresh, None), *((marked, others[mark]) for mark, marked in unscaled.items())]


def note_versions(everyone: Iterable[Notes]) -> None:
    """Note the version counters of all marked gradients, unless noted already: a backward pass may follow."""
    for notes in everyone:
        if notes.versions is None:
            grads = (param.grad for group in notes.optimizer.param_groups for param in group["params"])
            notes.versions = {id(grad): grad._version for grad in grads if getattr(grad, MARK, None) == notes.mark}
