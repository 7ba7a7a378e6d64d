"""The weight caches: the low-precision cast of a weight, made once and used until the weight may have changed.

`RegionCache` is a thread's own. It keeps what torch.amp keeps until the outermost region is left: casts of float32
leaves that require grad, outside inference mode. `WeightCache` is made by the user and keeps casts from one region to
the next, also those of frozen parameters and in inference mode.

A cached cast is used only

- for the very tensor that it was made from: a weak reference;
- at the same version counter, which every write that autograd knows of bumps;
- at the same address in the same memory. An address alone comes back as soon as `p.data = ...` has freed it, so the
  entry has a weak reference to the storage too;
- until an optimizer steps, whatever it writes: see `optimizer_steps`;
- in a `WeightCache`, until somebody reads the parameter's `.data`: what is written through it moves no version counter,
  and so are adapters merged (`p.data += ...`) and averages loaded (`p.data.copy_(...)`). See `_Casts.expose`.

Between regions a weight can be written in ways that change none of these. A `WeightCache` therefore uses a cast in
another region than the one it was made in only if the weight owns its memory (torch allocated it, and no other tensor,
array or process has it), if its layout is the same, if no collective of `torch.distributed` has run since, and if no
optimizer step was captured into a CUDA graph. That is asked at the first use in each region and when one is left.

Casts are made with grad mode on and inference mode off, so one entry is used in `no_grad`, `inference_mode` and
training alike, and gradients flow. Between regions a `WeightCache` keeps values without their autograd history, which
would keep parameters alive, and which gets a new one at the next use: history has a place in backward's order, and that
of an earlier micro-batch comes last, so all gradients would wait in memory until every layer was through.
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
from ampkit.engine.optimizer_steps import period, steps, watch_steps
from ampkit.policy.float8_recipes import DTYPES
from ampkit.torch_internals.dynamo import dynamo_skip
from ampkit.torch_internals.operator_tracing import only_observed
from ampkit.torch_internals.tensors import (
    connected,
    is_capturing,
    n_collectives,
    n_dispatch_modes,
    owns_its_memory,
    tracing_state,
)
from ampkit.torch_internals.transforms import functorch_level, is_wrapped, transforms

__all__ = ["CacheInfo", "RegionCache", "WeightCache"]

# Asked for every operator with a weight: finding a name in three modules takes longer than the answer.
_cache_enabled = torch.is_autocast_cache_enabled
_inference_mode = torch.is_inference_mode_enabled


class CacheInfo(NamedTuple):
    """What a `WeightCache` holds now, and what it has done since it was made."""

    entries: int    # casts held
    bytes: int      # bytes of those casts
    hits: int       # casts answered from the cache
    misses: int     # casts made, each of which read and wrote the weight once


class _Entry:
    """A cast, and what the weight was when the cast was made."""

    __slots__ = ("address", "cast", "collectives", "layout", "period", "region", "storage", "version", "weight")

    cast: Tensor
    layout: tuple[Any, Any] | None
    collectives: Any

    def __init__(self, weight: Tensor, casts: _Casts) -> None:
        """Raises `RuntimeError` for a weight without a version or an address of its own."""
        self.period = period()
        self.version = weight._version
        self.region = casts.region
        self.address = self.storage = self.layout = self.collectives = None
        self.weight = weakref.ref(weight)
        if (type(weight) is Parameter or type(weight) is Tensor) and not is_wrapped(weight):
            self.address = weight.data_ptr()
            self.storage = weakref.ref(weight.untyped_storage())
        if casts.kept:
            self.collectives = n_collectives()
            if owns_its_memory(weight):     # else an alias may write in this region, and be gone before the next
                self.layout = _layout(weight)

    def may_be_kept(self, weight: Tensor) -> bool:
        """Whether no write can have gone unseen between two regions."""
        return (
            _layout(weight) == self.layout
            and not steps.captured
            and owns_its_memory(weight)
            and self.collectives is not None
            and self.collectives == n_collectives()
        )


class _Casts(dict[int, _Entry]):
    """The casts of weights on one device type to one dtype, by the `id` of the weight."""

    __slots__ = ("convert", "hits", "kept", "misses", "plain", "region")
    dtypes = frozenset({torch.float32})     # of weights

    def __init__(self, plain: Any, *, kept: bool) -> None:
        """`plain` makes a cast, a `Cast` or a form of weights; `kept`: from region to region."""
        super().__init__()
        self.plain = plain
        self.convert = plain.convert
        self.kept = kept
        self.region = 0         # how many regions were entered: the first use of an entry in each revalidates it
        self.hits = self.misses = 0

    def find(self, weight: Tensor) -> Tensor:
        """The cast of a weight: the one that is there, or a new one."""
        entry = self.get(id(weight))
        if (
            entry is not None
            and entry.weight() is weight
            and entry.version == weight._version
            and (entry.storage is None or (entry.address == weight.data_ptr() and entry.storage() is not None))
            and entry.period is steps.period
            and (entry.region == self.region or self._revalidate(entry, weight))
        ):
            cast = entry.cast
            if cast.requires_grad is weight.requires_grad or self._reconnect(entry, weight):
                self.hits += 1
                return entry.cast
        return self._make(weight)

    def _revalidate(self, entry: _Entry, weight: Tensor) -> bool:
        """Whether an entry of an earlier region is still the weight's cast."""
        if not entry.may_be_kept(weight):
            return False
        entry.region = self.region
        return True

    def _reconnect(self, entry: _Entry, weight: Tensor) -> bool:
        """Give a cast that was kept without its history a new one, where autograd records; False if it cannot."""
        if not weight.requires_grad:        # frozen meanwhile
            entry.cast = entry.cast.detach()
            return self._takes(weight)
        if torch.is_grad_enabled() and not _inference_mode():
            if functorch_level() is not None:       # a transform of `torch.func` refuses what `connected` records
                return False
            entry.cast = connected(weight, entry.cast)
        return True

    def _takes(self, weight: Tensor) -> bool:
        """Whether casts of a weight are kept: never those of views and inputs.

        Nor of tensors made in inference mode: they have no version counter, so a write to them could not be seen.
        """
        if (
            weight.dtype not in self.dtypes or not weight.is_leaf or weight._is_view() or weight.is_inference()
            or not self.plain.on_device(weight)
        ):
            return False
        if not self.kept:
            return weight.requires_grad
        return weight.layout is torch.strided and not is_wrapped(weight) and (
            weight.requires_grad or (isinstance(weight, Parameter) and owns_its_memory(weight))
        )

    def _make(self, weight: Tensor) -> Tensor:
        """Cast a weight, and keep the cast if it is one whose casts are kept."""
        if not self._takes(weight):
            self.pop(id(weight), None)      # an invalid entry must not become valid again
            return self.plain.tensor(weight)
        try:
            entry = _Entry(weight, self)    # before the cast: a write meanwhile invalidates it
        except RuntimeError:                # sparse memory: nothing tells of writes
            return self.plain.tensor(weight)
        self.misses += 1
        if torch.is_grad_enabled() and not _inference_mode():
            entry.cast = self.convert(weight)
        else:
            with torch.inference_mode(False), torch.enable_grad():
                entry.cast = self.convert(weight)
        self[id(weight)] = entry
        return entry.cast

    def expose(self, weight: Tensor) -> None:
        """Use a weight's cast in no other region; a frozen one's no more at all.

        In the region that is open torch.amp goes on with the cast of a weight that requires grad, and a second one
        would sum its gradients in another order.
        """
        entry = self.get(id(weight))
        if entry is not None and weight.requires_grad:
            entry.layout = None
        else:
            self.pop(id(weight), None)

    def prune(self) -> list[tuple[int, _Entry]]:
        """Drop casts from before an optimizer's step, and those of weights that are gone; returns the others."""
        for key, entry in list(self.items()):
            gone = entry.weight() is None or (entry.storage is not None and entry.storage() is None)
            if gone or entry.period is not steps.period:
                self.pop(key, None)
        return list(self.items())

    def settle(self) -> None:
        """Keep the values of casts that another region may use, without their history, and drop the others."""
        for key, entry in list(self.items()):
            weight = entry.weight()
            if weight is None or entry.period is not steps.period or not entry.may_be_kept(weight):
                self.pop(key, None)
            elif entry.cast.requires_grad:
                entry.cast = entry.cast.detach()


