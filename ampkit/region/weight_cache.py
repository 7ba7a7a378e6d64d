"""The cast cache: the low-precision copy of a weight, made once and used until the weight changes.

What is kept: casts of float32 leaves that require grad and of frozen `nn.Parameter`s; it serves inference mode too.
Never casts of views, of activations or of tensors made in inference mode. The cache of a region that was given none,
`RegionCache`, keeps what torch.amp keeps: what is cast anew cannot be stale.

Why an entry is the weight's cast. It answers only
- for the very tensor it was made from: a weak reference, whose death removes the entry;
- at the same version counter, which every write that autograd knows of moves;
- at the same address in the same memory. An address alone comes back as soon as `p.data = ...` has freed it; the
  entry therefore holds a weak reference to the storage too, and goes when that dies. A storage that lives is the only
  one at its address. Nothing is pinned: a replaced storage is freed at once, and its cast with it;
- until an optimizer steps that may have written the weight: `optimizer_steps.Step` has the rule. Fused optimizers, and
  those that write through `.data`, move no version; hence the hooks.

Between regions anybody may write to a weight in ways that move nothing. An entry is therefore kept past its region, and
used in the next, only if the weight lies in memory that torch allocated and that no other tensor, array or process
shares, in the layout it had; if no collective of `torch.distributed` has run since; and if no optimizer step was ever
captured into a CUDA graph, since replays call no hook; a graph that is older than the first cache may hold one. So
weights that FSDP, ZeRO or flat buffers fill are cast anew in each region. An entry is looked over when the region that
used it is left, and at its first use in the next: what a region does not use costs it nothing. What remains unseen is
listed at `WeightCache`, whose `verify` finds it.

Casts are made with grad mode on and inference mode off, so that one entry serves `no_grad`, `inference_mode` and
training alike and gradients flow. Between regions an entry is kept without its autograd history, and gets a new one at
its next use. History would keep the parameter alive after its model is gone, and it has a place in backward's order:
that of an earlier micro-batch comes last, so all gradients would wait in memory until every layer was through.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ampkit.policy.casting import cast_to
from ampkit.region.followed_casts import FollowedCasts
from ampkit.region.optimizer_steps import Step, seen, tell, untold, watch_for
from ampkit.region.region_cache import Ref, may_use, recorded, records
from ampkit.region.reuse_cast import connected
from ampkit.region.unseen_writes import collectives, owns_its_memory
from ampkit.torch_internals.transforms import is_wrapped

__all__ = ["CacheInfo", "WeightCache"]


class CacheInfo(NamedTuple):
    """What a `WeightCache` holds now, and what it has done since it was made."""

    entries: int    # casts held
    bytes: int      # bytes of those casts
    hits: int       # casts answered from the cache
    misses: int     # casts made, each of which read and wrote the weight once


class _Entry:
    __slots__ = (
        "address", "cast", "collectives", "epoch", "layout", "nbytes", "steps", "storage", "values", "version",
        "weight", "writer",
    )

    cast: Tensor
    nbytes: int
    epoch: int          # of the cache, when the entry was last found to be as it was

    def __init__(self, key: tuple[int, torch.dtype], leaf: Tensor, forget: Callable[[Any], None]) -> None:
        """What tells later whether `leaf` still has the values it has now."""
        self.values: Tensor | None = None       # of the cast, as an optimizer writes them
        self.writer: int | None = None          # the `id` of the one that did, in the step that is not at its end yet
        self.version = leaf._version
        self.steps = seen.count
        self.layout = leaf.shape, leaf.stride()
        self.collectives = collectives()
        self.weight = weight = Ref(leaf, forget)
        weight.key = key
        if type(leaf) is Parameter or type(leaf) is Tensor:
            self.address: int | None = leaf.data_ptr()
            self.storage: Ref | None = Ref(leaf.untyped_storage(), forget)
            self.storage.key = key
        else:       # a subclass may have neither of its own
            self.address = self.storage = None


class WeightCache:
    """Keeps weight casts across regions until an optimizer steps that may write the weight: `autocast(cache=...)`.

    With gradient accumulation each weight is then cast once per optimizer step instead of once per micro-batch, and a
    frozen base under LoRA or a new head once. Which steps outdate what: docs/weight-cache.md.
    `max_bytes` bounds what is held (None: no bound); the least recently used casts go first. May be shared between
    threads. Holds no reference to a parameter once the region is left. Never syncs, unless it verifies.

    A weight may be written in ways that no cache can see. Call `clear()` after

    - writes in place through an alias that is gone before the next use: `p.data.copy_(average)`, `.numpy()`, DLPack,
      `p.untyped_storage()`, `torch.ops.aten._unsafe_view`, or under `torch.autograd._unsafe_preserve_version_counter`;
    - fused updates without an optimizer: `torch.optim.adam.adam(fused=True)`, `torch._fused_sgd_`;
    - a kernel of your own;
    - `torch.distributed.recv` over NCCL, collectives that do not go through `torch.distributed`, and asynchronous ones
      between whose start and end the weight was cast;
    - another process that has the weight's CUDA memory;

    all of these, and collectives and replays of CUDA graphs, also inside an open region (there `torch.amp` keeps the
    old cast of a weight that requires grad, too), and before converting a module under
    `torch.__future__.set_swap_module_params_on_conversion`, which refuses weights that weak references point to.

    `verify` looks for such writes: at each use of a kept cast it compares it with the weight, every element with True,
    so many of them, spread evenly, with a number. Raises `RuntimeError` where they differ. It syncs: for debugging.

    >>> cache = WeightCache(max_bytes=2**30)
    >>> cache.info()
    CacheInfo(entries=0, bytes=0, hits=0, misses=0)
    """

    in_capture = False

    def __init__(self, max_bytes: int | None = None, verify: bool | int = False) -> None:
        if max_bytes is not None and (not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 0):
            raise ValueError(f"max_bytes is {max_bytes!r}; expected a number of bytes, 0 or more, or None for no bound")
        if not isinstance(verify, int) or (verify < 1 and verify is not False):
            raise ValueError(
                f"verify is {verify!r}; expected True to compare every element at each use, a number of elements, 1 or "
                "more, or False to compare none"
            )
        self.max_bytes = max_bytes
        self.verify = verify
        self._looks_at_hits = max_bytes is not None or bool(verify)
        self._entries: dict[tuple[int, torch.dtype], _Entry] = {}      # the least recently used first, if bounded
        self._followed: FollowedCasts | None = None
        self._forget = _forgetting(self)
        self._lock = threading.RLock()
        self._bytes = 0
        self._hits = 0
        self._misses = 0
        self._epoch = 0     # regions entered, and ends of steps: the first use of an entry after that looks it over
        self._in_use: dict[tuple[int, torch.dtype], None] = {}      # what to look over when a region is left
        self.latest: Any = None     # of the modes, the one that a region had last
        self.modes: dict[Any, Any] = {}     # the dispatch modes that casts for this cache, by policies; see `autocast`
        watch_for(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy starts empty: what is held belongs to these very weights.
        return type(self), (self.max_bytes, self.verify)

    def __repr__(self) -> str:
        verify = f", verify={self.verify}" if self.verify else ""
        return f"WeightCache(max_bytes={self.max_bytes}{verify}): {self.info()}"

    @property
    def hits(self) -> int:
        """Casts answered from the cache."""
        return self._hits

    def info(self) -> CacheInfo:
        """What is held and how often it served. Casts that an optimizer step has outdated are dropped first."""
        if untold:
            tell()
        return CacheInfo(len(self._entries), self._bytes, self._hits, self._misses)

    def clear(self) -> None:
        """Drop every cast. Regions that are open make new ones as they need them."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring casts of an optimizer's parameters up to date at each of its steps, in place of casting them anew.

        The optimizers of `ampkit.optim` write float16 and bfloat16 casts in the launch that updates the float32
        weights: 2 bytes more per element, no cast and no launch of its own. Casts of any other's are written together
        when the next region is entered, in one call per device and dtype. Bits are those of a cast made anew. A cast
        that no region has used since the last step is dropped. What is held, 2 bytes per element, stays allocated from
        step to step. A step that is skipped leaves casts as they are. Never syncs.

        A cast that is written is the one that graphs made before the step have saved: backward through such a graph
        raises, as it does without autocast, where torch.amp and a cache that does not follow go on with the old cast.

        An optimizer may be followed by several caches, a cache may follow several optimizers, and each is held by a
        weak reference: `follow` again after a copy or pickle of either. Of an optimizer that wraps another, follow the
        one inside, where that holds the model's own weights. Raises `TypeError` for anything but an optimizer.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"follow takes a torch.optim.Optimizer, got {type(optimizer).__name__}; of what wraps an optimizer, "
                "give the one inside"
            )
        with self._lock:
            if self._followed is None:
                self._followed = FollowedCasts(self._entries)
            self._followed.add(optimizer)
        writes = getattr(optimizer, "write_casts_of", None)
        if writes is not None:
            writes(self._followed)

    def is_empty(self) -> bool:
        """Whether there is no cast."""
        return not self._entries

    def drop_outdated(self, step: Step) -> None:
        """Drop the casts that an optimizer's step outdates; those that stay are looked over before their next use."""
        with self._lock:
            self._epoch += 1
            outdated = list(self._entries) if step.everything else [
                key
                for key, entry in self._entries.copy().items()      # weights may die on the way, and their entries go
                if key[0] in step.written or (weight := entry.weight()) is None or step.outdates_unwritten(weight)
            ]
            if self._followed is not None:
                outdated = self._followed.not_followed(step, outdated)
            if len(outdated) == len(self._entries):
                self.clear()
            else:
                for key in outdated:
                    self._remove(key)

    def renew_lock(self) -> None:
        """In a forked child: take the place of a lock that a thread of the parent may have held, amid a change."""
        self._lock = threading.RLock()
        self._bytes = sum(entry.nbytes for entry in self._entries.values())

    def enter(self) -> None:
        """A region is entered: from here on, casts are looked over before they are used again."""
        self._epoch += 1
        if self._followed is not None and may_use(False):
            if untold:
                tell()
            with self._lock:
                n, dropped = self._followed.refresh(self._keeps)
                self._misses += n
                for key in dropped:
                    self._remove(key)

    def leave(self) -> None:
        """A region is left: keep what the next may use, and of that the values, so that parameters can be freed."""
        with self._lock:
            for key in list(self._in_use):
                entry = self._entries.get(key)
                if entry is not None and not _is_as_it_was(entry):
                    self._remove(key)
                elif entry is not None and entry.cast.requires_grad:
                    entry.cast = entry.cast.detach()
                self._in_use.pop(key, None)     # last, so that an interrupt loses none

    def weights(self, device_type: str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """What casts the weights of an operator that runs here and now."""
        return functools.partial(cast_to(device_type, dtype).tensor, lookup=self.cast)

    def cast(self, leaf: Tensor, dtype: torch.dtype) -> Tensor:
        """`leaf.to(dtype)`, from the cache where the leaf is a weight that may be cached."""
        if untold:
            tell()
        key = (id(leaf), dtype)
        entry = self._entries.get(key)
        if entry is None or entry.weight() is not leaf:
            if not self._keeps(leaf):
                return leaf.to(dtype)
            entry = None
        if not may_use(leaf.is_cuda):
            return leaf.to(dtype)
        if entry is None:
            return self._make(key, leaf, dtype)
        if (
            entry.version != leaf._version
            or (entry.address is not None and entry.address != leaf.data_ptr())
            or (entry.epoch != self._epoch and not self._still_holds(key, entry))
        ):
            return self._cast_anew(key, leaf, dtype)
        cast = entry.cast
        # Kept from an earlier region, or frozen or unfrozen since; without grad mode nobody asks for a history.
        if cast.requires_grad is not leaf.requires_grad and (cast.requires_grad or records()):
            if not self._keeps(leaf):
                return leaf.to(dtype)
            cast = entry.cast = connected(leaf, cast) if leaf.requires_grad else cast.detach()
            self._in_use[key] = None
        if self._looks_at_hits:
            if self.verify:
                self._compare(key, leaf, cast)
            if self.max_bytes is not None:
                with self._lock:
                    if self._entries.pop(key, None) is not None:
                        self._entries[key] = entry
        self._hits += 1
        return cast

    def _cast_anew(self, key: tuple[int, torch.dtype], leaf: Tensor, dtype: torch.dtype) -> Tensor:
        """Replace an entry, or drop it: what is not as it was must not seem so at a later use."""
        if self._keeps(leaf):
            return self._make(key, leaf, dtype)
        with self._lock:
            self._remove(key)
        return leaf.to(dtype)

    def _still_holds(self, key: tuple[int, torch.dtype], entry: _Entry) -> bool:
        """Whether nobody can have written unseen since an earlier region: the first use after entering one asks."""
        if not _is_as_it_was(entry) or entry.collectives != collectives():
            return False
        self._in_use[key] = None
        entry.epoch = self._epoch
        return True

    def _keeps(self, leaf: Tensor) -> bool:
        """Whether casts of a leaf are kept: never those of views and inputs.

        Nor of tensors made in inference mode: they have no version counter, so a write to them could not be seen.
        """
        return (
            leaf.dtype is torch.float32
            and leaf.layout is torch.strided        # others have no address to tell a replaced storage by
            and (leaf.requires_grad or (isinstance(leaf, Parameter) and owns_its_memory(leaf)))
            and not leaf._is_view()
            and not leaf.is_inference()
            and not is_wrapped(leaf)
        )

    def _make(self, key: tuple[int, torch.dtype], leaf: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast a weight and keep the cast."""
        self._misses += 1
        entry = _Entry(key, leaf, self._forget)     # before the cast: a write meanwhile outdates it
        entry.epoch = self._epoch
        self._in_use[key] = None
        entry.cast = made = recorded(leaf, dtype)
        entry.nbytes = nbytes = made.nbytes
        with self._lock:
            if key in self._entries:
                self._remove(key)
            if entry.steps != seen.count:       # another thread's optimizer may have written it meanwhile
                return made
            if self.max_bytes is not None:
                if nbytes > self.max_bytes:
                    return made
                while self._entries and self._bytes + nbytes > self.max_bytes:
                    self._remove(next(iter(self._entries)))
            self._entries[key] = entry
            self._bytes += nbytes
        return made

    def _compare(self, key: tuple[int, torch.dtype], leaf: Tensor, cast: Tensor) -> None:
        """Raise, and drop the cast, if it is not that of the weight as it is now."""
        fresh, kept = leaf.detach(), cast.detach()
        n = kept.numel()
        if leaf.shape == kept.shape:
            if self.verify is not True and self.verify < n:
                at = torch.linspace(0, n - 1, self.verify, dtype=torch.float64, device=leaf.device).long()
                fresh, kept = fresh.flatten()[at], kept.flatten()[at]
            fresh = fresh.to(kept.dtype)
            n = int(((fresh != kept) & ~(fresh.isnan() & kept.isnan())).sum())
            if n == 0:
                return
        with self._lock:
            self._remove(key)
        raise RuntimeError(
            f"the {cast.dtype} cast of a weight of shape {tuple(leaf.shape)} is stale: {n} of the {kept.numel()} "
            "elements compared differ. It was written in a way that a cache cannot see; see WeightCache for which. "
            "Call clear() of this WeightCache after such a write, or clear_autocast_cache() inside the region"
        )

    def _remove(self, key: tuple[int, torch.dtype]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.nbytes


def _forgetting(cache: WeightCache) -> Callable[[Any], None]:
    """What the weak references of a cache call when a weight or its storage dies; does not keep the cache alive.

    It takes no lock, for what dies may die in a forked child, where no thread is left to let go of one. At worst it
    removes an entry that another thread has just made anew.
    """
    this = weakref.ref(cache)

    def forget(dead: Ref) -> None:
        cache = this()
        entry = None if cache is None else cache._entries.get(dead.key)
        if cache is not None and entry is not None and (entry.weight is dead or entry.storage is dead):
            cache._remove(dead.key)

    return forget


def _is_as_it_was(entry: _Entry) -> bool:
    """Whether an entry may outlive its region: what writes unseen, between regions, has no way to its weight."""
    weight = entry.weight()
    return (
        weight is not None
        and not seen.captured
        and (weight.shape, weight.stride()) == entry.layout
        and owns_its_memory(weight)
    )
