"""What a scaler knows about optimizers: how the last step ended, and whose gradients are unscaled.

Two optimizers that hold one parameter would each divide its gradient. Gradients are known by a mark on them, two
integers: it keeps nothing alive, refers to no parameter, and `torch.load` takes a saved gradient that has one.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients.collect import parameters
from ampkit.scaler.overflow_report import Counted

MARK = "_ampkit_unscaled_for"
"""The attribute of a gradient that holds the `Notes.mark` of the optimizer that unscaled it, and a version or -1."""
_UNMARKED = -1, -1

# Begins anywhere: a gradient that was loaded from a file bears the mark of another process, which must mean nothing.
_marks = itertools.count(secrets.randbits(62))


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
        outlier: the flag of a norm above `skip_above`, which skips a step too, 0-d; None without that.
        norms: the last ones, for `TimesMedian`.
    """

    holds_shards: bool
    found_inf: Tensor | None = None
    skipped: bool | None = None
    counts: list[Counted] | None = None
    idle_steps: int = 0
    takes_scaler: bool | None = None
    outlier: Tensor | None = None
    norms: Tensor | None = None


@dataclass(eq=False)
class Notes:
    """What is known about an optimizer's gradients in an iteration, beside torch's record of it.

    Attributes:
        optimizer: the optimizer.
        state: torch's record, a dict with "stage" and "found_inf_per_device". Other code may hold it.
        last_step: what lasts beyond the iteration.
        groups: process groups whose ranks must skip together.
        clip_factor: what `step` has still to multiply gradients by, to unscale and clip them.
        outlier: whether the norm is above `skip_above`, 0-d, the same on the ranks of `groups`; None: not known.
        mark: set on the gradients that this optimizer has unscaled.
    """

    optimizer: Any
    state: dict[str, Any]
    last_step: LastStep
    groups: Sequence[Any] = ()
    clip_factor: Tensor | None = None
    outlier: Tensor | None = None
    mark: int = field(default_factory=_marks.__next__)


def note_backward(everyone: Iterable[Notes]) -> None:
    """Mark again the gradients that parameters still have, with their versions: a backward pass may follow this call.

    It may write other gradients to tensors that had a mark: to these, after `zero_grad(set_to_none=False)`; to those
    that DDP keeps, with `gradient_as_bucket_view`.
    """
    for notes in everyone:
        old, notes.mark = notes.mark, next(_marks)
        for param in parameters(notes.optimizer):
            grad = param.grad
            if grad is not None and getattr(grad, MARK, _UNMARKED) in ((old, -1), (old, grad._version)):
                setattr(grad, MARK, (notes.mark, grad._version))


def refuse_claimed(grads: Sequence[Tensor], notes: Notes, everyone: Iterable[Notes]) -> None:
    """Raise `RuntimeError` for a gradient that bears the mark of another optimizer of the same iteration.

    One that has been written to since `note_backward` is another gradient.
    """
    owners = {
        each.mark: each.optimizer
        for each in everyone
        if each is not notes and each.state["stage"] is not OptState.READY
    }
    for grad in grads:
        mark, version = getattr(grad, MARK, _UNMARKED)
        if mark in owners and version in (-1, grad._version):
            raise RuntimeError(
                f"a gradient of shape {tuple(grad.shape)} came up for {type(notes.optimizer).__name__} and belongs to "
                f"{type(owners[mark]).__name__} too, for which it was unscaled or used since the last update(): "
                f"dividing it twice would ruin it. {_advice(owners[mark], notes.optimizer)}"
            )


def _advice(first: Any, second: Any) -> str:
    """What to do about two optimizers that share a gradient: one may hold the other in an attribute."""
    for outer, inner in ((first, second), (second, first)):
        if any(value is inner for value in getattr(outer, "__dict__", {}).values()):
            return (
                f"{type(outer).__name__} wraps {type(inner).__name__}: pass one of the two to unscale_, "
                "clip_grad_norm_, clip_grad_value_ and step"
            )
    return (
        "Give each parameter to one optimizer, pass the same object everywhere (a wrapper or what it wraps), or call "
        "zero_grad(set_to_none=True) before the backward of each optimizer"
    )
