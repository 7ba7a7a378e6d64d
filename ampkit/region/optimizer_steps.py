"""The optimizer steps of this process: which casts of weights each of them outdates, in every cache.

Fused optimizers, and those that write through `.data`, move no version counter, so torch's hooks on every `step` tell
of them, at both ends: one that is interrupted never reaches its second hook. `Step` has the rule.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampkit.torch_internals.dynamo import called_while_tracing, object_at
from ampkit.torch_internals.optimizers import n_step_hooks

__all__ = ["Step", "capturing", "seen", "tell", "untold", "watch_for"]

_OWN = ("torch.optim.", "ampkit.optim.")    # their optimizers write the parameters they hold, and nothing else
_TELLING = "told just now"


class Cache(Protocol):
    """What holds casts."""

    def is_empty(self) -> bool: ...
    def drop_outdated(self, step: Step) -> None: ...
    def renew_lock(self) -> None: ...


class _Living:
    """Objects for as long as they live. Every step of every optimizer adds and lists some: a `WeakSet` takes longer."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, item: Any) -> bool:
        ref = self._refs.get(id(item))
        return ref is not None and ref() is item

    def add(self, item: Any) -> None:
        if item not in self:
            key = id(item)
            # No Python in the callback, in which an interrupt would be lost. The dead reference is `pop`'s default.
            self._refs[key] = weakref.ref(item, functools.partial(self._refs.pop, key))

    def all(self) -> list[Any]:
        return [item for ref in list(self._refs.values()) if (item := ref()) is not None]


class _Seen:
    """What has been seen of optimizers since the first cache was made."""

    count = 0               # steps begun, and steps ended
    captured = False        # a step was, or may have been, captured into a CUDA graph, whose replays call no hook
    watched = False
    caches = _Living()
    optimizers = _Living()      # that have stepped, of those that write what they hold
    compiled: list[weakref.ref[Any]] = []       # whose steps were traced
    lock = threading.RLock()        # a signal's handler may make a cache while one is being made


class _Flags:
    """An attribute for each optimizer whose step has begun, or was compiled, and that no cache has been told of."""


seen = _Seen()
_flags = _Flags()
untold: dict[str, Any] = vars(_flags)       # not empty: call `tell` before a cache is used


class Step:
    """What an optimizer may have written by now; asked at either end of its step, or later where that was compiled.

    An optimizer of torch's or ampkit's, with no hooks of others on its step, writes the parameters that it holds. To be
    on the safe side a step also outdates the casts of what is written around one in ways that nobody sees: weights that
    require grad and that no optimizer is known to hold (masters are copied to them), and frozen ones of the same shape
    as one that was stepped (averages and targets). A step of any other optimizer outdates every cast.
    """

    def __init__(self, optimizer: Any, *, later: bool = False) -> None:
        """`optimizer` is None where it has died. `later`: gradients may not be what they were in the step."""
        self.optimizer = optimizer
        self.everything = optimizer is None or not type(optimizer).__module__.startswith(_OWN) or (
            n_step_hooks(optimizer) > 2     # ours
        )
        self.later = later

    def outdates_unwritten(self, weight: Tensor) -> bool:
        """Whether casts of a weight that is not `written` are not to be used again either."""
        if weight.requires_grad:
            return id(weight) not in self._held_by_others
        return weight.shape in self._shapes

    @functools.cached_property
    def held(self) -> set[int]:
        """The `id`s of all parameters."""
        return set(map(id, _parameters(self.optimizer)))

    @functools.cached_property
    def written(self) -> set[int]:
        """The `id`s of the parameters, without those that are frozen and have no gradient."""
        return set(map(id, self._written))

    @functools.cached_property
    def _written(self) -> list[Tensor]:
        held = _parameters(self.optimizer)
        return held if self.later else [param for param in held if param.requires_grad or param.grad is not None]

    @functools.cached_property
    def _held_by_others(self) -> set[int]:
        others = [optimizer for optimizer in seen.optimizers.all() if optimizer is not self.optimizer]
        return {id(param) for other in others for param in _parameters(other)}

    @functools.cached_property
    def _shapes(self) -> set[torch.Size]:
        return {param.shape for param in self._written}


def _parameters(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def watch_for(cache: Cache) -> None:
    """Have a cache told of every step, as long as it lives."""
    with seen.lock:
        if not seen.watched:
            seen.watched = True
            seen.captured = _graph_exists()
            register_optimizer_step_pre_hook(_begins)
            register_optimizer_step_post_hook(_ends)
        seen.caches.add(cache)


def capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _graph_exists() -> bool:
    """Whether there is a CUDA graph, which may hold a step; asked once, for those captured from now on are seen."""
    if not torch.cuda.is_initialized():
        return False
    graph = torch.cuda.CUDAGraph
    return any(issubclass(kind, graph) for kind in set(map(type, gc.get_objects())))


def _begins(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Have caches ask before they use a cast. Should two threads count as one here, the ends of their steps count."""
    seen.count += 1
    if torch.compiler.is_compiling():
        setattr(_flags, _flag_of(id(optimizer)), True)
    else:
        untold[str(id(optimizer))] = weakref.ref(optimizer)


def _ends(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Drop what the step outdates; a compiled step leaves that to the next use of a cache, as one cut short does."""
    if torch.compiler.is_compiling():
        seen.count += 1
        setattr(_flags, _flag_of(id(optimizer)), True)
        return
    with seen.lock:
        seen.count += 1
        seen.captured = seen.captured or capturing()
    if optimizer not in seen.optimizers and not Step(optimizer).everything:
        seen.optimizers.add(optimizer)
    _tell(optimizer)
    untold.pop(str(id(optimizer)), None)


def tell() -> None:
    """Have every cache drop what steps have outdated that were compiled, or that have not come to their end."""
    with seen.lock:
        untold[_TELLING] = True     # whoever looks at a cache meanwhile waits here until all are told
        try:
            for flag in [flag for flag in list(untold) if flag != _TELLING]:
                ref = untold.pop(flag)
                try:
                    _tell((seen.compiled[int(flag)] if ref is True else ref)(), later=True)
                except BaseException:
                    untold[flag] = ref
                    raise
        finally:
            untold.pop(_TELLING, None)


def _tell(optimizer: Any, *, later: bool = False) -> None:
    """Have caches drop what a step of this optimizer outdates."""
    step = None
    for cache in seen.caches.all():
        if not cache.is_empty():
            step = step or Step(optimizer, later=later)
            cache.drop_outdated(step)


@called_while_tracing
def _flag_of(address: int) -> str:
    """The name of the flag of an optimizer, by the optimizer's `id`: its number among those compiled."""
    optimizer = object_at(address)
    numbers = [n for n, ref in enumerate(seen.compiled) if ref() is optimizer]
    if not numbers:
        numbers = [len(seen.compiled)]
        seen.compiled.append(weakref.ref(optimizer))
    return str(numbers[0])


def _after_fork() -> None:
    """In a forked child: a thread of the parent may have held any lock, and is gone from the child with it."""
    seen.lock = threading.RLock()
    for cache in seen.caches.all():
        cache.renew_lock()
    if untold.pop(_TELLING, None):      # caches were being told of steps, and not all of them have been
        _tell(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
