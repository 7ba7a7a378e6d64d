"""From lists of tensors to the tables that let one launch walk all of them.

A launch needs to know, on the device: where each tensor starts (`addresses`, one column per list, one after
another), how long it is (`numels`), and how the work is cut (`blocks`: one entry per chunk, tensor index
in the low 32 bits, chunk index in the high 32). The cut depends on lengths alone and is made once per list
of lengths. Addresses are compared, value by value, with those last sent, and the columns that differ are
sent again: gradients move between iterations, parameters and moments do not. Identity of tensor objects is
never consulted.

A table belongs to one device, stream and thread, so that what one of them sends cannot overtake what
another has launched. Eager uploads go through pinned host memory, two buffers in turn, never blocking.

While a CUDA graph is being captured nothing is uploaded, for a copy would be part of the graph, and read
host memory again at every replay. What eager calls have sent for the same lengths, and the device is known to
have, is read where it lies; only columns that are elsewhere (most often gradients in the graph's own memory) are
written by kernels at every replay (`table_writer`). What graphs read is never written again, and is kept for
good, because nothing says when a graph is gone.
"""

import functools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..configs import Config, is_capturing
from ..tensors import addresses_of, sizes_of
from . import table_writer
from .launch import on_device
from .upload import HostSlot, PinnedSlot, Slot, Upload

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


@dataclass(eq=False)
class Table:
    """The device side of one list of rows; see the module's docstring.

    addresses: int64 [n_lists * n_tensors], list by list. numels: int64 [n_tensors]. blocks: int64 [n_blocks].
    lengths: `numels` on the host. sent: the columns of `addresses` on the host.
    arriving: the buffer of the first copy, which has every column, until a launch finds that the device has it.
    moved: columns sent again since. captured: columns that graphs read.
    """

    device: torch.device
    addresses: Tensor
    numels: Tensor
    blocks: Tensor
    lengths: list[int]
    n_tensors: int
    n_blocks: int
    chunk: int
    config: Config
    n_programs: int
    upload: Upload | None
    sent: list[list[int]] = field(default_factory=list)
    arriving: Slot | None = None
    moved: set[int] = field(default_factory=set)
    captured: set[int] = field(default_factory=set)
    thread: int = field(default_factory=threading.get_ident)

    def launch(self, kernel: Any, *arguments: Any, enable_fp_fusion: bool = False, **constants: Any) -> None:
        """Launch a kernel that walks the table, with the arguments that all such kernels share, then `arguments`.

        `enable_fp_fusion`: whether a product and a sum may become one instruction that rounds once, unlike the CPU's.
        """
        config = self.config
        if self.arriving is not None and not self.arriving.busy():
            self.arriving = None
        with on_device(self.device):
            kernel[(self.n_programs,)](
                self.addresses, self.numels, self.blocks, self.n_blocks, self.chunk // config.block, *arguments,
                BLOCK=config.block, num_warps=config.num_warps, enable_fp_fusion=enable_fp_fusion, **constants,
            )

    def refresh(self, columns: list[list[int]]) -> bool:
        """Send the addresses that differ from what the device holds; True if any did.

        One copy: of the columns from the first that differs to the last, which is most often the gradients' alone. If a
        graph reads one of these, it keeps the memory, and all columns are sent to other memory.
        """
        if columns == self.sent:
            return False
        if self.upload is None:
            raise RuntimeError("a table written under graph capture cannot be refreshed")
        first, last = 0, len(columns)
        anew = not self.sent
        if not anew:
            while columns[first] == self.sent[first]:
                first += 1
            while columns[last - 1] == self.sent[last - 1]:
                last -= 1
            if self.captured and not self.captured.isdisjoint(range(first, last)):
                anew, first, last = True, 0, len(columns)
                with torch.inference_mode(False):
                    self.addresses = torch.empty_like(self.addresses)
                self.captured, self.moved = set(), set()
        n = self.n_tensors
        values = np.array(columns[first:last], dtype=np.int64).ravel()
        with on_device(self.device):
            slot = self.upload.send(values, self.addresses[first * n : last * n])
        if anew:
            self.arriving = slot
        else:
            self.moved.update(range(first, last))
        self.sent = columns
        return True

    def holds(self, columns: list[list[int]]) -> set[int]:
        """Which of these columns, if they are as many as were sent, the first copy had and none has sent again."""
        if len(columns) != len(self.sent):
            return set()
        return {i for i, column in enumerate(columns) if column == self.sent[i] and i not in self.moved}

    @property
    def n_bytes(self) -> int:
        """Memory that the cache counts for the table."""
        return OVERHEAD + 8 * (3 * self.addresses.numel() + self.n_tensors + self.n_blocks)


