"""A scaler's record of one optimizer: its gradients in this iteration, how its last step ended, and its last norms.

Two optimizers with the same parameter would each divide its gradient. So gradients get an attribute with the owner ID
of the optimizer that unscales them. The attribute is two integers: it keeps nothing alive, refers to no parameter, and
`torch.load` accepts a saved gradient that has one.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ampkit.gradients.collect import parameters
from ampkit.gradients.ranks import SkipGroups
from ampkit.scaler.overflow_report import Counted

_OWNER_ID = "_ampkit_unscaled_for"
"""The attribute of a gradient: `owner_id` of the optimizer that unscaled it, and a version counter or -1."""
_NO_OWNER = -1, -1

# Random: a gradient that was loaded from a file has an ID of another process, which must match none of this one.
_owner_ids = itertools.count(secrets.randbits(62))


@dataclass(eq=False)
class OptimizerRecord:
    """A scaler's record of an optimizer, for as long as the optimizer exists.

    Attributes:
        holds_shards: whether the optimizer holds shards of FSDP1.
        norms: the optimizer's last norms, for `TimesMedian`; None without it.
        takes_scaler: whether the optimizer's `step` takes the scaler itself; None: not examined yet.
        empty_steps: initial steps without gradients; -1 after a step that found some.
        skips_in_a_row: the last steps that the host skipped for inf or NaN.

    Attributes of the last step:
        found_inf: the flag of inf or NaN, 0-d; None before the first step.
        skipped: whether the host skipped the step; None: only the device has the flag.
        was_outlier: the flag of a norm above `skip_above`, which also skips a step, 0-d; None without `skip_above`.
        counts: numbers of inf and NaN in the gradients; None: not counted.

    Attributes of the iteration, from the first call with the optimizer to `update()`:
        optimizer: the optimizer. This reference keeps its id, by which torch's records are found, from being reused.
        state: torch's record, a dict with "stage" and "found_inf_per_device". Other code may hold it.
        skip_groups: the ranks that must skip together; None before gradients were collected.
        outlier: whether the norm is above `skip_above`, 0-d, the same in all `skip_groups`; None: not compared.
        norm: the largest norm that clipping returned, without clipping the largest that was compared with `skip_above`;
            None without either.
        is_clipped: whether clipping returned `norm`.
        owner_id: the ID of the optimizer on its gradients.
    """

    holds_shards: bool
    norms: Tensor | None = None
    takes_scaler: bool | None = None
    empty_steps: int = 0
    skips_in_a_row: int = 0

    found_inf: Tensor | None = None
    skipped: bool | None = None
    was_outlier: Tensor | None = None
    counts: list[Counted] | None = None

    optimizer: Any = None
    state: dict[str, Any] = field(default_factory=dict)
    skip_groups: SkipGroups | None = None
    outlier: Tensor | None = None
    norm: Tensor | None = None
    is_clipped: bool = False
    owner_id: int = -1

    def begin_iteration(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Join an iteration with torch's record of the optimizer."""
        self.optimizer, self.state, self.owner_id = optimizer, state, next(_owner_ids)
        self.skip_groups = self.outlier = self.norm = None
        self.is_clipped = False

    def end_iteration(self) -> None:
        """Reset the attributes of the iteration, and release the optimizer."""
        self.optimizer, self.state, self.owner_id = None, {}, -1
        self.skip_groups = self.outlier = self.norm = None
        self.is_clipped = False

    def note_clipping(self, norm: Tensor) -> None:
        """Note a norm by which gradients are clipped."""
        self.norm = torch.maximum(self.norm, norm) if self.norm is not None and self.is_clipped else norm
        self.is_clipped = True

    def note_comparison(self, norm: Tensor, outlier: Tensor) -> None:
        """Note a norm that was compared with `skip_above`, and whether it is above."""
        if not self.is_clipped:
            self.norm = norm if self.norm is None else torch.maximum(self.norm, norm)
        self.outlier = outlier


def renew_owner_ids(by_owner_id: dict[int, OptimizerRecord]) -> None:
    """Renew the owner IDs on gradients that parameters still have, with version counters, before a backward pass.

    Backward may write other gradients into the same tensors: after `zero_grad(set_to_none=False)`, and under DDP
    with `gradient_as_bucket_view`. Their version counters then change.
    """
    for old, record in list(by_owner_id.items()):
        record.owner_id = next(_owner_ids)
        by_owner_id[record.owner_id] = by_owner_id.pop(old)
        for param in parameters(record.optimizer):
            grad = param.grad
            if grad is not None and getattr(grad, _OWNER_ID, _NO_OWNER) in ((old, -1), (old, grad._version)):
                setattr(grad, _OWNER_ID, (record.owner_id, grad._version))


def set_owner(grads: Sequence[Tensor], record: OptimizerRecord, by_owner_id: Mapping[int, OptimizerRecord]) -> None:
    """Set the optimizer as the owner of gradients.

    Args:
        grads: the gradients that an optimizer has.
        record: the record of the optimizer.
        by_owner_id: the records of all optimizers of the iteration.

    Raises:
        RuntimeError: another optimizer of the same iteration owns a gradient that has not been written to since
            `renew_owner_ids`.
    """
    for grad in grads if len(by_owner_id) > 1 else ():
        owner_id, version = getattr(grad, _OWNER_ID, _NO_OWNER)
        owner = by_owner_id.get(owner_id)
        if owner is None or owner is record or owner.state["stage"] is OptState.READY:
            continue
        if version in (-1, grad._version):
            raise RuntimeError(
                f"{type(record.optimizer).__name__} and {type(owner.optimizer).__name__} share a gradient of shape "
                f"{tuple(grad.shape)} that was unscaled for, or used by, {type(owner.optimizer).__name__} since the "
                f"last update(); unscaling it again would be wrong. {_advice(owner.optimizer, record.optimizer)}"
            )
    value = record.owner_id, -1
    for grad in grads:
        setattr(grad, _OWNER_ID, value)


def _advice(first: Any, second: Any) -> str:
    """Return advice about two optimizers that share a gradient, of which one may wrap the other."""
    for outer, inner in ((first, second), (second, first)):
        if any(value is inner for value in getattr(outer, "__dict__", {}).values()):
            return (
                f"{type(outer).__name__} wraps {type(inner).__name__}: pass one of the two to unscale_, "
                "clip_grad_norm_, clip_grad_value_ and step"
            )
    return (
        "Assign each parameter to one optimizer, pass the same object everywhere (a wrapper or the wrapped optimizer), "
        "or call zero_grad(set_to_none=True) before the backward of each optimizer"
    )
