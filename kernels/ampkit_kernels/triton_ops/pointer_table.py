"""The table on the device that lets one launch walk a list of tensors, or several parallel lists.

A launch reads on the device where each tensor starts (`addresses`: one column per list, one after another), how long
it is (`numels`), and how the work is divided (`blocks`: the block map, which depends only on lengths). Addresses are
compared, value by value, with the addresses that were sent last, and columns that differ are sent again: gradients move
between iterations, parameters and moments do not.

A table belongs to one device, stream and thread, so that a copy of one thread cannot overtake a launch of another.
Copies go through pinned host memory and do not block; PyTorch's allocator reuses that memory only after the copy.

While a CUDA graph is being captured every launch gets a table of its own, sent in one copy, which becomes a node of the
graph: every replay reads the pinned memory again. So that memory is never written again and never freed, because a
graph's end is not announced. It is taken from buffers that eager calls allocate, because older releases of torch cannot
allocate pinned memory during a capture: making a table leaves space for a few captured tables of its size.

On the device a kernel walks one list at any element-aligned address (`chunk_bounds`): from the address rounded down to
16 bytes, so that full blocks keep 128-bit accesses wherever a bucket view starts. `skew` elements of the first block
precede the tensor and are masked; the last chunk takes the `skew` elements that remain. Only blocks at an end of the
tensor are masked, because the compiler does not widen masked accesses.

The skews of lists that are walked together (`chunk_extent`, `list_pointer`) may differ, so the launcher separates rows
with every address on a 16-byte boundary, which get 128-bit accesses, from the others.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..configs import Config, is_capturing, place
from ..tensor_lists import addresses_of, sizes_of
from .launch import on_device

MOST_TABLES = 2048  # that a thread keeps; it drops all of them before it makes another
CHUNK_SHIFT = 32
CHUNKS_PER_PROGRAM = 12
GRAPH_WORDS = 1 << 19  # int64 words of a pinned buffer for captured tables: 4 MiB
CAPTURED_TABLES = 4  # of the size of the last table made, for which pinned memory is kept ready


def chunk_length(total: int, config: Config, n_programs: int) -> int:
    """Elements per chunk: the longest that the config allows while every program gets about twelve chunks.

    One program may start its last chunk when another has finished, which costs at most a twelfth of the time.
    """
    chunk = config.chunk
    while chunk > config.block and total < CHUNKS_PER_PROGRAM * chunk * n_programs and chunk % (2 * config.block) == 0:
        chunk //= 2
    return chunk


def block_map(numels: Sequence[int], chunk: int) -> np.ndarray:
    """Return the block map: one int64 per chunk, `chunk_index << 32 | tensor_index`; the longest chunks first.

    Programs take entries in a stride, so this order spreads long chunks evenly over programs, and short chunks come
    last. Tensors without elements get no entry.
    """
    lengths = np.asarray(numels, dtype=np.int64)
    whole, rest = np.divmod(lengths, chunk)
    tensor = np.repeat(np.arange(len(lengths), dtype=np.int64), whole)
    index = np.arange(len(tensor), dtype=np.int64) - np.repeat(np.cumsum(whole) - whole, whole)
    order = np.argsort(-rest, kind="stable")[: np.count_nonzero(rest)]  # only the short chunks: they are few
    return np.concatenate([(index << CHUNK_SHIFT) | tensor, (whole[order] << CHUNK_SHIFT) | order])


@dataclass(eq=False)
class Table:
    """Addresses, lengths and block map of some rows, on the device; see the module's docstring.

    Args:
        addresses: int64 [n_lists * n_tensors], list by list.
        sent: the columns that were sent to `addresses` last.
        numels, blocks: int64 [n_tensors] and [n_blocks], the block map.
        chunk: elements per chunk.
        config, n_programs: launch parameters of the kernel, and the size of its grid.
        owner: for a table of one list: the table of a step whose second column it reads, so that gradients, which the
            step reads after their norm, are sent once.
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
    owner: "Table | None" = None

    def launch(self, kernel: Any, *arguments: Any, enable_fp_fusion: bool = False, **constants: Any) -> None:
        """Launch a kernel that walks the table; it gets the arguments that all such kernels share, then `arguments`.

        With `enable_fp_fusion` a product and a sum may become one instruction that rounds once, unlike on the CPU.
        """
        config = self.config
        with on_device(self.device):
            kernel[(self.n_programs,)](
                self.addresses,
                self.numels,
                self.blocks,
                self.n_blocks,
                self.chunk // config.block,
                *arguments,
                BLOCK=config.block,
                num_warps=config.num_warps,
                enable_fp_fusion=enable_fp_fusion,
                **constants,
            )

    def refresh(self, columns: list[list[int]]) -> None:
        """Send the addresses that differ from the device's, if any do.

        One copy sends the columns from the first that differs to the last: most often only the gradients.
        """
        if self.owner is not None:
            parameters, _, *others = self.owner.sent
            self.owner.refresh([parameters, *columns, *others])
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
    """Return the table for these parallel lists, all on one device, whose tensors all have elements.

    The thread's table for equal lengths, dtypes, config, alignment (from `groups`), device and stream is reused, and
    then holds the addresses of these lists: launch the kernels that need its earlier addresses first. Never waits for
    the device. While a graph is being captured the table is new.
    """
    device = lists[0][0].device
    with on_device(device):
        if is_capturing(device):
            return made_table(lists, config)
        columns = list(map(addresses_of, lists))
        dtypes = tuple([tensors[0].dtype for tensors in lists])
        # With the dtype, bytes determine the number of elements, and are quicker to read.
        key = (*place(device), config, dtypes, aligned, tuple(sizes_of(lists[0])))
        table = _per_thread.tables.get(key)
        if table is None:
            if len(_per_thread.tables) >= MOST_TABLES:
                _per_thread.tables.clear()
            table = _per_thread.tables[key] = made_table(lists, config)
        else:
            table.refresh(columns)
        return table


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.tables: dict[tuple, Table] = {}


