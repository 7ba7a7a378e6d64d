"""Stochastic rounding to bfloat16 and 16-bit remainders in the optimizers' kernels.

`ampkit_kernels.rounding` defines the formats and computes the same bits in PyTorch; read it first. The functions here
have its names where they compute the same.
"""

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """Return the finalizer of MurmurHash3, on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def advance_streams(addresses, n, tensors, mask, COLUMN: tl.constexpr):
    """Advance the streams of these tensors by one step."""
    address = tl.load(addresses + COLUMN * n + tensors, mask=mask, other=0)
    stream = address.to(tl.pointer_type(tl.int64))
    tl.store(stream, tl.load(stream, mask=mask, other=0) - 0x61C8864680B583EB, mask=mask)


@triton.jit
def stream_keys(addresses, n, tensor, base, COLUMN: tl.constexpr):
    """Return the number of a chunk's first element, and its tensor's three keys in this step."""
    stream = tl.load(tl.load(addresses + COLUMN * n + tensor).to(tl.pointer_type(tl.int64)))
    low, high = stream.to(tl.uint32), (stream >> 32).to(tl.uint32)
    key0 = mix(low ^ mix(high))
    key1 = mix(high ^ key0)
    return base.to(tl.uint32), key0, key1, mix(low ^ key1)


@triton.jit
def random_bits(keys, o, SECOND: tl.constexpr):
    """Two numbers from 0 to 65,535 for each element at offsets `o` of a chunk: the first two or the second two."""
    first, key0, key1, key2 = keys
    word = mix(mix((first + o.to(tl.uint32)) ^ key0) ^ (key2 if SECOND else key1))
    return (word & 0xFFFF).to(tl.int32), (word >> 16).to(tl.int32)


@triton.jit
def rounded(x, bits):
    """float32 values rounded to bfloat16 numbers, still in float32: the pattern plus `bits`, its lower half cut off."""
    pattern = x.to(tl.int32, bitcast=True)
    magnitude = pattern & 0x7FFFFFFF
    up = tl.where(magnitude >= 0x7F7F0000, 0x8000, bits)
    cut = ((pattern + up) & -65536).to(tl.float32, bitcast=True)
    return tl.where(magnitude > 0x7F800000, x, cut)


@triton.jit
def rounded_for(p, x, bits):
    """Values to store through a pointer: rounded by `bits` where the pointer's type is bfloat16."""
    if p.dtype.element_ty == tl.bfloat16:
        return rounded(x.to(tl.float32), bits)
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
