"""Reference copies: the values that each tensor would have if the step were computed in a wider dtype.

A reference copy belongs to a storage, element for element, so that views and in-place writes find it as they find the
user's values. A storage whose reference values equal the user's has no copy: the user's values are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ampkit.debugging.observe.storage_map import StorageMap
from ampkit.debugging.torch_private import is_opaque


class Error(NamedTuple):
    """The relative error of a tensor against its reference copy."""

    relative: float
    maker: int  # index of the call that made most of the error; -1 without one


NONE = Error(0.0, -1)


@dataclass(slots=True)
class _Copy:
    """A storage's elements in the reference's dtype, and the error of the user's elements."""

    flat: Tensor  # one dimension, real numbers
    real: torch.dtype  # the user's dtype, real for a complex one
    error: Error = NONE


class ReferenceCopies:
    """Reference copies of tensors, in the dtype `reference` or a wider one, set as operators compute them."""

    def __init__(self, reference: torch.dtype) -> None:
        self.reference = reference
        self._copies: StorageMap[_Copy] = StorageMap()

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the reference copy of a tensor with `dtype`; `dtype` itself for integers and wider floats."""
        if not (dtype.is_floating_point or dtype.is_complex):
            return dtype
        return self.reference if dtype.itemsize == 1 else torch.promote_types(dtype, self.reference)

    def has_copy(self, tensor: Tensor) -> bool:
        """Whether a tensor has reference values other than its own."""
        return self._copy_of(tensor) is not None

    def error(self, tensor: Tensor) -> Error:
        """The error that was noted when a tensor was last computed."""
        copy = self._copy_of(tensor)
        return NONE if copy is None else copy.error

    def read(self, tensor: Tensor) -> Tensor:
        """The reference values of a tensor, for reading only: they may share memory with the user's."""
        copy = self._copy_of(tensor)
        if copy is None:
            return tensor if is_opaque(tensor) else tensor.detach().to(self.wide(tensor.dtype))
        whole = torch.view_as_complex(copy.flat.view(-1, 2)) if tensor.is_complex() else copy.flat
        view = whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        view = view.conj() if tensor.is_conj() else view
        return -view if tensor.is_neg() else view

    def make_writable(self, tensor: Tensor) -> None:
        """Make a reference copy of a tensor's storage, if there is none, that may be written in place."""
        if self._copy_of(tensor) is None and not is_opaque(tensor):
            plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
            whole = plain.as_strided((_n_elements(tensor),), (1,), 0)
            self._keep(tensor, whole.to(self.wide(whole.dtype), copy=True))

    def write(self, tensor: Tensor, value: Tensor, error: Error, *, own: bool) -> None:
        """Set the reference values of a new tensor; `own`: `value` shares its memory with no other tensor."""
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
        """Set the error of a tensor that has a reference copy."""
        copy = self._copy_of(tensor)
        if copy is not None:
            copy.error = error

    def forget(self, tensor: Tensor) -> None:
        """Remove a tensor's reference copy: from now on its own values are the reference."""
        self._copies.discard(tensor)

    def _copy_of(self, tensor: Tensor) -> _Copy | None:
        copy = None if is_opaque(tensor) else self._copies.get(tensor)
        if copy is None or (copy.real is _real(tensor) and copy.flat.numel() == _n_elements(tensor)):
            return copy
        return None  # the storage has another dtype or size by now

    def _keep(self, tensor: Tensor, flat: Tensor) -> None:
        self._copies.set(tensor, _Copy(flat, _real(tensor)))


def _real(tensor: Tensor) -> torch.dtype:
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def _n_elements(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // _real(tensor).itemsize


def _fills(tensor: Tensor, count: int) -> bool:
    """Whether a tensor covers its whole storage, without conjugation or negation."""
    return (
        tensor.storage_offset() == 0
        and _n_elements(tensor) == count
        and tensor.numel() * (2 if tensor.is_complex() else 1) == count
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
