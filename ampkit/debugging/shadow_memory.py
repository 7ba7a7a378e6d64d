"""What every tensor would hold had the step been computed in a wider dtype: a reference copy of its memory.

A reference copy belongs to a storage, element for element, so that views and in-place writes find it where they find
the user's values. Memory for which no operator has computed anything different has no reference copy: it is read as it
is. A cast copies nothing here: the reference values before and after it are the same and share memory until one of the
two is written.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ampkit.debugging.storage_map import StorageMap
from ampkit.torch_internals.operator_tracing import is_opaque, storage_key

__all__ = ["NONE", "Error", "ShadowMemory"]

_SPARE = 1 << 20        # bytes of reference copies beyond which those of memory that is gone are looked for


class Error(NamedTuple):
    """How far a tensor is from its reference copy, relatively, and the calls that made it, by index; -1 for none."""

    relative: float
    maker: int          # of the most of it
    lost: int = -1      # the last that made elements 0 which are none in the reference copy


NONE = Error(0.0, -1)


class _Copy:
    """The same elements in another dtype, and how far the user's are from them."""

    __slots__ = ("__weakref__", "error", "flat", "real", "shared")

    def __init__(self, flat: Tensor, real: torch.dtype) -> None:
        self.flat = flat        # one dimension, real numbers
        self.real = real        # the user's dtype, real for a complex one
        self.shared = False     # whether `flat` may be others' memory too: a reference copy's, or the user's own
        self.error = NONE

    def is_gone(self) -> bool:
        """Whether it shared memory that the user has freed since."""
        return self.shared and self.flat.untyped_storage().nbytes() < self.flat.nbytes


