"""Stochastic rounding to bfloat16 and 16-bit remainders in the optimizers' kernels.

`ampkit_kernels.rounding` defines the formats and computes the same bits in PyTorch; read it first. The functions here
have its names where they compute the same.
"""

import triton
import triton.language as tl


@triton.jit
def middle(x):
    """Return the finalizer of MurmurHash3 on uint32 without its first and last step."""
    x = x * 0x85EBCA6B
    return (x ^ (x >> 13)) * 0xC2B2AE35


@triton.jit
def mix(x):
    """Return the finalizer of MurmurHash3, on uint32."""
    x = middle(x ^ (x >> 16))
    return x ^ (x >> 16)


@triton.jit
def advance_streams(addresses, n, tensors, mask, COLUMN: tl.constexpr):
    """Advance the streams of these tensors by one step."""
    address = tl.load(addresses + COLUMN * n + tensors, mask=mask, other=0)
    stream = address.to(tl.pointer_type(tl.int64))
    tl.store(stream, tl.load(stream, mask=mask, other=0) - 0x61C8864680B583EB, mask=mask)


@triton.jit
def number_and_key(addresses, n, tensor, base, COLUMN: tl.constexpr):
    """Return the number of a chunk's first element within its block of 2**17, and the block's key in this step."""
    stream = tl.load(tl.load(addresses + COLUMN * n + tensor).to(tl.pointer_type(tl.int64)))
    number = base.to(tl.uint32)
    key = mix(mix(mix(number >> 17) ^ stream.to(tl.uint32)) ^ (stream >> 32).to(tl.uint32))
    return number & 0x1FFFF, key


@triton.jit
def random_word(number_and_key, o):
    """Return the random uint32 of each element at offsets `o` of a chunk."""
    number, key = number_and_key
    word = mix(number + o.to(tl.uint32)) ^ key
    return middle(word ^ (word >> 16))


@triton.jit
def rounded(x, bits):
    """float32 values rounded to bfloat16 numbers, still in float32: the pattern plus `bits`, its lower half cut off."""
    pattern = x.to(tl.int32, bitcast=True)
    magnitude = pattern & 0x7FFFFFFF
    up = tl.where(magnitude >= 0x7F7F0000, 0x8000, bits)
    cut = ((pattern + up) & -65536).to(tl.float32, bitcast=True)
    return tl.where(magnitude > 0x7F800000, x, cut)


@triton.jit
def rounded_for(p, x, word, MULTIPLIER: tl.constexpr):
    """Values to store through a pointer: if its type is bfloat16, rounded by the upper half of `word * MULTIPLIER`."""
    if p.dtype.element_ty == tl.bfloat16:
        return rounded(x.to(tl.float32), ((word * MULTIPLIER) >> 16).to(tl.int32))
    else:
        return x


@triton.jit
def joined(weight, remainder):
    """Return float32 masters from weights, converted to float32, and remainders, converted to int32."""
    remainder = tl.where(weight == 0.0, tl.maximum(remainder, 0), remainder)
    return (weight.to(tl.int32, bitcast=True) + remainder).to(tl.float32, bitcast=True)


@triton.jit
def split(master):
    """Return the weights (rounded, still in float32) and the remainders (int32) of float32 masters."""
    weight = rounded(master, 0x8000)
    return weight, master.to(tl.int32, bitcast=True) - weight.to(tl.int32, bitcast=True)
