"""A scaler's notes about each optimizer: how its last step ended, and which gradients are unscaled for it.

Two optimizers with the same parameter would each divide its gradient. So an optimizer's gradients get a mark, an
attribute of two integers. It keeps nothing alive, refers to no parameter, and `torch.load` accepts a saved gradient
that has one.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients.collect import parameters
from ampkit.gradients.ranks import Agreement
from ampkit.scaler.overflow_report import Counted

MARK = "_ampkit_unscaled_for"
"""The attribute of a gradient with `Notes.mark` of the optimizer that unscaled it, and a version counter or -1."""
_UNMARKED = -1, -1

# Random: a gradient that was loaded from a file has a mark of another process, which must match none of this one.
_marks = itertools.count(secrets.randbits(62))


@dataclass(eq=False)
class LastStep:
    """How an optimizer's last step ended.

    Attributes:
        holds_shards: whether the optimizer holds shards of FSDP1.
        found_inf: the flag of inf or NaN, 0-d; None before the first step.
        skipped: whether the host skipped the step; None: only the device knows whether it was skipped.
        counts: numbers of inf and NaN in the gradients; None: not counted.
        idle_steps: initial steps without gradients; -1 after a step that found some.
        takes_scaler: whether the optimizer's `step` takes the scaler itself; None: not examined yet.
        outlier: the flag of a norm above `skip_above`, which skips a step too, 0-d; None without `skip_above`.
        norms: the optimizer's last norms, for `TimesMedian`; None without it.
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
    """Notes about an optimizer's gradients in one iteration, which torch's record of it has no entry for.

    Attributes:
        optimizer: the optimizer.
        state: torch's record, a dict with "stage" and "found_inf_per_device". Other code may hold it.
        last_step: the notes that outlast the iteration.
        agreement: the ranks that must skip together; None: there are none.
        clip_factor: the factor that unscales and clips gradients, if `step` has still to apply it; else None.
        outlier: whether the norm is above `skip_above`, 0-d, the same on the ranks of `agreement`; None: not judged.
        mark: the number that marks gradients as this optimizer's.
    """

    optimizer: Any
    state: dict[str, Any]
    last_step: LastStep
    agreement: Agreement | None = None
    clip_factor: Tensor | None = None
    outlier: Tensor | None = None
    mark: int = field(default_factory=_marks.__next__)


def note_backward(by_mark: dict[int, Notes]) -> None:
    """Renew the marks of gradients that parameters still have, with version counters, before a backward pass.

    Backward may write other gradients into marked tensors: into these after `zero_grad(set_to_none=False)`, and into
    those that DDP keeps with `gradient_as_bucket_view`. Their version counters then change.
    """
    for old, notes in list(by_mark.items()):
        notes.mark = next(_marks)
        by_mark[notes.mark] = by_mark.pop(old)
        for param in parameters(notes.optimizer):
            grad = param.grad
            if grad is not None and getattr(grad, MARK, _UNMARKED) in ((old, -1), (old, grad._version)):
                setattr(grad, MARK, (notes.mark, grad._version))


def refuse_claimed(grads: Sequence[Tensor], notes: Notes, by_mark: Mapping[int, Notes]) -> None:
    """Raise `RuntimeError` for a gradient that has the mark of another optimizer of the same iteration.

    A gradient that was written to since `note_backward` is a new one.

    Args:
        grads: the gradients that an optimizer has.
        notes: the notes about it.
        by_mark: the notes about all optimizers, by `Notes.mark`.
    """
    for grad in grads:
        mark, version = getattr(grad, MARK, _UNMARKED)
        owner = by_mark.get(mark)
        if owner is None or owner is notes or owner.state["stage"] is OptState.READY:
            continue
        if version in (-1, grad._version):
            raise RuntimeError(
                f"a gradient of shape {tuple(grad.shape)} came up for {type(notes.optimizer).__name__} and belongs to "
                f"{type(owner.optimizer).__name__} too, for which it was unscaled or used since the last update(): "
                f"dividing it twice would ruin it. {_advice(owner.optimizer, notes.optimizer)}"
            )


def _advice(first: Any, second: Any) -> str:
    """Advice about two optimizers that share a gradient, of which one may wrap the other."""
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
