"""Copies to the device that never wait for it: through pinned host memory, two buffers in turn."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Slot(Protocol):
    """Host memory that an upload reads from."""

    def busy(self) -> bool: ...
    def copy_to(self, values: np.ndarray, destination: Tensor) -> None: ...


class PinnedSlot:
    """Pinned memory, and the event after which the device has read it."""

    def __init__(self, n: int) -> None:
        # The device is named because torch.set_default_device may have put another in its place.
        self.memory = torch.empty(n, dtype=torch.int64, device="cpu", pin_memory=True)
        self.event = torch.cuda.Event()

    def busy(self) -> bool:
        """Whether the last copy out of this memory may still be under way."""
        return not self.event.query()

    def copy_to(self, values: np.ndarray, destination: Tensor) -> None:
        """Stage the values and start copying them, on the current stream, without waiting."""
        n = len(values)
        self.memory.numpy()[:n] = values
        destination.copy_(self.memory[:n], non_blocking=True)
        self.event.record(torch.cuda.current_stream(destination.device))


class HostSlot:
    """The interpreter's stand-in: the destination is host memory already."""

    def __init__(self, n: int) -> None:
        del n

    def busy(self) -> bool:
        """Never: the copy is done when it returns."""
        return False

    def copy_to(self, values: np.ndarray, destination: Tensor) -> None:
        """Copy at once."""
        destination.copy_(torch.from_numpy(values))


class Upload:
    """Double-buffered sending: memory that the device may still be reading is never written.

    When both buffers are busy the older one is let go (PyTorch's pinned allocator keeps it until the copy
    has run) and a fresh one takes its place, so that the host never waits.
    """

    def __init__(self, n: int, make_slot: Callable[[int], Slot]) -> None:
        self._n = n
        self._make_slot = make_slot
        self._slots: list[Slot | None] = [None, None]
        self._turn = 0

    def send(self, values: np.ndarray, destination: Tensor) -> Slot:
        """Copy `values`, at most as many as the buffers hold, into `destination`, in stream order.

        Returns the buffer; while it is not busy, the copy is done.
        """
        slot = self._slots[self._turn]
        if slot is None or slot.busy():
            slot = self._make_slot(self._n)
            self._slots[self._turn] = slot
        slot.copy_to(values, destination)
        self._turn = 1 - self._turn
        return slot