class _Forms(_Casts):
    """FP8 forms of weights: values without a history, of weights of any dtype that regions cast."""

    dtypes = DTYPES

    def _reconnect(self, entry: _Entry, weight: Tensor) -> bool:
        return True


class RegionCache:
    """Casts of the regions of a thread that were given no cache. Holds no weight, and never syncs."""

    in_capture = False      # made inside a CUDA graph capture, so its casts belong to that graph
    kept = False

    def __init__(self) -> None:
        self._casts: dict[tuple[str, Any], _Casts] = {}
        self.last_input: Any = None         # FP8 forms of the activation that was quantized last; see `float8`
        self.latest: Any = None             # of the modes, the one that a region had last
        self.modes: dict[Any, Any] = {}     # the dispatch modes that cast for this cache, by policies; see `stack`
        watch_steps(self)

    @property
    def hits(self) -> int:
        """Casts answered from the cache."""
        return sum(casts.hits for casts in tuple(self._casts.values()))

    def weights(self, device_type: str, dtype: Any) -> Callable[[Tensor], Any]:
        """What casts the weights of an operator that runs here and now; `dtype` may be a `float8.WeightForm`."""
        if (
            not _cache_enabled()        # by a `torch.autocast` region inside ours
            or (n_dispatch_modes() != 0 and not only_observed())    # traced, recorded or made of fake tensors
            or tracing_state() is not None
            or (functorch_level() is not None and transforms())
            or (device_type == "cuda" and is_capturing() != self.in_capture)    # casts belong to one CUDA graph
            or (_inference_mode() and not self.kept)
        ):
            return _plain(device_type, dtype).tensor
        key = device_type, dtype
        casts = self._casts.get(key)
        if casts is None:
            kind = _Casts if type(dtype) is torch.dtype else _Forms
            casts = self._casts.setdefault(key, kind(_plain(*key), kept=self.kept))
        return casts.find

    def cast(self, leaf: Tensor, dtype: torch.dtype) -> Tensor:
        """`leaf.to(dtype)`, from the cache where the leaf is a weight whose casts are kept."""
        return self.weights(leaf.device.type, dtype)(leaf)

    def clear(self) -> None:
        """Drop every cast. Regions that are open make new ones as they need them."""
        self.last_input = None
        for casts in tuple(self._casts.values()):
            casts.clear()


