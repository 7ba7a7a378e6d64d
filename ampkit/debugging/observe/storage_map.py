"""A dictionary whose keys are the storages of tensors, for example to store which operator wrote them."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor

from ampkit.debugging.torch_private import StorageWeakRef, storage_key

_SPARE = 1024  # entries that may be of freed storages

T = TypeVar("T")


class StorageMap(Generic[T]):
    """Values by storage: a tensor, its views and its in-place results share one entry.

    An entry holds its storage by a weak reference, so that its address is not reused: a tensor that no observed
    operator made (a DataLoader's batch) never finds the entry of an earlier storage. Entries of freed storages are
    removed once the map has doubled since the last removal.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, T]] = {}
        self._limit = _SPARE

    def get(self, tensor: Tensor) -> T | None:
        """Return the value of a tensor's storage."""
        entry = self._entries.get(storage_key(tensor))
        return None if entry is None else entry[1]

    def set(self, tensor: Tensor, value: T) -> None:
        """Set the value of a tensor's storage."""
        key = storage_key(tensor)
        entry = self._entries.get(key)
        self._entries[key] = (StorageWeakRef(tensor.untyped_storage()) if entry is None else entry[0], value)
        if len(self._entries) > self._limit:
            self._entries = {key: entry for key, entry in self._entries.items() if not entry[0].expired()}
            self._limit = _SPARE + 2 * len(self._entries)

    def __bool__(self) -> bool:
        """Whether it may have an entry."""
        return bool(self._entries)

    def clear(self) -> None:
        """Remove all values."""
        self._entries.clear()

    def discard(self, tensor: Tensor) -> None:
        """Remove the value of a tensor's storage."""
        self._entries.pop(storage_key(tensor), None)