class ShadowMemory:
    """Reference copies of tensors in at least `reference`, made when an operator computes them."""

    def __init__(self, reference: torch.dtype) -> None:
        self.reference = reference
        self._copies: StorageMap[_Copy] = StorageMap()
        self._sharing: dict[int, WeakSet[_Copy]] = {}       # by the memory that they share
        self._grown, self._limit = 0, _SPARE

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a reference copy: that of the tensor if it is no float, or as wide as the reference."""
        if not (dtype.is_floating_point or dtype.is_complex):
            return dtype
        return self.reference if dtype.itemsize == 1 else torch.promote_types(dtype, self.reference)

    def has_copy(self, tensor: Tensor) -> bool:
        """Whether a tensor's reference values are other than its own."""
        return self._copy_of(tensor) is not None

    def error(self, tensor: Tensor) -> Error:
        """What was noted when a tensor's memory was last computed."""
        shadow = self._copy_of(tensor)
        return NONE if shadow is None else shadow.error

    def read(self, tensor: Tensor) -> Tensor:
        """The reference values of a tensor. They may be the user's own: for reading only."""
        shadow = self._copy_of(tensor)
        if shadow is None:
            return tensor if is_opaque(tensor) else tensor.detach().to(self.wide(tensor.dtype))
        return _view_as(shadow.flat, tensor)

    def make_writable(self, tensor: Tensor) -> None:
        """Give a tensor's memory a reference copy that may be written in place."""
        shadow = self._copy_of(tensor)
        if shadow is not None and shadow.shared:
            self._sharing[storage_key(shadow.flat)].discard(shadow)
            shadow.flat, shadow.shared = shadow.flat.clone(), False
        elif shadow is None and not is_opaque(tensor):
            whole = _whole(tensor)
            self._keep(tensor, whole.to(self.wide(whole.dtype), copy=True))

    def before_write(self, tensor: Tensor) -> None:
        """The user's values of a tensor are about to change: reference copies in their memory move to a copy."""
        sharing = self._sharing.pop(storage_key(tensor), None) if self._sharing and not is_opaque(tensor) else None
        one = next(iter(sharing), None) if sharing else None
        if sharing and one is not None:
            copy = one.flat.new_empty(0) if one.is_gone() else one.flat.clone()
            for shadow in sharing:
                shadow.flat = copy
            self._sharing[storage_key(copy)] = sharing

    def share(self, tensor: Tensor, source: Tensor) -> bool:
        """Let a new tensor, a cast of `source`, have its reference values in the same memory; False if it cannot."""
        if is_opaque(source) or not source.is_floating_point() or not tensor.is_floating_point():
            return False
        if source.device != tensor.device or source.stride() != tensor.stride():
            return False
        shadow = self._copy_of(source)
        if shadow is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            return False        # FSDP frees parameters, and fills their memory again, out of sight
        flat = _whole(source) if shadow is None else shadow.flat
        if flat.dtype is not self.wide(tensor.dtype) or not _fills(tensor, flat.numel()):
            return False
        for one in (self._keep(tensor, flat), shadow):
            if one is not None:
                one.shared = True
                self._sharing.setdefault(storage_key(flat), WeakSet()).add(one)
        return True

    def write(self, tensor: Tensor, value: Tensor, error: Error, *, own: bool) -> None:
        """Note the reference values of a new tensor; `own`: nothing else holds the memory of `value`."""
        count = _n_elements(tensor)
        value = value.to(self.wide(tensor.dtype))
        if own and _fills(tensor, count) and _fills(value, count) and value.stride() == tensor.stride():
            flat = torch.view_as_real(value) if value.is_complex() else value
            self._keep(tensor, flat.as_strided((count,), (1,), 0))
        else:
            self._keep(tensor, torch.zeros(count, dtype=self.wide(_real(tensor)), device=tensor.device))
            self.read(tensor).copy_(value)
        self.note_error(tensor, error)

    def note_error(self, tensor: Tensor, error: Error) -> None:
        """Note how far a tensor is from its reference copy."""
        shadow = self._copy_of(tensor)
        if shadow is not None:
            shadow.error = error

    def forget(self, tensor: Tensor) -> None:
        """From here on a tensor's own values are the reference."""
        self._copies.discard(tensor)

    def _copy_of(self, tensor: Tensor) -> _Copy | None:
        shadow = None if is_opaque(tensor) else self._copies.get(tensor)
        if shadow is None or (
            shadow.real is _real(tensor) and shadow.flat.numel() == _n_elements(tensor) and not shadow.is_gone()
        ):
            return shadow
        return None         # the memory was given another meaning, or another size

    def _keep(self, tensor: Tensor, flat: Tensor) -> _Copy:
        made = _Copy(flat, _real(tensor))
        self._copies.set(tensor, made)
        self._grown += flat.untyped_storage().nbytes()
        if self._grown > self._limit:
            self._copies.forget_expired()
            self._sharing = {key: copies for key, copies in self._sharing.items() if copies}
            live = sum(shadow.flat.untyped_storage().nbytes() for shadow in self._copies.values())
            self._grown, self._limit = 0, max(_SPARE, live // 32)
        return made


def _real(tensor: Tensor) -> torch.dtype:
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def _n_elements(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // _real(tensor).itemsize


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's memory, in one dimension of real numbers."""
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return plain.as_strided((_n_elements(tensor),), (1,), 0)


def _fills(tensor: Tensor, count: int) -> bool:
    """Whether a tensor is all of its memory, as it lies there."""
    return (
        tensor.storage_offset() == 0 and _n_elements(tensor) == count
        and tensor.numel() * (2 if tensor.is_complex() else 1) == count
        and not tensor.is_conj() and not tensor.is_neg()
    )


def _view_as(flat: Tensor, tensor: Tensor) -> Tensor:
    """A reference copy seen as a tensor sees the memory that it is the reference copy of."""
    whole = torch.view_as_complex(flat.view(-1, 2)) if tensor.is_complex() else flat
    view = whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    if tensor.is_conj():
        view = view.conj()
    return -view if tensor.is_neg() else view