class WeightCache(RegionCache):
    """Keeps weight casts across regions until an optimizer steps: `autocast(cache=...)`.

    With gradient accumulation each weight is then cast once per optimizer step instead of once per micro-batch, in
    `generate()` once instead of once per token. Any step of any optimizer invalidates all casts. Holds 2 bytes per
    element of the weights that regions have used, and no reference to a parameter once the region is left. May be
    shared between threads; copies and pickles start empty. Never syncs.

    A weight may be written in ways that no cache can see. Call `clear()` after

    - writes in place through an alias that is gone before the next use: `.numpy()`, DLPack, `p.untyped_storage()`,
      `torch.ops.aten._unsafe_view`, the `.data` of a view or of a tensor that is no `Parameter`; or under
      `torch.autograd._unsafe_preserve_version_counter`. Writes through the `.data` of a parameter are seen;
    - fused updates without an optimizer: `torch.optim.adam.adam(fused=True)`, `torch._fused_sgd_`;
    - a kernel of your own, and what another process writes to the weight's CUDA memory;
    - `torch.distributed.recv` over NCCL, collectives that do not go through `torch.distributed`, and asynchronous ones
      between whose start and end the weight was cast;

    all of these, and collectives and replays of CUDA graphs, also inside an open region (there `torch.amp` keeps the
    old cast of a weight that requires grad, too), and before converting a module under
    `torch.__future__.set_swap_module_params_on_conversion`, which refuses weights that weak references point to.

    >>> cache = WeightCache()
    >>> cache.info()
    CacheInfo(entries=0, bytes=0, hits=0, misses=0)
    """

    kept = True

    def __init__(self) -> None:
        super().__init__()
        _watch_data(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()       # what is held belongs to these very weights

    def __repr__(self) -> str:
        return f"WeightCache(): {self.info()}"

    def info(self) -> CacheInfo:
        """What is held, and how often it was used."""
        every = tuple(self._casts.values())
        sizes = [entry.cast.nbytes for casts in every for _, entry in casts.prune()]
        return CacheInfo(len(sizes), sum(sizes), self.hits, sum(casts.misses for casts in every))

    def expose(self, weight: Tensor) -> None:
        """A weight may be written unseen from here on."""
        for casts in tuple(self._casts.values()):
            casts.expose(weight)

    def enter(self) -> None:
        """A region is entered: from here on, casts are revalidated before they are used again."""
        for casts in tuple(self._casts.values()):
            casts.region += 1

    def leave(self) -> None:
        """A region is left: keep what the next may use, and of that the values, so that parameters can be freed."""
        self.last_input = None
        for casts in tuple(self._casts.values()):
            casts.settle()


_data: Any = Parameter.data     # torch's own
_given: dict[int, weakref.ref[WeightCache]] = {}


def _watch_data(cache: WeightCache) -> None:
    """Have `cache` know, as long as it lives, of every parameter whose `.data` is read, whether or not a write follows.

    A read costs more then, operators do not. An alias that is older than a cast is seen by `owns_its_memory`.
    """
    key = id(cache)
    _given[key] = weakref.ref(cache, functools.partial(_given.pop, key))     # as in `watch_steps`
    if Parameter.data is _data:
        Parameter.data = property(_read_data, _data.__set__, _data.__delete__)  # type: ignore[assignment]


@dynamo_skip        # after a graph break it would be compiled by itself
def _read_data(param: Parameter) -> Tensor:
    for ref in list(_given.values()):
        cache = ref()
        if cache is not None:
            cache.expose(param)
    return _data.__get__(param)


def _plain(device_type: str, dtype: Any) -> Any:
    """What casts a weight to a dtype, or makes an FP8 form of it, without a cache."""
    return cast_to(device_type, dtype) if type(dtype) is torch.dtype else dtype


def _layout(weight: Tensor) -> tuple[Any, Any]:
    return weight.shape, weight.stride()

