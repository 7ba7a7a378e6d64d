"""Weight caches: a weight's low-precision cast is reused for as long as the weight cannot have changed.

`_Casts.find`, and for a `RegionCache` `_CastsOfRegion.find`, compare at every use of a cached cast:

- the tensor: a weak reference to the very tensor that was cast;
- its version counter, which every write that autograd knows of increments;
- its memory: the address, and a weak reference to the storage, since an address alone comes back as soon as
  `p.data = ...` has freed it;
- the optimizer steps: none since the cast, whatever it writes (`optimizer_steps`);
- whether the weight requires grad: if that has changed, the cast's autograd history changes too (`_reconnect`).

`_CachedCast.survives` compares, when a `WeightCache` is asked for the cast in a later region, and, but for the layout,
when a region ends:

- the layout: the same shape and strides, and no read of the parameter's `.data` since. Writes through it increment no
  version counter: so adapters are merged (`p.data += ...`) and averages loaded (`p.data.copy_(...)`);
- the owner: torch allocated the memory, and no other tensor, array or process has it;
- collectives: `torch.distributed` has started none since the cast;
- CUDA graphs: no optimizer step was captured into one. Replays call no hook.

`RegionCache.weights` bypasses the cache where casts cannot be shared: in traces, in transforms, under modes that record
operators, in the capture of another CUDA graph.

`RegionCache` belongs to a thread. It keeps what torch.amp keeps until the outermost region is left: casts of float32
leaves that require grad, outside inference mode. `WeightCache` is made by the user and keeps casts from one region to
the next, also those of frozen parameters and in inference mode.

A `RegionCache` makes casts with an autograd history under `no_grad` too, as torch.amp does: the age of the history
decides in which order the weight's gradients are added up. A `WeightCache` makes them without one there and in
inference mode. Where autograd records later, it casts the weight again, and connects the kept cast to a large weight
(`_reconnect`). Between regions it keeps only the values of a cast. Its autograd history would keep the parameter alive;
and backward would run the history of an earlier micro-batch last, so that all gradients stayed in memory until then.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit.engine.casting import cast_to
from ampkit.engine.optimizer_steps import current_generation, observed, watch_steps
from ampkit.policy.float8_recipes import DTYPES
from ampkit.torch_internals.dynamo import dynamo_skip
from ampkit.torch_internals.operator_tracing import only_observed
from ampkit.torch_internals.tensors import (
    connected,
    n_collectives,
    n_dispatch_modes,
    owns_its_memory,
    set_grad_enabled,
    tracing_state,
)
from ampkit.torch_internals.transforms import functorch_level, is_wrapped, transforms
from ampkit_kernels import CURRENT_CUDA, is_capturing

__all__ = ["CacheInfo", "RegionCache", "WeightCache"]

# Called for every operator with a weight: looking them up in torch's modules would take longer than the calls.
_cache_enabled = torch.is_autocast_cache_enabled
_inference_mode, _grad_enabled = torch.is_inference_mode_enabled, torch.is_grad_enabled

# Elements of a weight from which a `WeightCache` connects a kept cast to it, where autograd records. Measured in steps
# on a CPU (docs/performance.md); a kept cast is also compared with more.
SMALLEST_CONNECTED = 1 << 19


class CacheInfo(NamedTuple):
    """The contents of a `WeightCache`, and counts since it was made."""

    entries: int  # casts that it holds
    bytes: int  # bytes of these casts
    hits: int  # uses of a cached cast
    misses: int  # casts made, each of which read and wrote the weight once


class _CachedCast:
    """The cast of a weight, and the facts about the weight that later uses compare: see the module's docstring."""

    __slots__ = (
        "address",
        "cast",
        "collectives",
        "generation",
        "has_history",
        "layout",
        "region",
        "storage",
        "version",
        "weight",
    )

    cast: Tensor
    has_history: bool  # whether the cast requires grad
    layout: tuple[Any, Any] | None  # None if the cast must not be used in another region
    collectives: Any

    def __init__(self, weight: Tensor, region: int) -> None:
        """Raises `RuntimeError` for a weight without a version or an address of its own."""
        self.generation = observed.generation or current_generation()
        self.version = weight._version
        self.region = region
        self.layout = None
        self.weight = weakref.ref(weight)
        self.address, self.storage = _memory(weight)

    def keep(self, weight: Tensor) -> None:
        """Note what other regions compare."""
        self.collectives = n_collectives()
        if owns_its_memory(weight):  # else an alias may write in this region, and be gone before the next
            self.layout = _layout(weight)

    def survives(self, weight: Tensor, collectives: Any) -> bool:
        """Whether another region may use the cast: no write can have gone unseen. Its first use compares the layout."""
        return (
            self.layout is not None
            and not observed.captured
            and owns_its_memory(weight)
            and collectives is not None
            and self.collectives == collectives
        )


