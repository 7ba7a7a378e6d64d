"""Optimizer steps: any step invalidates every cast of a weight made before it ended.

Fused optimizers, and those that write through `.data`, do not bump the version counter of what they write, so there
are hooks on every `torch.optim.Optimizer`, at both ends of a step: one that is interrupted never reaches its second
hook, and casts made amid a step, in a closure, are invalid after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampkit.torch_internals.tensors import is_capturing

__all__ = ["period", "steps", "watch_steps"]


class _Steps:
    """What has been seen of optimizers since the first cache was made."""

    period: object = None   # identifies the time since the last step; None until a cast is made in it
    captured = False        # a step was captured into a CUDA graph, whose replays call no hook
    watched = False


steps = _Steps()


def period() -> object:
    """The object that stands for the time between the last optimizer step and the next."""
    if steps.period is None:
        steps.period = object()
    return steps.period


def watch_steps() -> None:
    """See the steps from now on."""
    if not steps.watched:
        steps.watched = True
        register_optimizer_step_pre_hook(_ends_period)
        register_optimizer_step_post_hook(_ends_period)


def _ends_period(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Dynamo traces this into compiled steps; it reads nothing that it writes, or each step would be compiled again."""
    steps.period = None
    if not torch.compiler.is_compiling() and is_capturing():
        steps.captured = True
