"""From lists of tensors to the tables that let one launch walk all of them.

A launch needs to know, on the device: where each tensor starts (`addresses`, one column per list, one after another),
how long it is (`numels`), and how the work is cut (`blocks`: one entry per chunk, tensor index in the low 32 bits,
chunk index in the high 32). The cut depends on lengths alone and is made once per list of lengths. Addresses are
compared, value by value, with those last sent, and the columns that differ are sent again: gradients move between
iterations, parameters and moments do not. Identity of tensor objects is never consulted.

A table belongs to one device, stream and thread, so that what one of them sends cannot overtake what another has
launched. What is sent goes through pinned host memory and does not block; PyTorch's allocator does not give that
memory to another allocation before the copy has run.

While a CUDA graph is being captured every launch gets a table of its own, sent in one copy, which becomes a node of
the graph: every replay reads the pinned memory again. That memory is therefore never written again and never given
back, because nothing says when a graph is gone. It is cut from buffers that eager calls make, because older releases of
torch cannot allocate pinned memory during a capture: making a table leaves room for a few captured ones of its size.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..configs import Config, is_capturing, place
from ..tensor_lists import addresses_of, sizes_of
from .launch import on_device

MOST_TABLES = 2048      # that a thread keeps; where another one is needed, all of them are dropped first
CHUNK_SHIFT = 32
CHUNKS_PER_PROGRAM = 12
GRAPH_WORDS = 1 << 19   # of a pinned buffer for captured tables: 4 MiB
CAPTURED_TABLES = 4     # that there is room for, of the size of the last table made


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
    short ones to fill up at the end. Tensors without elements get no entry.
    """
    lengths = np.asarray(numels, dtype=np.int64)
    whole, rest = np.divmod(lengths, chunk)
    tensor = np.repeat(np.arange(len(lengths), dtype=np.int64), whole)
    index = np.arange(len(tensor), dtype=np.int64) - np.repeat(np.cumsum(whole) - whole, whole)
    order = np.argsort(-rest, kind="stable")[: np.count_nonzero(rest)]      # of the short ones alone: they are few
    return np.concatenate([(index << CHUNK_SHIFT) | tensor, (whole[order] << CHUNK_SHIFT) | order])


@dataclass(eq=False)
class Table:
    """The device side of one list of rows; see the module's docstring.

    addresses: int64 [n_lists * n_tensors], list by list, and `sent`, the columns that were sent there last.
    numels: int64 [n_tensors]. blocks: int64 [n_blocks]. wider: the table whose second column this one of a single list
    reads: gradients, which a step reads after their norm, are sent once.
    """

    device: torch.device
    addresses: Tensor
    sent: list[list[int]]
    numels: Tensor
    blocks: Tensor
    n_tensors: int
    n_blocks: int
    chunk: int
    config: Config
    n_programs: int
    wider: "Table | None" = None

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

    def refresh(self, columns: list[list[int]]) -> None:
        """Send the addresses that differ from what the device holds, if any do.

        One copy: of the columns from the first that differs to the last, which is most often the gradients' alone.
        """
        if self.wider is not None:
            kept = self.wider.sent
            self.wider.refresh([kept[0], *columns, *kept[2:]])
            return
        if columns == self.sent:
            return
        first, last, n = 0, len(columns), self.n_tensors
        while columns[first] == self.sent[first]:
            first += 1
        while columns[last - 1] == self.sent[last - 1]:
            last -= 1
        send(np.array(columns[first:last], dtype=np.int64).ravel(), self.addresses[first * n : last * n])
        self.sent = columns


def table_for(lists: Sequence[Sequence[Tensor]], config: Config, *, aligned: bool = True) -> Table:
    """The table for these parallel lists, all on one device and none of them without elements.

    Reuses the thread's table for equal lengths, dtypes, config, alignment, device and stream, which then holds the
    addresses of these lists: launch what uses the earlier ones first. Sends addresses only if they changed. Never waits
    for the device. A new table while a graph is being captured.

    Args: aligned: as `groups` gives it, so that the two parts of lists of mixed alignment have a table each.
    """
    device = lists[0][0].device
    with on_device(device):
        if is_capturing(device):
            return made_table(lists, config)
        columns = list(map(addresses_of, lists))
        dtypes = tuple([tensors[0].dtype for tensors in lists])
        # With the dtype, bytes say as much as elements, and are quicker to ask for.
        key = (*place(device), config, dtypes, aligned, tuple(sizes_of(lists[0])))
        table = _kept.tables.get(key)
        if table is None:
            if len(_kept.tables) >= MOST_TABLES:
                _kept.tables.clear()
            table = _kept.tables[key] = made_table(lists, config)
        else:
            table.refresh(columns)
        return table


