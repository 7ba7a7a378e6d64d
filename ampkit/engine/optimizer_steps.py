"""Optimizer steps: any step of any optimizer invalidates every cached cast of a weight made before the step ended.

Fused optimizers, and those that write through `.data`, do not increment the version counter of the weights that they
write. So there are hooks on every `torch.optim.Optimizer`, at both ends of a step: a step that is interrupted never
reaches its second hook, and casts made during a step, in a closure, are invalid after it.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampkit_kernels import CURRENT_CUDA, is_capturing

__all__ = ["current_generation", "invalidate_casts", "observed", "watch_steps"]


class _Observed:
    """Facts about optimizer steps since the first cache was made."""

    generation: object = None  # a new object after each optimizer step, which casts remember; None until one is made
    captured = False  # a step was captured into a CUDA graph, whose replays call no hook
    has_hooks = False


observed = _Observed()
_caches: dict[int, weakref.ref[Any]] = {}  # a `WeakSet` cannot be listed while another thread adds to it


def current_generation() -> object:
    """The object that identifies the weights' values from the last optimizer step to the next."""
    if observed.generation is None:
        observed.generation = object()
    return observed.generation


def invalidate_casts() -> None:
    """Make every cached cast invalid, as an optimizer step does."""
    observed.generation = None


def watch_steps(cache: Any) -> None:
    """Watch optimizer steps from now on, and clear `cache` at each of them, for as long as it lives."""
    key = id(cache)
    # No Python in the callback, in which an interrupt would be lost. The dead reference is `pop`'s default.
    _caches[key] = weakref.ref(cache, functools.partial(_caches.pop, key))
    if not observed.has_hooks:
        observed.has_hooks = True
        register_optimizer_step_pre_hook(_on_step)
        register_optimizer_step_post_hook(_on_step)


def _on_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Dynamo traces this into compiled steps; it reads nothing that it writes, or each step would be compiled again."""
    observed.generation = None
    if torch.compiler.is_compiling():
        return  # the casts that a compiled step invalidates are freed when a region casts again
    for ref in list(_caches.values()):
        cache = ref()
        if cache is not None:
            cache.clear()
    if is_capturing(CURRENT_CUDA):
        observed.captured = True
