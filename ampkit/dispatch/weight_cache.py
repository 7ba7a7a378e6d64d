"""The cache of weight casts: inside a region a weight is cast once, until the outermost region ends.

A cached cast is used only while the weight cannot have changed. Each use compares

- the tensor itself, and that it requires grad;
- its version counter, which every write through autograd increments;
- its memory: the address, and a weak reference to the storage, since an address can be reused as soon as
  `p.data = ...` has freed it.

Any step of any optimizer ends all casts, since fused optimizers do not increment the versions of the tensors that they
write.

As in torch.amp, writes through `.data`, `.numpy()` and other aliases are not detected before the outermost region ends.
An outer `autocast(device_type, enabled=False)` keeps the casts of the regions inside it: around micro-batches, or
around the loop of `generate()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ampkit.dispatch.casting import PLAIN_TENSORS
from ampkit.torch_private import (
    functorch_level,
    is_functorch_wrapped,
    jit_tracing_state,
    n_dispatch_modes,
    only_observed,
    set_grad_enabled,
)
from ampkit_kernels import CURRENT_CUDA, is_capturing

__all__ = ["WeightCasts", "invalidate_casts"]

_cache_enabled = torch.is_autocast_cache_enabled
_inference_mode, _grad_enabled = torch.is_inference_mode_enabled, torch.is_grad_enabled


class _Steps:
    """The time since the last optimizer step of the process, as an object. None: no cast was made since."""

    since_last: object = None
    watched = False


def invalidate_casts(*_: Any) -> None:
    """Make every cached cast invalid. Called before and after each step of any optimizer.

    Dynamo traces this into compiled steps. It reads nothing that it writes, or each step would be compiled again.
    """
    _Steps.since_last = None


class WeightCasts:
    """The casts of weights that the regions of a thread share, and the forms of weights that product rules make.

    The object that casts a weight is a `casting.Cast`, or the form of a product rule. It has `device_type`,
    `source_dtypes`, `on_device(weight)`, and `convert(weight)` for weights of these dtypes on such a device;
    `tensor(weight)` takes any weight.
    """

    def __init__(self, *, in_capture: bool = False) -> None:
        self.in_capture = in_capture  # made while a CUDA graph is captured: its casts belong to that graph
        self.reused: list[Any] | None = None  # casts reused from the cache, while a call is observed
        self.shared: dict[str, Any] = {}  # for product rules: objects to drop together with the casts
        self._casts: dict[tuple[Any, bool], dict[int, tuple[Any, ...]]] = {}  # by cast and inference mode: by weight
        self._getters: dict[tuple[Any, bool], Callable[[Tensor], Any]] = {}  # by cast and inference mode
        self._since_step: object = None  # `_Steps.since_last` when they were made
        if not _Steps.watched:
            _Steps.watched = True
            register_optimizer_step_pre_hook(invalidate_casts)
            register_optimizer_step_post_hook(invalidate_casts)

    def get(self, weight: Tensor, cast: Any) -> Any:
        """`cast.tensor(weight)`, from the cache if the weight's cast can be shared. Never synchronizes."""
        return self.getter(cast)(weight)

    def getter(self, cast: Any) -> Callable[[Tensor], Any]:
        """Return the function that casts the weights of the operator that runs now, as `get` does."""
        if (
            not _cache_enabled()  # a `torch.autocast` region inside ours disables it
            or (n_dispatch_modes() != 0 and not only_observed())  # traced, recorded or made of fake tensors
            or jit_tracing_state() is not None
            or (cast.device_type == "cuda" and is_capturing(CURRENT_CUDA) != self.in_capture)
        ):
            return cast.tensor
        if self._since_step is not _Steps.since_last:
            self.clear()
        key = cast, _inference_mode()
        return self._getters.get(key) or self._getters.setdefault(key, self._getter(*key))

    def _getter(self, cast: Any, in_inference: bool) -> Callable[[Tensor], Any]:
        # One function for a lookup and a new entry, since each call of Python counts: ten casts in a small forward.
        casts = self._casts.setdefault((cast, in_inference), {})
        source_dtypes, on_device, convert = cast.source_dtypes, cast.on_device, cast.convert

        def get(weight: Tensor) -> Any:
            cached = casts.get(id(weight))
            if cached is not None:
                _, version, address, storage, converted = cached
                if (
                    weight.requires_grad
                    and version == weight._version
                    and (storage is None or (address == weight.data_ptr() and storage() is not None))
                ):
                    if self.reused is not None:
                        self.reused.append(converted)
                    return converted
            # Casts are cached of leaves that require grad, as in torch.amp, but never of views. Frozen weights are cast
            # at each use: adapters are merged into them through `.data`, which no version counts.
            if (
                not weight.requires_grad
                or not weight.is_leaf
                or weight._is_view()
                or weight.is_inference()  # has no version counter
                or weight.dtype not in source_dtypes
                or not on_device(weight)
            ):
                return cast.tensor(weight)
            address, storage = None, None  # no memory of tensors that wrap others
            try:
                version = weight._version  # read before the cast, so that a write during the cast invalidates it
                if type(weight) in PLAIN_TENSORS and (functorch_level() is None or not is_functorch_wrapped(weight)):
                    address, storage = weight.data_ptr(), weakref.ref(weight.untyped_storage())
            except RuntimeError:  # sparse tensors have no memory of their own
                return cast.tensor(weight)
            self._since_step = _Steps.since_last = _Steps.since_last or object()
            if in_inference or _grad_enabled():
                converted = convert(weight)
            else:
                # With a history even under `no_grad`, as in torch.amp: the age of the history decides in which order
                # the gradients of a weight are added.
                try:
                    set_grad_enabled(True)
                    converted = convert(weight)
                finally:
                    set_grad_enabled(False)
            # The entry holds the weight, as the history of its cast does, so that no other tensor gets its `id`.
            casts[id(weight)] = weight, version, address, storage, converted
            return converted

        return get

    def clear(self) -> None:
        """Drop every cast. Regions that are open make new ones as they need them."""
        for casts in list(self._casts.values()):  # autograd threads may add to it
            casts.clear()
        self.shared.clear()