_per_thread = _PerThread()


def step_table(lists: Sequence[Sequence[Tensor]], config: Config) -> Table:
    """Return a table of a step cache's own: parameters, gradients, and more.

    One of the thread's shared tables would be sent again for each parameter group of equal shapes. The thread's tables
    of one list with the gradients' dtype and sizes read this table's second column from now on, until another step's
    table takes its place: gradients that moved are sent once.
    """
    device = lists[0][0].device
    with on_device(device):
        table = made_table(lists, config)
        if not is_capturing(device):
            n, gradients = table.n_tensors, (*place(device), (lists[1][0].dtype,), tuple(sizes_of(lists[1])))
            for (*where, _, dtypes, _, sizes), other in _per_thread.tables.items():
                if (*where, dtypes, sizes) == gradients:
                    other.owner, other.addresses = table, table.addresses[n : 2 * n]
        return table


@torch.inference_mode(False)
def made_table(lists: Sequence[Sequence[Tensor]], config: Config) -> Table:
    """Return a new table for these lists, sent in one copy.

    Made outside `torch.inference_mode`, because it outlives that mode and is written to outside it.
    """
    device = lists[0][0].device
    columns, numels = list(map(addresses_of, lists)), list(map(Tensor.numel, lists[0]))
    full = config.programs(device)
    chunk = chunk_length(sum(numels), config, full)
    blocks = block_map(numels, chunk)
    n, n_addresses = len(numels), len(columns) * len(numels)
    values = np.concatenate([np.array([*columns, numels], dtype=np.int64).ravel(), blocks])
    memory = torch.empty(len(values), dtype=torch.int64, device=device)
    if device.type == "cuda" and not is_capturing(device):
        graph_memory.reserve(CAPTURED_TABLES * len(values))
    send(values, memory)
    return Table(
        device=device,
        addresses=memory[:n_addresses],
        sent=columns,
        numels=memory[n_addresses : n_addresses + n],
        blocks=memory[n_addresses + n :],
        n_tensors=n,
        n_blocks=len(blocks),
        chunk=chunk,
        config=config,
        n_programs=min(full, len(blocks)),
    )