_tables: OrderedDict[tuple, Table] = OrderedDict()
_cached_bytes = 0
_uploaded: weakref.WeakSet[Table] = weakref.WeakSet()   # also those that are kept elsewhere
_read_by_graphs: dict[int, Tensor] = {}                 # by address
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
        return _captured(columns, list(map(Tensor.numel, lists[0])), config, device)
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
    """Forget every cached table and free its memory, unless a graph reads it."""
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
    table = Table(
        device=device,
        addresses=memory[:n_addresses],
        numels=rest[:n],
        blocks=rest[_padded(n) :],
        lengths=numels,
        n_tensors=n,
        n_blocks=len(blocks),
        chunk=chunk,
        config=config,
        n_programs=min(full, len(blocks)),
        upload=Upload(n_addresses, make_slot),
    )
    with _lock:
        _uploaded.add(table)
    return table


def _captured(columns: list[list[int]], numels: list[int], config: Config, device: torch.device) -> Table:
    """A table for the graph being captured. What it has to write itself are kernel arguments, stored in the graph."""
    chunk, full = _cut(numels, config, device)
    n, n_blocks = len(numels), sum(-(-numel // chunk) for numel in numels)
    known, held = _known(columns, numels, config, device)
    if known is None:
        lengths, blocks = _written_map(numels, chunk, n_blocks, device)
    else:
        lengths, blocks = known.numels, known.blocks
        known.captured |= held
        for memory in (blocks, known.addresses) if held else (blocks,):
            _read_by_graphs[memory.data_ptr()] = memory
    missing = [i for i in range(len(columns)) if i not in held]
    if known is not None and not missing:
        addresses = known.addresses
    else:
        addresses = torch.empty(len(columns) * n, dtype=torch.int64, device=device)
        if known is not None and held:
            addresses.copy_(known.addresses)
        first, last = missing[0], missing[-1] + 1
        table_writer.write([a for column in columns[first:last] for a in column], addresses[first * n : last * n])
    return Table(
        device=device,
        addresses=addresses,
        numels=lengths,
        blocks=blocks,
        lengths=numels,
        n_tensors=n,
        n_blocks=n_blocks,
        chunk=chunk,
        config=config,
        n_programs=min(full, n_blocks),
        upload=None,
        sent=columns,
    )


def _known(
    columns: list[list[int]], numels: list[int], config: Config, device: torch.device
) -> tuple[Table | None, set[int]]:
    """Of the tables that this thread has sent for these lengths, and the device has, one with most of these columns.

    And which of the columns it has.
    """
    with _lock:
        tables = list(_uploaded)
    thread = threading.get_ident()
    best, held = None, set[int]()
    for table in tables:
        if (
            table.config is config and table.device == device and table.thread == thread
            and table.arriving is None and table.sent and table.lengths == numels
        ):
            here = table.holds(columns)
            if best is None or len(here) > len(held):
                best, held = table, here
    return best, held


def _written_map(numels: list[int], chunk: int, n_blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lengths and block map, written by kernels."""
    n = len(numels)
    memory = torch.empty(2 * _padded(n) + n_blocks, dtype=torch.int64, device=device)
    lengths, ranks, blocks = memory[:n], memory[_padded(n) :][:n], memory[2 * _padded(n) :]
    table_writer.write([*numels, *[0] * (_padded(n) - n), *tail_ranks(numels, chunk)], memory[: _padded(n) + n])
    table_writer.expand(lengths, ranks, chunk, sum(numel // chunk for numel in numels), blocks)
    return lengths, blocks
