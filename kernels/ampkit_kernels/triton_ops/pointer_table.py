"""From lists of tensors to the tables that let one launch walk all of them.

A launch needs to know, on the device: where each tensor starts (`addresses`, one column per list, one after
another), how long it is (`numels`), and how the work is cut (`blocks`: one entry per chunk, tensor index
in the low 32 bits, chunk index in the high 32). The cut depends on lengths alone and is made once per list
of lengths. Addresses are compared, value by value, with those last sent, and the columns that differ are
sent again: gradients move between iterations, parameters and moments do not. Identity of tensor objects is
never consulted.

A table belongs to one device, stream and thread, so that what one of them sends cannot overtake what
another has launched. Eager uploads go through pinned host memory, two buffers in turn, never blocking.
While a CUDA graph is being captured nothing is uploaded and nothing is cached: the table is written by
kernels (`table_writer`).
"""

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..configs import Config
from ..dispatch import is_capturing
from ..tensors import addresses_of, sizes_of
from . import table_writer
from .launch import on_device

# Tables are kept up to this much memory: thousands for small lists, such as one of a parameter group each, and some
# hundreds for the longest. OVERHEAD is what a table takes besides its numbers.
MAX_CACHED_BYTES = 64 << 20
OVERHEAD = 16 << 10
CHUNK_SHIFT = 32
CHUNKS_PER_PROGRAM = 12


def chunk_length(total: int, config: Config, n_programs: int) -> int:
    """Elements per chunk: as long as the config allows while every program still gets about twelve chunks.

    One program may start its last chunk when another has finished, which costs a twelfth of the time at most. The
    result is `config.block` times a power of two, so that few lengths occur.
    """
    chunk = config.chunk
    while chunk > config.block and total < CHUNKS_PER_PROGRAM * chunk * n_programs and chunk % (2 * config.block) == 0:
        chunk //= 2
    return chunk


def block_map(numels: Sequence[int], chunk: int) -> np.ndarray:
    """One int64 per chunk, `chunk_index << 32 | tensor_index`; the longest chunks first.

    Programs take entries in a stride, so sorting spreads long chunks evenly over programs and leaves the
    short ones to fill up at the end. Tensors without elements get no
    entry.
    """
    lengths = np.asarray(numels, dtype=np.int64)
    counts = (lengths + chunk - 1) // chunk
    tensor = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    index = np.arange(len(tensor), dtype=np.int64) - first
    sizes = np.minimum(lengths[tensor] - index * chunk, chunk)
    order = np.argsort(-sizes, kind="stable")
    return (index[order] << CHUNK_SHIFT) | tensor[order]


def tail_ranks(numels: Sequence[int], chunk: int) -> list[int]:
    """Where `block_map` has each tensor's last chunk among those shorter than `chunk`, longest first."""
    ranks = [0] * len(numels)
    shorter = [i for i, numel in enumerate(numels) if numel % chunk]
    for rank, i in enumerate(sorted(shorter, key=lambda i: -(numels[i] % chunk))):
        ranks[i] = rank
    return ranks


@dataclass
class Table:
    """The device side of one list of rows; see the module's docstring.

    addresses: int64 [n_lists * n_tensors], list by list. numels: int64 [n_tensors]. blocks: int64 [n_blocks].
    """

    device: torch.device
    addresses: Tensor
    numels: Tensor
    blocks: Tensor
    n_tensors: int
    n_blocks: int
    chunk: int
    config: Config
    n_programs: int
    sent: list[list[int]]
    upload: "Upload | None"

    def launch(self, kernel: Any, *arguments: Any, enable_fp_fusion: bool = False, **constants: Any) -> None:
        """Launch a kernel that walks the table, with the arguments that all such kernels share, then `arguments`.

        `enable_fp_fusion`: whether a product and a sum may become one instruction that rounds once, unlike the CPU's.
        """
        config = self.config
        with on_device(self.device):
            kernel[(self.n_programs,)](
                self.addresses, self.numels, self.blocks, self.n_blocks, self.chunk // config.block, *arguments,
                BLOCK=config.block, num_warps=config.num_warps, enable_fp_fusion=enable_fp_fusion, **constants,
            )

    def refresh(self, columns: list[list[int]]) -> bool:
        """Send the addresses that differ from what the device holds; True if any did.

        One copy: of the columns from the first that differs to the last, which is most often the gradients' alone.
        """
        if columns == self.sent:
            return False
        if self.upload is None:
            raise RuntimeError("a table written under graph capture cannot be refreshed")
        first, last = 0, len(columns)
        if self.sent:
            while columns[first] == self.sent[first]:
                first += 1
            while columns[last - 1] == self.sent[last - 1]:
                last -= 1
        n = self.n_tensors
        values = np.array(columns[first:last], dtype=np.int64).ravel()
        with on_device(self.device):
            self.upload.send(values, self.addresses[first * n : last * n])
        self.sent = columns
        return True

    @property
    def n_bytes(self) -> int:
        """Memory that the cache counts for the table."""
        return OVERHEAD + 8 * (3 * self.addresses.numel() + self.n_tensors + self.n_blocks)


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

    def send(self, values: np.ndarray, destination: Tensor) -> None:
        """Copy `values`, at most as many as the buffers hold, into `destination`, in stream order."""
        slot = self._slots[self._turn]
        if slot is None or slot.busy():
            slot = self._make_slot(self._n)
            self._slots[self._turn] = slot
        slot.copy_to(values, destination)
        self._turn = 1 - self._turn