class _Counts:
    """Counts of a cache: see `CacheInfo`."""

    __slots__ = ("hits", "misses")

    def __init__(self) -> None:
        self.hits = self.misses = 0


class _Casts(dict[int, _CachedCast]):
    """The casts of weights on one device type to one dtype, by the `id` of the weight, of a `WeightCache`."""

    __slots__ = ("across_regions", "caster", "convert", "counts", "region")
    dtypes = frozenset({torch.float32})  # of weights

    def __init__(self, caster: Any, counts: _Counts, *, across_regions: bool) -> None:
        """`caster` makes the casts: a `Cast`, or a `WeightForm` of `float8_products`."""
        super().__init__()
        self.caster = caster
        self.counts = counts
        self.convert = caster.convert
        self.across_regions = across_regions
        self.region = 0  # regions entered so far: the first use of a cast in each compares more

    def find(self, weight: Tensor) -> Tensor:
        """The cast of a weight: the cached one if all comparisons hold, else a new one."""
        cached = self.get(id(weight))
        if (
            cached is not None
            and cached.weight() is weight
            and cached.version == weight._version
            and (cached.storage is None or (cached.address == weight.data_ptr() and cached.storage() is not None))
            and cached.generation is observed.generation
            and (cached.region == self.region or self._use_in_this_region(cached, weight))
            and (cached.has_history is weight.requires_grad or not _grad_enabled() or self._reconnect(cached, weight))
        ):
            self.counts.hits += 1
            return cached.cast
        return self._make(weight)

    def _use_in_this_region(self, cached: _CachedCast, weight: Tensor) -> bool:
        """Whether a cast of an earlier region is still right; if so, this region does not ask again."""
        if not cached.survives(weight, n_collectives()) or cached.layout != _layout(weight):
            return False
        cached.region = self.region
        return True

    def _reconnect(self, cached: _CachedCast, weight: Tensor) -> bool:
        """Make the autograd history of a cached cast fit the weight; False if a new cast is needed.

        A cast that was kept without a history gets one where autograd records; a frozen weight's cast loses it.
        """
        if not weight.requires_grad:
            cached.cast, cached.has_history = cached.cast.detach(), False
            return self._is_cacheable(weight)
        if _inference_mode():
            return True
        # A transform of `torch.func` refuses what `connected` records.
        if not self._keeps(weight) or functorch_level() is not None:
            return False
        cached.cast, cached.has_history = connected(weight, cached.cast), True
        return True

    def _keeps(self, weight: Tensor) -> bool:
        """Whether another region shall use the cast that is made now.

        Not of a small weight where autograd records: to cast it again is faster than to connect a kept cast.
        """
        return self.across_regions and (
            not _grad_enabled() or not weight.requires_grad or weight.numel() >= SMALLEST_CONNECTED or _inference_mode()
        )

    def _is_cacheable(self, weight: Tensor) -> bool:
        """Whether casts of a weight are cached: never those of views and inputs."""
        if (
            weight.dtype not in self.dtypes
            or not weight.is_leaf
            or weight._is_view()
            or not self.caster.on_device(weight)
        ):
            return False
        if not self.across_regions:
            return weight.requires_grad
        return (
            weight.layout is torch.strided
            and not is_wrapped(weight)
            and (weight.requires_grad or (isinstance(weight, Parameter) and owns_its_memory(weight)))
        )

    def _make(self, weight: Tensor) -> Tensor:
        """Cast a weight, and cache the cast if the weight is cacheable."""
        if not self._is_cacheable(weight):
            self.pop(id(weight), None)  # an invalid cast must not become valid again
            return self.caster.tensor(weight)
        if not self.across_regions and _inference_mode():  # a tensor of inference mode is of no use after it
            self.pop(id(weight), None)
            return self.caster.tensor(weight)
        try:
            cached = _CachedCast(weight, self.region)  # before the cast: a write meanwhile invalidates it
        except RuntimeError:  # of inference mode or with sparse memory, which show no writes
            return self.caster.tensor(weight)
        self.counts.misses += 1
        if self._keeps(weight):
            cached.keep(weight)
        if _inference_mode():
            with torch.inference_mode(False):
                cached.cast = self.convert(weight)
        else:
            cached.cast = self.convert(weight)
        cached.has_history = cached.cast.requires_grad
        self[id(weight)] = cached
        return cached.cast

    def data_was_read(self, weight: Tensor) -> None:
        """Use the cast of a weight in no other region, and that of a frozen weight not at all.

        In the open region torch.amp goes on with the cast of a weight that requires grad, and a second cast would sum
        the weight's gradients in another order.
        """
        cached = self.get(id(weight))
        if cached is not None and weight.requires_grad:
            cached.layout = None
        else:
            self.pop(id(weight), None)

    def drop_stale(self) -> list[_CachedCast]:
        """Drop casts from before the last optimizer step, and casts of freed weights; return the others."""
        for key, cached in list(self.items()):
            is_freed = cached.weight() is None or (cached.storage is not None and cached.storage() is None)
            if is_freed or cached.generation is not observed.generation:
                self.pop(key, None)
        return list(self.values())

    def end_region(self) -> None:
        """Keep the values of casts that another region may use, without their history, and drop the others."""
        collectives = n_collectives()
        for key, cached in list(self.items()):
            weight = cached.weight()
            if (
                weight is None
                or cached.generation is not observed.generation
                or not cached.survives(weight, collectives)
            ):
                self.pop(key, None)
            elif cached.has_history:
                cached.cast, cached.has_history = cached.cast.detach(), False


