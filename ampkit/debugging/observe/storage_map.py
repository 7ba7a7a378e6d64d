"""A dictionary whose keys are the storages of tensors, for example to remember which operator wrote them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch import Tensor

from ampkit.debugging.torch_private import StorageWeakRef, storage_key

T = TypeVar("T")


class StorageMap(Generic[T]):
    """Values by storage: a tensor, its views and its in-place results share one entry.

    An entry holds its storage by a weak reference, which keeps the address from being reused: a tensor that was made
    where the tool does not see it (a DataLoader's batch) never finds the entry of an earlier storage. Entries of freed
    storages are removed once the values set since the last removal have a size of more than `spare`, and of more than
    `share` of the values that it kept. `size` returns the size of a value; without it each counts 1.
    """

    def __init__(self, size: Callable[[T], int] | None = None, spare: int = 1024, share: float = 1.0) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, T]] = {}
        self._size, self._spare, self._share = size, spare, share
        self._grown, self._limit = 0, spare

    def get(self, tensor: Tensor) -> T | None:
        """The value of a tensor's storage."""
        entry = self._entries.get(storage_key(tensor))
        return None if entry is None else entry[1]

    def set(self, tensor: Tensor, value: T) -> None:
        """Set the value of a tensor's storage."""
        key = storage_key(tensor)
        entry = self._entries.get(key)
        self._entries[key] = (StorageWeakRef(tensor.untyped_storage()) if entry is None else entry[0], value)
        self._grown += 1 if self._size is None else self._size(value)
        if self._grown > self._limit:
            self._entries = {key: entry for key, entry in self._entries.items() if not entry[0].expired()}
            kept = len(self._entries) if self._size is None else sum(map(self._size, self.values()))
            self._grown, self._limit = 0, max(self._spare, int(self._share * kept))

    def discard(self, tensor: Tensor) -> None:
        """Remove the value of a tensor's storage."""
        self._entries.pop(storage_key(tensor), None)

    def values(self) -> Iterator[T]:
        """All values."""
        return (value for _, value in self._entries.values())
