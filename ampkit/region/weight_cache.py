"""The cast cache: the low-precision copy of a weight, made once and used until the weight changes.

What is kept: casts of float32 leaves that require grad, and of frozen `nn.Parameter`s; never of views, of activations
or of tensors made in inference mode. An entry answers only for the very tensor it was made from (weak reference), at
the same version counter and the same storage address, and only until some `torch.optim.Optimizer` steps: `fused=True`
optimizers and `.data` writes move weights without moving their version, hence the optimizer hook.

Casts are made with grad mode on and inference mode off, so that one entry serves `no_grad`, `inference_mode` and
training alike and gradients flow. Between regions an entry is kept without its autograd history, and gets a new one at
its next use. History would keep the parameter alive after its model is gone, and it has a place in backward's order:
that of an earlier micro-batch comes last, so all gradients would wait in memory until every layer was through.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ampkit.policy.casting import converter
from ampkit.torch_internals.lookup import private

__all__ = ["CacheInfo", "WeightCache", "capturing"]

# Asked at every use of every weight: finding a name in three modules takes longer than the answer.
_cache_enabled = torch.is_autocast_cache_enabled
_grad_enabled = torch.is_grad_enabled
_inference_mode = torch.is_inference_mode_enabled
_n_modes: Callable[[], int] = private("_C._len_torch_dispatch_stack")
_tracing_state: Callable[[], Any] = private("_C._get_tracing_state")
_functorch_level: Callable[[], int | None] = private("_C._functorch.maybe_current_level")


class CacheInfo(NamedTuple):
    """What a `WeightCache` holds now, and what it has done since it was made."""

    entries: int    # casts held
    bytes: int      # bytes of those casts
    hits: int       # casts answered from the cache
    misses: int     # casts made, each of which read and wrote the weight once


class _Weight(weakref.ref[Tensor]):
    """A weak reference to a weight that knows the entry made from it."""

    __slots__ = ("key",)
    key: tuple[int, torch.dtype]


class _Entry:
    __slots__ = ("address", "cast", "nbytes", "steps", "version", "weight")

    def __init__(self, weight: _Weight, version: int, address: int, steps: int, cast: Tensor) -> None:
        self.weight = weight
        self.version = version
        self.address = address
        self.steps = steps
        self.cast = cast
        self.nbytes = cast.nbytes


class WeightCache:
    """Keeps weight casts across regions until an optimizer steps: pass it as `autocast(cache=...)`.

    With gradient accumulation each weight is then cast once per optimizer step instead of once per micro-batch.
    Call `clear()` after writing weights in place through `.data` (`p.data.copy_(average)`), which moves no version
    counter, and before converting a module under `torch.__future__.set_swap_module_params_on_conversion`, which refuses
    weights that weak references point to.
    `max_bytes` bounds what is held (None: no bound); the least recently used casts go first. May be shared between
    threads. Holds no reference to a parameter once the region is left. Never syncs.

    >>> cache = WeightCache(max_bytes=2**30)
    >>> cache.info()
    CacheInfo(entries=0, bytes=0, hits=0, misses=0)
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        if max_bytes is not None and (not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 0):
            raise ValueError(f"max_bytes is {max_bytes!r}; expected a number of bytes, 0 or more, or None for no bound")
        _watch_optimizers()
        self.max_bytes = max_bytes
        self.in_capture = False     # made inside a CUDA graph capture, so its casts belong to that graph
        self._entries: dict[tuple[int, torch.dtype], _Entry] = {}      # the least recently used first, if bounded
        self._forget = _forgetting(self)
        self._lock = threading.RLock()
        self._bytes = 0
        self._hits = 0
        self._misses = 0
        self._looked_at = _steps.count      # the optimizer step that outdated casts were last dropped after
        self.modes: dict[Any, Any] = {}     # the dispatch modes that casts for this cache, by policies; see `autocast`
        with _steps.lock:
            _steps.caches.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCache, (self.max_bytes,)       # a copy starts empty: what is held belongs to these very weights

    def __repr__(self) -> str:
        return f"WeightCache(max_bytes={self.max_bytes}): {self.info()}"

    @property
    def hits(self) -> int:
        """Casts answered from the cache."""
        return self._hits

    def info(self) -> CacheInfo:
        """What is held and how often it served. Casts that an optimizer step has outdated are dropped first."""
        self.drop_outdated()
        return CacheInfo(len(self._entries), self._bytes, self._hits, self._misses)

    def clear(self) -> None:
        """Drop every cast. Regions that are open make new ones as they need them."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def drop_outdated(self) -> None:
        """Drop the casts made before the latest optimizer step."""
        steps = _steps.count
        if self._looked_at == steps:
            return
        with self._lock:
            for key in list(self._entries):     # a copy: what is freed on the way may be a weight, see `_forgetting`
                entry = self._entries.get(key)
                if entry is not None and entry.steps != steps:
                    self._remove(key)
            self._looked_at = steps

    def disconnect(self) -> None:
        """Forget the autograd history of every cast, so that parameters can be freed; the values stay."""
        with self._lock:
            for entry in list(self._entries.values()):      # a copy: the history may be all that keeps a weight alive
                if entry.cast.requires_grad:
                    entry.cast = entry.cast.detach()

    def cast(self, leaf: Tensor, dtype: torch.dtype) -> Tensor:
        """`leaf.to(dtype)`, from the cache where the leaf is a weight that may be cached."""
        key = (id(leaf), dtype)
        entry = self._entries.get(key)
        if entry is None or entry.weight() is not leaf:
            if not _is_weight(leaf) or self._in_the_way(leaf):
                return leaf.to(dtype)
            return self._make(key, leaf, dtype)
        if self._in_the_way(leaf):
            return leaf.to(dtype)
        # `_address`, without the call: this runs for every weight of every operator.
        plain = type(leaf) is Parameter or type(leaf) is Tensor
        if (
            entry.version != leaf._version
            or (plain and entry.address != leaf.data_ptr())
            or entry.steps != _steps.count
        ):
            return self._make(key, leaf, dtype)
        self._hits += 1
        if self.max_bytes is not None:
            with self._lock:
                if self._entries.pop(key, None) is not None:
                    self._entries[key] = entry
        cast = entry.cast
        if cast.requires_grad is not leaf.requires_grad:    # kept from an earlier region, or frozen or unfrozen since
            cast = entry.cast = _connect(leaf, cast) if leaf.requires_grad else cast.detach()
        return cast

    def _in_the_way(self, leaf: Tensor) -> bool:
        """Whether the cache is not to be used here: switched off, a recording, or a graph capture it is not of."""
        return (
            not _cache_enabled()        # by a `torch.autocast` region inside ours
            or _n_modes() > 0
            or _tracing_state() is not None
            or _functorch_level() is not None
            or (leaf.is_cuda and capturing() != self.in_capture)
        )

    def _make(self, key: tuple[int, torch.dtype], leaf: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast a weight and keep the cast."""
        self._misses += 1
        version, address, steps = leaf._version, _address(leaf), _steps.count   # before: a write meanwhile outdates it
        made = _recorded(leaf, dtype)
        weight = _Weight(leaf, self._forget)
        weight.key = key
        self._add(key, _Entry(weight, version, address, steps, made))
        return made

    def _add(self, key: tuple[int, torch.dtype], entry: _Entry) -> None:
        with self._lock:
            if key in self._entries:
                self._remove(key)
            if self.max_bytes is not None:
                if entry.nbytes > self.max_bytes:
                    return
                while self._entries and self._bytes + entry.nbytes > self.max_bytes:
                    self._remove(next(iter(self._entries)))
            self._entries[key] = entry
            self._bytes += entry.nbytes

    def _remove(self, key: tuple[int, torch.dtype]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.nbytes


def _forgetting(cache: WeightCache) -> Callable[[Any], None]:
    """What the weak references of a cache's weights call when one dies; does not keep the cache alive."""
    this = weakref.ref(cache)

    def forget(weight: _Weight) -> None:
        cache = this()
        if cache is not None:
            with cache._lock:
                entry = cache._entries.get(weight.key)
                if entry is not None and entry.weight is weight:
                    cache._remove(weight.key)

    return forget


def _is_weight(value: Tensor) -> bool:
    """Whether the cast of a leaf is worth keeping: trained or frozen parameters, never views or inputs.

    Nor tensors made in inference mode: they have no version counter, so a write to them could not be seen.
    """
    return (
        value.dtype is torch.float32
        and value.layout is torch.strided       # others have no address to tell a replaced storage by
        and (value.requires_grad or isinstance(value, Parameter))
        and not value._is_view()
        and not value.is_inference()
    )


def _address(weight: Tensor) -> int:
    """Storage address of an ordinary tensor; 0 for a subclass, which may have none of its own."""
    return weight.data_ptr() if type(weight) is Parameter or type(weight) is Tensor else 0


def capturing() -> bool:
    """Whether the current CUDA stream is being captured into a graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class _Steps:
    """How many optimizer steps this process has seen, and the caches that each of them outdates."""

    count = 0
    watched = False
    caches: weakref.WeakSet[WeightCache] = weakref.WeakSet()
    lock = threading.Lock()


_steps = _Steps()


def _watch_optimizers() -> None:
    if not _steps.watched:
        _steps.watched = True
        register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Outdate every cast, and free those held; a compiled step leaves that to their next use."""
    _steps.count += 1
    if not torch.compiler.is_compiling():
        with _steps.lock:
            caches = list(_steps.caches)
        for cache in caches:
            cache.drop_outdated()


class _Answer(TorchDispatchMode):
    """Answers the one copy that autograd asks for below it with values that exist already."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            return self.values.detach()
        return func(*args, **(kwargs or {}))


def _connect(weight: Tensor, values: Tensor) -> Tensor:
    """`values` as the cast of `weight`, differentiable: autograd records the cast, nothing is copied."""
    with _Answer(values):
        return _recorded(weight, values.dtype)


def _recorded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast that autograd records whatever the modes here are."""
    convert = converter(dtype)
    if _grad_enabled() and not _inference_mode():       # contexts that change nothing cost as much as a small cast
        return convert(weight)
    with torch.inference_mode(False), torch.enable_grad():
        return convert(weight)
