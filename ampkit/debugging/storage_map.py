"""Something to remember about a tensor's memory: by whom it was written, or what it would be in another precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch import Tensor

from ampkit.torch_internals.operator_tracing import StorageWeakRef, storage_key

T = TypeVar("T")


class StorageMap(Generic[T]):
    """Values by storage, so that views and in-place writes find each other; memory that is gone is forgotten.

    An entry holds its storage by a weak reference, which keeps the address from being given to another one: a tensor
    that was made out of sight of the tool (a DataLoader's batch) never finds an entry of somebody before it. Memory
    that is gone is looked for when values of `spare` more, by their `size`, or a `part` of all more have been set.
    """

    def __init__(self, size: Callable[[T], int] | None = None, spare: int = 1024, part: float = 1.0) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, T]] = {}
        self._size, self._spare, self._part = size, spare, part
        self._grown, self._limit = 0, spare

    def get(self, tensor: Tensor) -> T | None:
        """What is known of a tensor's memory."""
        entry = self._entries.get(storage_key(tensor))
        return None if entry is None else entry[1]

    def set(self, tensor: Tensor, value: T) -> None:
        """Remember a value for a tensor's memory."""
        key = storage_key(tensor)
        entry = self._entries.get(key)
        self._entries[key] = (StorageWeakRef(tensor.untyped_storage()) if entry is None else entry[0], value)
        self._grown += 1 if self._size is None else self._size(value)
        if self._grown > self._limit:
            self._entries = {key: entry for key, entry in self._entries.items() if not entry[0].expired()}
            live = len(self._entries) if self._size is None else sum(map(self._size, self.values()))
            self._grown, self._limit = 0, max(self._spare, int(self._part * live))

    def discard(self, tensor: Tensor) -> None:
        """Forget the value for a tensor's memory."""
        self._entries.pop(storage_key(tensor), None)

    def values(self) -> Iterator[T]:
        """All values that are remembered."""
        return (value for _, value in self._entries.values())
