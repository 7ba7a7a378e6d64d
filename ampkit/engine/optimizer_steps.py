"""Optimizer steps: any step invalidates every cast of a weight made before it ended.

Fused optimizers, and those that write through `.data`, do not bump the version counter of what they write, so there
are hooks on every `torch.optim.Optimizer`, at both ends of a step: one that is interrupted never reaches its second
hook, and casts made amid a step, in a closure, are invalid after it.
"""

from __future__ import annotations

import functools
import weakref
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
_caches: dict[int, weakref.ref[Any]] = {}     # a `WeakSet` cannot be listed while another thread adds to it


def period() -> object:
    """The object that stands for the time between the last optimizer step and the next."""
    if steps.period is None:
        steps.period = object()
    return steps.period


def watch_steps(cache: Any) -> None:
    """See the steps from now on, and clear a cache at each, as long as it lives."""
    key = id(cache)
    # No Python in the callback, in which an interrupt would be lost. The dead reference is `pop`'s default.
    _caches[key] = weakref.ref(cache, functools.partial(_caches.pop, key))
    if not steps.watched:
        steps.watched = True
        register_optimizer_step_pre_hook(_ends_period)
        register_optimizer_step_post_hook(_ends_period)


def _ends_period(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Dynamo traces this into compiled steps; it reads nothing that it writes, or each step would be compiled again."""
    steps.period = None
    if torch.compiler.is_compiling():
        return      # what a compiled step invalidates is freed when a region casts again
    for ref in list(_caches.values()):
        cache = ref()
        if cache is not None:
            cache.clear()
    if is_capturing():
        steps.captured = True