class _CastsOfRegion(_Casts):
    """The casts of a `RegionCache` to one dtype: of weights that require grad, with a history, in one region.

    Entries are tuples, which are made and compared faster: weight, version, address, storage, steps, cast. An entry may
    hold the weight, since the history of the cast does; so no other weight has its `id`.
    """

    def find(self, weight: Tensor) -> Tensor:
        cached: Any = self.get(id(weight))
        if cached is not None:
            _, version, address, storage, generation, cast = cached
            if (
                version == weight._version
                and (storage is None or (address == weight.data_ptr() and storage() is not None))
                and generation is observed.generation
                and (weight.requires_grad or not _grad_enabled())
            ):
                self.counts.hits += 1
                return cast
        return self._make(weight)

    def _make(self, weight: Tensor) -> Tensor:
        if not self._is_cacheable(weight) or _inference_mode():  # a tensor of inference mode is of no use after it
            self.pop(id(weight), None)  # an invalid cast must not become valid again
            return self.caster.tensor(weight)
        generation = observed.generation or current_generation()
        try:  # before the cast: a write meanwhile invalidates it
            version = weight._version
            address, storage = _memory(weight)
        except RuntimeError:  # of inference mode or with sparse memory, which show no writes
            return self.caster.tensor(weight)
        self.counts.misses += 1
        if _grad_enabled():
            cast = self.convert(weight)
        else:
            try:
                set_grad_enabled(True)
                cast = self.convert(weight)
            finally:
                set_grad_enabled(False)
        entry: Any = (weight, version, address, storage, generation, cast)
        self[id(weight)] = entry
        return cast


