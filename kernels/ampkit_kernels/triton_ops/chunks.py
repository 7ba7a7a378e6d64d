"""Device side of `pointer_table`: where a program's next chunk starts, and how its blocks are loaded and stored.

One list at any element-aligned address (`chunk_bounds`): a tensor is walked from its address rounded down
to 16 bytes, so that full blocks keep 128-bit accesses wherever a bucket view starts. `skew` elements of the
first block precede the tensor and are masked; the last chunk takes the `skew` elements that remain. Only blocks
at an end of the tensor are masked, because the compiler does not widen masked accesses.

Several lists walked together (`chunk_extent`, `list_pointer`): their skews may differ, so the launcher sorts rows
into those with every address on a 16-byte boundary, which get 128-bit accesses, and the others.
"""

import triton
import triton.language as tl


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
