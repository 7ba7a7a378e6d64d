"""Something to remember about a tensor's memory: by whom it was written, or what it would be in another precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from torch import Tensor

from ampkit.torch_internals.operator_tracing import StorageWeakRef, storage_key

__all__ = ["StorageMap"]

T = TypeVar("T")


class StorageMap(Generic[T]):
    """Values by storage, so that views and in-place writes find each other; memory that is gone is forgotten.

    An entry holds its storage by a weak reference, which keeps the address from being given to another one: a tensor
    that was made out of sight of the tool (a DataLoader's batch) never finds an entry of somebody before it.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[StorageWeakRef, T]] = {}
        self._limit = 1024

    def get(self, tensor: Tensor) -> T | None:
        """What is known of a tensor's memory."""
        entry = self._entries.get(storage_key(tensor))
        return None if entry is None else entry[1]

    def set(self, tensor: Tensor, value: T) -> None:
        """Remember a value for a tensor's memory."""
        key = storage_key(tensor)
        entry = self._entries.get(key)
        self._entries[key] = (StorageWeakRef(tensor.untyped_storage()) if entry is None else entry[0], value)
        if len(self._entries) > self._limit:
            self.forget_expired()
            self._limit = max(1024, 2 * len(self._entries))

    def discard(self, tensor: Tensor) -> None:
        """Forget the value for a tensor's memory."""
        self._entries.pop(storage_key(tensor), None)

    def forget_expired(self) -> None:
        """Forget memory that is gone."""
        self._entries = {key: entry for key, entry in self._entries.items() if not entry[0].expired()}

    def values(self) -> Iterator[T]:
        """All values that are remembered."""
        return (value for _, value in self._entries.values())