def send(values: np.ndarray, destination: Tensor) -> None:
    """Copy int64 values into a vector, in stream order, without waiting for the device.

    While a graph is being captured the copy is a node of the graph, and the host memory is never freed.
    """
    capturing = is_capturing(destination.device)
    if destination.is_cpu and not capturing:  # the interpreter's tables
        destination.copy_(torch.from_numpy(values))
        return
    pinned = graph_memory.take(len(values)) if capturing else pinned_words(len(values))
    pinned.numpy()[:] = values
    destination.copy_(pinned, non_blocking=True)


def pinned_words(n: int) -> Tensor:
    """Return `n` int64 words of pinned host memory, whatever the default device is."""
    return torch.empty(n, dtype=torch.int64, device="cpu", pin_memory=True)


class GraphMemory:
    """Pinned memory that CUDA graphs read at every replay: each word is given out once and never freed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._free = torch.empty(0, dtype=torch.int64, device="cpu")
        self._taken: list[Tensor] = []

    def reserve(self, n: int) -> None:
        """Allocate so that `n` words are free, and a capture that takes them allocates nothing."""
        with self._lock:
            if len(self._free) < n:
                self._free = pinned_words(max(n, GRAPH_WORDS))

    def take(self, n: int) -> Tensor:
        """`n` words that no other call gets."""
        with self._lock:
            self.reserve(n)
            words, self._free = self._free.split((n, len(self._free) - n))
            self._taken.append(words)
            return words


graph_memory = GraphMemory()


@triton.jit
def chunk_bounds(
    addresses, numels, blocks, b, blocks_per_chunk, DTYPE: tl.constexpr, ITEMSIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Pointer to a chunk's start on a 16-byte boundary, and the half-open range of it that is in the tensor."""
    entry = tl.load(blocks + b)
    tensor = entry & 0xFFFFFFFF
    chunk = entry >> 32
    address = tl.load(addresses + tensor)
    numel = tl.load(numels + tensor)
    skew = (address & 15) // ITEMSIZE
    base = chunk * blocks_per_chunk * BLOCK
    pointer = tl.multiple_of((address - (address & 15)).to(tl.pointer_type(DTYPE)), 16) + base
    length = (blocks_per_chunk * BLOCK).to(tl.int64)
    is_last = base + length >= numel
    low = tl.where(chunk == 0, skew, 0).to(tl.int32)
    high = tl.where(is_last, numel + skew - base, length).to(tl.int32)
    return pointer, low, high


@triton.jit
def chunk_extent(numels, entry, blocks_per_chunk, BLOCK: tl.constexpr):
    """For an entry of the block map: index of the tensor, the chunk's first element, the chunk's length."""
    tensor = entry & 0xFFFFFFFF
    base = (entry >> 32) * blocks_per_chunk * BLOCK
    length = tl.minimum(tl.load(numels + tensor) - base, (blocks_per_chunk * BLOCK).to(tl.int64)).to(tl.int32)
    return tensor, base, length


@triton.jit
def list_pointer(addresses, n_tensors, tensor, base, COLUMN: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to element `base` of a tensor in the list at `COLUMN` of the address table."""
    pointer = tl.load(addresses + COLUMN * n_tensors + tensor).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + base


@triton.jit
def load_block(p, o, mask, ACC: tl.constexpr, MASKED: tl.constexpr):
    """Elements at offsets `o`, widened; lanes outside the mask read 0."""
    if MASKED:
        return tl.load(p + o, mask=mask, other=0.0).to(ACC)
    else:
        return tl.load(p + o).to(ACC)


@triton.jit
def store_block(p, o, x, mask, MASKED: tl.constexpr):
    """Store elements at offsets `o`, rounded to the pointer's type: float64 to 16 bits through float32, as PyTorch."""
    if x.dtype == tl.float64 and p.dtype.element_ty.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    y = x.to(p.dtype.element_ty)
    if MASKED:
        tl.store(p + o, y, mask=mask)
    else:
        tl.store(p + o, y)