class _Float8Forms(_Casts):
    """FP8 forms of weights: values without a history, of weights of any dtype that regions cast."""

    dtypes = DTYPES

    def _reconnect(self, cached: _CachedCast, weight: Tensor) -> bool:
        return True

    def _keeps(self, weight: Tensor) -> bool:
        return self.across_regions


class RegionCache:
    """The casts of a thread's regions that were given no cache. Holds nothing between regions; never synchronizes."""

    across_regions = False  # whether a later region may use its casts

    def __init__(self) -> None:
        self.in_capture = False  # whether it was made inside a CUDA graph capture: its casts belong to that graph
        self._casts: dict[tuple[str, Any], _Casts] = {}
        self.counts = _Counts()
        self.last_input: Any = None  # FP8 forms of the activation that was quantized last: `float8_products`
        self.modes: dict[Any, Any] = {}  # the modes that cast for this cache, by their policies: `region/stack`
        self.latest: Any = None  # the mode that a region has used last
        watch_steps(self)

    def weights(self, device_type: str, dtype: Any) -> Callable[[Tensor], Any]:
        """Return the function that casts the weights of the operator that runs now: `_Casts.find`, or a plain cast.

        Args:
            device_type: the device type of the weights.
            dtype: what to cast to; a dtype, or a `WeightForm` of `float8_products`.
        """
        if functorch_level() is not None and transforms():
            return _caster(device_type, dtype).tensor
        return self.weights_outside_transforms(device_type, dtype)

    def weights_outside_transforms(self, device_type: str, dtype: Any) -> Callable[[Tensor], Any]:
        """Return what `weights` returns; for a caller that knows that no transform of `torch.func` is active.

        Args:
            device_type: the device type of the weights.
            dtype: what to cast to.
        """
        if (
            not _cache_enabled()  # a `torch.autocast` region inside ours disables it
            or (n_dispatch_modes() != 0 and not only_observed())  # traced, recorded or made of fake tensors
            or tracing_state() is not None
            or (device_type == "cuda" and is_capturing(CURRENT_CUDA) != self.in_capture)  # casts belong to one graph
        ):
            return _caster(device_type, dtype).tensor
        key = device_type, dtype
        casts = self._casts.get(key)
        if casts is None:
            kind = _Casts if self.across_regions else _CastsOfRegion
            kind = kind if type(dtype) is torch.dtype else _Float8Forms
            casts = self._casts.setdefault(key, kind(_caster(*key), self.counts, across_regions=self.across_regions))
        return casts.find

    def cast(self, leaf: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `leaf.to(dtype)`, from the cache where the leaf is a weight with cached casts. Never synchronizes.

        Args:
            leaf: a weight, or another leaf tensor, which is cast without the cache.
            dtype: the dtype to cast to.
        """
        return self.weights(leaf.device.type, dtype)(leaf)

    def clear(self) -> None:
        """Drop every cast. Regions that are open make new ones as they need them."""
        self.last_input = None
        for casts in tuple(self._casts.values()):
            casts.clear()


class WeightCache(RegionCache):
    """A cache that keeps weight casts across regions until an optimizer steps: `autocast(cache=...)`.

    With gradient accumulation each large weight is then cast once per optimizer step instead of once per micro-batch,
    in `generate()` every weight once instead of once per token. Where autograd records, weights of fewer than 524,288
    elements are cast in each region, which is faster than to connect a kept cast to the weight. Any step of any
    optimizer invalidates all casts. Holds 2 bytes per element of the weights that regions have used, and no reference
    to a parameter once the region is left. May be shared between threads; copies and pickles start empty. Never
    synchronizes with the device.

    Some writes to a weight no cache can see. Call `clear()` after

    - writes in place through an alias that is gone before the next use: `.numpy()`, DLPack, `p.untyped_storage()`,
      `torch.ops.aten._unsafe_view`, the `.data` of a view or of a tensor that is not a `Parameter`; or under
      `torch.autograd._unsafe_preserve_version_counter`. Writes through the `.data` of a parameter are seen, but
      not in TorchScript or in code compiled with `backend="eager"`, which read it in C++ or while they trace;
    - fused updates without an optimizer: `torch.optim.adam.adam(fused=True)`, `torch._fused_sgd_`;
    - writes by a kernel of your own, or by another process to the weight's CUDA memory;
    - `torch.distributed.recv` over NCCL, collectives that do not go through `torch.distributed`, and asynchronous ones
      between whose start and end the weight was cast;

    and also inside an open region after any of these, after collectives and after replays of CUDA graphs (there
    `torch.amp` keeps the old cast of a weight that requires grad, too). Also call it before converting a module under
    `torch.__future__.set_swap_module_params_on_conversion`, which refuses weights that have weak references.

    >>> cache = WeightCache()
    >>> cache.info()
    CacheInfo(entries=0, bytes=0, hits=0, misses=0)
    """

    across_regions = True

    def __init__(self) -> None:
        super().__init__()
        _watch_data(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # its casts belong to these very weights

    def __repr__(self) -> str:
        return f"WeightCache(): {self.info()}"

    def info(self) -> CacheInfo:
        """Count the casts that are held, and how often they were used. Never synchronizes with the device.

        Returns:
            The casts, their bytes, and the hits and misses since the cache was made.
        """
        sizes = [cached.cast.nbytes for casts in tuple(self._casts.values()) for cached in casts.drop_stale()]
        return CacheInfo(len(sizes), sum(sizes), self.counts.hits, self.counts.misses)

    def enter(self) -> None:
        """Begin a region, which compares more at its first use of each cast. `autocast` calls this."""
        for casts in tuple(self._casts.values()):
            casts.region += 1

    def leave(self) -> None:
        """End a region: keep the values of casts that the next may use. `autocast` calls this."""
        self.last_input = None
        for casts in tuple(self._casts.values()):
            casts.end_region()

    def _data_was_read(self, weight: Tensor) -> None:
        for casts in tuple(self._casts.values()):
            casts.data_was_read(weight)


_data: Any = Parameter.data  # torch's own
_watching: dict[int, weakref.ref[WeightCache]] = {}  # the caches that are told which parameters' `.data` is read


def _watch_data(cache: WeightCache) -> None:
    """Report to a cache, for as long as it lives, each parameter whose `.data` is read, whether or not a write follows.

    Reads of `.data` take longer then; operators do not. `owns_its_memory` sees an alias that is older than the cast.
    """
    key = id(cache)
    _watching[key] = weakref.ref(cache, functools.partial(_watching.pop, key))  # as in `watch_steps`
    if Parameter.data is _data:
        Parameter.data = property(_read_data, _data.__set__, _data.__delete__)  # type: ignore[assignment]


@dynamo_skip  # after a graph break it would be compiled by itself
def _read_data(param: Parameter) -> Tensor:
    for ref in list(_watching.values()):
        cache = ref()
        if cache is not None:
            cache._data_was_read(param)
    return _data.__get__(param)


def _caster(device_type: str, dtype: Any) -> Any:
    """The object that casts a weight to a dtype: a `Cast`, or a `WeightForm`, which is itself given as the dtype."""
    return cast_to(device_type, dtype) if type(dtype) is torch.dtype else dtype


def _memory(weight: Tensor) -> tuple[int | None, Any]:
    """The address of a weight's memory and a weak reference to its storage; None for tensors that wrap others."""
    kind = type(weight)
    if (kind is Parameter or kind is Tensor) and (functorch_level() is None or not is_wrapped(weight)):
        return weight.data_ptr(), weakref.ref(weight.untyped_storage())
    return None, None


def _layout(weight: Tensor) -> tuple[Any, Any]:
    return weight.shape, weight.stride()