_tables: OrderedDict[tuple, Table] = OrderedDict()
_cached_bytes = 0
_lock = threading.Lock()


def _forked() -> None:
    """In a forked child: a thread that does not exist there may hold the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def table_for(lists: Sequence[Sequence[Tensor]], config: Config) -> Table:
    """The table for these parallel lists, all on one device and none of them without elements.

    Reuses the table made for equal lengths, dtypes, config, device, stream and thread; sends addresses only
    if they changed. Never waits for the device.
    """
    device = lists[0][0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return table_for(lists, config)
    columns = list(map(addresses_of, lists))
    if is_capturing(device):
        return _written(columns, list(map(Tensor.numel, lists[0])), config, device)
    dtypes = tuple([tensors[0].dtype for tensors in lists])
    # With the dtype, bytes say as much as elements, and are quicker to ask for.
    key = (*place(device), config, dtypes, tuple(sizes_of(lists[0])))
    with _lock:
        table = _tables.get(key)
        if table is not None:
            _tables.move_to_end(key)
    if table is None:
        table = uploaded(len(columns), list(map(Tensor.numel, lists[0])), config, device)
        _keep(key, table)
    table.refresh(columns)
    return table


def place(device: torch.device) -> tuple[torch.device, int, int]:
    """Device, stream and thread: what a table belongs to."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return device, stream, threading.get_ident()


def _keep(key: tuple, table: Table) -> None:
    """Put a table into the cache, which evicts the least recently used."""
    global _cached_bytes
    with _lock:
        before = _tables.get(key)
        _tables[key] = table
        _cached_bytes += table.n_bytes - (0 if before is None else before.n_bytes)
        while _cached_bytes > MAX_CACHED_BYTES and len(_tables) > 1:
            _, oldest = _tables.popitem(last=False)
            _cached_bytes -= oldest.n_bytes


def clear_tables() -> None:
    """Forget every cached table and free its memory."""
    global _cached_bytes
    with _lock:
        _tables.clear()
        _cached_bytes = 0


def _cut(numels: list[int], config: Config, device: torch.device) -> tuple[int, int]:
    """Chunk length and full grid for these lengths."""
    full = config.programs(device)
    return chunk_length(sum(numels), config, full), full


@functools.cache
def _load_writer(device: torch.device) -> None:
    """Compile and load the writing kernels before a capture needs them: loading code is not allowed during one."""
    numels = torch.zeros(1, dtype=torch.int64, device=device)
    table_writer.write([1], numels)
    table_writer.expand(numels, numels, 1, 1, torch.empty(2, dtype=torch.int64, device=device))


def _padded(n: int) -> int:
    """Rounded up to whole 16-byte units, so that sections of one buffer are equally aligned."""
    return n + n % 2


@torch.inference_mode(False)
def uploaded(n_lists: int, numels: list[int], config: Config, device: torch.device) -> Table:
    """A new table whose lengths and cut have been sent; the addresses are for `refresh` to send.

    An ordinary tensor even where `torch.inference_mode` is on: the table outlives it, and is written to outside.
    """
    if device.type == "cuda":
        _load_writer(device)
    chunk, full = _cut(numels, config, device)
    blocks = block_map(numels, chunk)
    n, n_addresses = len(numels), n_lists * len(numels)
    make_slot = PinnedSlot if device.type == "cuda" else HostSlot
    static = np.zeros(_padded(n) + len(blocks), dtype=np.int64)
    static[:n] = numels
    static[_padded(n) :] = blocks
    memory = torch.empty(_padded(n_addresses) + len(static), dtype=torch.int64, device=device)
    rest = memory[_padded(n_addresses) :]
    make_slot(len(static)).copy_to(static, rest)
    return Table(
        device=device,
        addresses=memory[:n_addresses],
        numels=rest[:n],
        blocks=rest[_padded(n) :],
        n_tensors=n,
        n_blocks=len(blocks),
        chunk=chunk,
        config=config,
        n_programs=min(full, len(blocks)),
        sent=[],
        upload=Upload(n_addresses, make_slot),
    )


def _written(columns: list[list[int]], numels: list[int], config: Config, device: torch.device) -> Table:
    """A table whose every value is a kernel argument recorded in the graph being captured."""
    chunk, full = _cut(numels, config, device)
    n, n_addresses = len(numels), len(columns) * len(numels)
    n_blocks = sum(-(-numel // chunk) for numel in numels)
    ranks = tail_ranks(numels, chunk)
    memory = torch.empty(_padded(n_addresses) + 2 * _padded(n) + n_blocks, dtype=torch.int64, device=device)
    addresses = memory[:n_addresses]
    lengths, ranked = (memory[_padded(n_addresses) + i * _padded(n) :][:n] for i in range(2))
    blocks = memory[_padded(n_addresses) + 2 * _padded(n) :]
    table_writer.write([address for column in columns for address in column], addresses)
    table_writer.write(numels, lengths)
    table_writer.write(ranks, ranked)
    table_writer.expand(lengths, ranked, chunk, sum(numel // chunk for numel in numels), blocks)
    return Table(
        device=device,
        addresses=addresses,
        numels=lengths,
        blocks=blocks,
        n_tensors=n,
        n_blocks=n_blocks,
        chunk=chunk,
        config=config,
        n_programs=min(full, n_blocks),
        sent=columns,
        upload=None,
    )
