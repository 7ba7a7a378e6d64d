"""The casts of a region that was given no cache: kept while it is open, for what torch.amp keeps casts of.

That is float32 leaves that require grad, outside inference mode, unless something records what is done. What makes a
cast the weight's is in `weight_cache`, which keeps casts across regions and has more to ask. Here a weight costs one
look into a dict and four questions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit.policy.casting import cast_to, converter
from ampkit.region.optimizer_steps import capturing, seen, watch_for
from ampkit.torch_internals.operator_tracing import only_observed
from ampkit.torch_internals.tensors import n_dispatch_modes, tracing_state
from ampkit.torch_internals.transforms import is_wrapped, transforms

__all__ = ["Ref", "RegionCache", "may_use", "recorded", "records"]

# Asked for every operator with a weight: finding a name in three modules takes longer than the answer.
_cache_enabled = torch.is_autocast_cache_enabled
_grad_enabled = torch.is_grad_enabled
_inference_mode = torch.is_inference_mode_enabled


class Ref(weakref.ref[Any]):
    """A weak reference to a weight, or to its storage, that knows the entry made from it."""

    __slots__ = ("key",)
    key: Any


class _Casts(dict[int, tuple[Any, ...]]):
    """`id` of a weight -> the weight, its version, address and storage, the optimizer steps so far, and its cast."""

    __slots__ = ("__weakref__", "hits")

    def __init__(self) -> None:
        super().__init__()
        self.hits = 0


class RegionCache:
    """Casts by device type and dtype. Holds no weight, and never syncs."""

    in_capture = False      # made inside a CUDA graph capture, so its casts belong to that graph

    def __init__(self) -> None:
        self._casts: dict[tuple[str, torch.dtype], _Casts] = {}
        self._finders: dict[tuple[str, torch.dtype], Callable[[Tensor], Tensor]] = {}
        self.latest: Any = None     # of the modes, the one that a region had last
        self.modes: dict[Any, Any] = {}     # the dispatch modes that cast for this cache, by policies; see `stack`
        watch_for(self)

    @property
    def hits(self) -> int:
        """Casts answered from the cache."""
        return sum(casts.hits for casts in self._casts.values())

    def weights(self, device_type: str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """What casts the weights of an operator that runs here and now."""
        if _inference_mode() or not may_use(device_type == "cuda", self.in_capture):
            return cast_to(device_type, dtype).tensor
        key = device_type, dtype
        return self._finders.get(key) or self._make_finder(key)

    def cast(self, leaf: Tensor, dtype: torch.dtype) -> Tensor:
        """`leaf.to(dtype)`, from the cache where the leaf is a weight whose casts are kept."""
        return self.weights(leaf.device.type, dtype)(leaf)

    def clear(self) -> None:
        """Drop every cast."""
        for casts in tuple(self._casts.values()):
            casts.clear()

    def is_empty(self) -> bool:
        """Whether there is no cast."""
        return not any(self._casts.values())

    def drop_outdated(self, step: Any) -> None:
        """A step outdates every cast here: few regions are open around one, and their casts do not outlive them."""
        self.clear()

    def renew_lock(self) -> None:
        """Nothing to renew in a forked child: a dict needs no lock."""

    def _make_finder(self, key: tuple[str, torch.dtype]) -> Callable[[Tensor], Tensor]:
        casts = self._casts.setdefault(key, _Casts())
        return self._finders.setdefault(key, _finder(*key, casts))


def _finder(device_type: str, dtype: torch.dtype, casts: _Casts) -> Callable[[Tensor], Tensor]:
    """What casts a weight, or takes its cast from `casts`."""
    plain = cast_to(device_type, dtype)
    get, on_device, forget, convert = casts.get, plain.on_device, _removing(casts), converter(dtype)

    def find(weight: Tensor) -> Tensor:
        if not weight.requires_grad:
            return plain.tensor(weight)
        key = id(weight)
        found = get(key)
        if found is not None:
            ref, version, address, _, steps, cast = found
            if (
                ref() is weight
                and version == weight._version
                and (address is None or address == weight.data_ptr())
                and steps == seen.count
            ):
                casts.hits += 1
                return cast
        if weight.dtype is not torch.float32 or not on_device(weight) or not weight.is_leaf or weight._is_view():
            return plain.tensor(weight)
        address = storage = None
        ref = Ref(weight, forget)
        ref.key = key
        try:
            version, steps = weight._version, seen.count
            if _has_memory(weight):
                address, storage = weight.data_ptr(), Ref(weight.untyped_storage(), forget)
                storage.key = key
        except RuntimeError:    # no version in inference mode, no address in sparse memory: nothing tells of writes
            return plain.tensor(weight)
        # Last: a write meanwhile outdates it.
        cast = convert(weight) if _grad_enabled() else recorded(weight, dtype)
        casts[key] = ref, version, address, storage, steps, cast
        return cast

    return find


def _has_memory(weight: Tensor) -> bool:
    """Whether a weight has an address and a storage: subclasses may have none, what `torch.func` wraps has none."""
    return (type(weight) is Parameter or type(weight) is Tensor) and not is_wrapped(weight)


def _removing(casts: _Casts) -> Callable[[Ref], None]:
    """What the weak references of entries call when a weight or its storage dies; does not keep the casts alive."""
    this = weakref.ref(casts)

    def forget(dead: Ref) -> None:
        casts = this()
        found = None if casts is None else casts.get(dead.key)
        if casts is not None and found is not None and (found[0] is dead or found[3] is dead):
            casts.pop(dead.key, None)

    return forget


def may_use(on_cuda: bool, in_capture: bool = False) -> bool:
    """Whether kept casts may be used here: not where something records, and only in the CUDA graph they belong to."""
    return (
        _cache_enabled()        # by a `torch.autocast` region inside ours
        and (n_dispatch_modes() == 0 or only_observed())
        and tracing_state() is None
        and not transforms()
        and (not on_cuda or capturing() == in_capture)
    )


def records() -> bool:
    """Whether autograd records here."""
    return _grad_enabled() and not _inference_mode()


def recorded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast that autograd records whatever the modes here are."""
    convert = converter(dtype)
    if records():       # contexts that change nothing cost as much as a small cast
        return convert(weight)
    with torch.inference_mode(False), torch.enable_grad():
        return convert(weight)