class _Kept(threading.local):
    """The tables of a thread."""

    def __init__(self) -> None:
        self.tables: dict[tuple, Table] = {}


_kept = _Kept()


def step_table(lists: Sequence[Sequence[Tensor]], config: Config) -> Table:
    """A table that a step cache keeps for itself: parameters, gradients, and more.

    One of the thread's shared tables would be sent again for each parameter group of equal shapes. The thread's tables
    of one list of as many bytes each, which read the same gradients before the step, find them in its second column
    from now on, and keep it until another step's takes its place: what moves is sent once.
    """
    device = lists[0][0].device
    with on_device(device):
        table = made_table(lists, config)
        if not is_capturing(device):
            n, gradients = table.n_tensors, (*place(device), (lists[1][0].dtype,), tuple(sizes_of(lists[1])))
            for (*at, _, dtypes, _, sizes), other in _kept.tables.items():
                if (*at, dtypes, sizes) == gradients:
                    other.wider, other.addresses = table, table.addresses[n : 2 * n]
        return table


@torch.inference_mode(False)
def made_table(lists: Sequence[Sequence[Tensor]], config: Config) -> Table:
    """A table for these lists that no other launch uses, sent in one copy.

    An ordinary tensor even where `torch.inference_mode` is on: the table outlives it, and is written to outside.
    """
    device = lists[0][0].device
    columns, numels = list(map(addresses_of, lists)), list(map(Tensor.numel, lists[0]))
    full = config.programs(device)
    chunk = chunk_length(sum(numels), config, full)
    cut = block_map(numels, chunk)
    n, n_addresses = len(numels), len(columns) * len(numels)
    values = np.concatenate([np.array([*columns, numels], dtype=np.int64).ravel(), cut])
    memory = torch.empty(len(values), dtype=torch.int64, device=device)
    if device.type == "cuda" and not is_capturing(device):
        graph_memory.make_room(CAPTURED_TABLES * len(values))
    send(values, memory)
    return Table(
        device=device,
        addresses=memory[:n_addresses],
        sent=columns,
        numels=memory[n_addresses : n_addresses + n],
        blocks=memory[n_addresses + n :],
        n_tensors=n,
        n_blocks=len(cut),
        chunk=chunk,
        config=config,
        n_programs=min(full, len(cut)),
    )


def send(values: np.ndarray, destination: Tensor) -> None:
    """Copy int64 values into a vector, in stream order, without waiting for the device.

    While a graph is being captured the copy is a node of the graph, and the host memory is kept for good.
    """
    capturing = is_capturing(destination.device)
    if destination.is_cpu and not capturing:    # the interpreter's tables
        destination.copy_(torch.from_numpy(values))
        return
    pinned = graph_memory.take(len(values)) if capturing else pinned_words(len(values))
    pinned.numpy()[:] = values
    destination.copy_(pinned, non_blocking=True)


def pinned_words(n: int) -> Tensor:
    """Pinned host memory. The device is named because torch.set_default_device may have put another in its place."""
    return torch.empty(n, dtype=torch.int64, device="cpu", pin_memory=True)


class GraphMemory:
    """Pinned memory that CUDA graphs read at every replay: given out once, never taken back."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free = torch.empty(0, dtype=torch.int64, device="cpu")
        self._given: list[Tensor] = []

    def make_room(self, n: int) -> None:
        """Have room for `n` words, so that a capture that takes them allocates nothing."""
        with self._lock:
            if len(self._free) < n:
                self._free = pinned_words(max(n, GRAPH_WORDS))

    def take(self, n: int) -> Tensor:
        """`n` words that nothing else is given."""
        with self._lock:
            self.make_room(n)
            given, self._free = self._free.split((n, len(self._free) - n))
            self._given.append(given)
            return given


graph_memory = GraphMemory()
