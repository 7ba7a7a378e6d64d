"""bfloat16 weights that lose no updates: stochastic rounding, and remainders that make a weight float32 again.

This module defines both formats and computes them in PyTorch. `triton_ops/device_rounding` computes the same bits in
kernels; both use only integers.

bfloat16 is the upper half of a float32 pattern. Rounding to nearest loses every update below half its spacing, which is
1/512 to 1/256 of a weight. Two ways not to lose it:

*Stochastic rounding* adds a number from 0 to 65,535 to the pattern and cuts the lower half off. A value goes up with
probability `lower half / 65536`, so that the mean of many roundings is exactly the value; a value that bfloat16 holds
is unchanged. Beyond the largest finite number, where one neighbor is inf, values are rounded to nearest: only values
that float32's own conversion turns into inf become inf. inf and NaN are unchanged.

*Remainders* round to nearest, ties away from 0 (adding 0x8000 to the pattern), and keep the difference as a signed
int16: `pattern = (weight << 16) + remainder`, for every float32 except NaN, whose remainder is 0. With ties to even the
two would not determine the pattern, because a remainder of 0x8000 would have two signs. So a weight differs from
`master.bfloat16()` at every other tie: one pattern in 131,072. A weight of 0 with a negative remainder, which only a
write to the weight can leave, counts as 0. Tensors hold these 16 bits as float16: gloo and NCCL have no collectives for
int16, and since the weights are bfloat16, the dtype shows whether `torch.optim` has converted a remainder to the
weight's dtype.

Random numbers are a function of a *stream*, one int64 element per parameter, and of the element's number in memory.
Every step that is not skipped adds an odd constant to the stream. The number's lower 17 bits are mixed by the finalizer
of MurmurHash3, a 32-bit function. The other bits and the two halves of the stream give a key. The mixed number XOR the
key goes through most of a second mix. The upper halves of this word's products with the powers of a multiplier are the
16-bit numbers for the weight, its first moment, its second moment and the maximum of that. The multiplier is good by
the spectral test (Steele and Vigna 2021), so for random words all pairs of these four numbers are nearly equally
frequent. Elements at a distance of 2**32 in one tensor share their bits. Nothing else is an input: a rerun, a resumed
run, a replayed CUDA graph and every replica of a weight round alike. During a step, an optimizer adds the number of a
DTensor's shard to the upper half of the stream.
"""

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

STEP = 0x9E3779B97F4A7C15 - 2**64  # added to a stream by a step: 2**64 over the golden ratio, as a signed number
HALF = 0x8000
REMAINDER = torch.float16  # the dtype of tensors that hold remainders
_UINT32 = 2**32 - 1
BLOCK = 1 << 17  # elements of a parameter that share a key
_FACTORS = 0x85EBCA6B, 0xC2B2AE35
_MULTIPLIERS = [pow(0xADB4A92D, power, 2**32) for power in range(4)]


def stream(seed: int, number: int, device: torch.device) -> Tensor:
    """Return the stream of parameter `number` of an optimizer: one int64 element."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return torch.full((), int.from_bytes(digest, "big", signed=True), dtype=torch.int64, device=device)


def element_numbers(like: Tensor, strides: Sequence[int], first: int = 0) -> Tensor:
    """Return the number in memory of every element of `like`, from `first` on, under `strides` (`dense_strides`)."""
    numbers = torch.full((), first, dtype=torch.int64, device=like.device)
    for size, stride in zip(like.shape, strides, strict=True):
        numbers = numbers.unsqueeze(-1) + torch.arange(size, device=like.device) * stride
    return numbers


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, or of its dense copy where it has gaps or repetitions."""
    return torch.empty_like(tensor, device="meta").stride()


def random_bits(stream: Tensor, like: Tensor, numbers: Tensor | None = None) -> list[Tensor]:
    """Four numbers from 0 to 65,535 for every element of `like`: int64 tensors of its shape.

    Args:
        stream: one int64 element.
        like: a tensor of the parameter's shape, or of a part of it.
        numbers: the elements' numbers in memory, for a part of a parameter. None: `like` is all of it.
    """
    numbers = (element_numbers(like, dense_strides(like)) if numbers is None else numbers) & _UINT32
    word = _middle(_spread(_mix(numbers % BLOCK) ^ _key(stream, numbers // BLOCK)))
    return [((word * multiplier) & _UINT32) >> 16 for multiplier in _MULTIPLIERS]


# These take a Python integer, an array or a tensor, of 64 bits.
def _key(stream: Any, block: Any) -> Any:
    return _mix(_mix(_mix(block) ^ (stream & _UINT32)) ^ ((stream >> 32) & _UINT32))


def _mix(x: Any) -> Any:
    return _spread(_middle(_spread(x)))


def _spread(x: Any) -> Any:
    return x ^ (x >> 16)


def _middle(x: Any) -> Any:
    x = (x * _FACTORS[0]) & _UINT32
    return ((x ^ (x >> 13)) * _FACTORS[1]) & _UINT32


@functools.cache
def _mixed_numbers() -> np.ndarray:
    return _spread(_mix(np.arange(BLOCK))).astype(np.uint32)


class RandomBits:
    """`random_bits` of the elements of CPU tensors in less time: in 32 bits, by NumPy, in memory that is used again."""

    def __init__(self, streams: Sequence[Tensor], n: int) -> None:
        """Prepare for at most `n` elements at a time of parameters with these streams."""
        values = torch.stack(list(streams))
        self._streams, self._first_keys = values.tolist(), _spread(_key(values, 0)).tolist()
        self._memory = np.empty((2, n), dtype=np.uint32)

    def draw(self, rows: Sequence[int], tensors: Sequence[Tensor], first: int = 0) -> Iterator[Tensor]:
        """Yield four int32 tensors of numbers for the elements of all tensors, each valid until the next is drawn.

        Args:
            rows: the tensors' places in the list of streams.
            tensors: parameters, or one piece of a parameter in the order of its memory.
            first: the number of a piece's first element.
        """
        mixed, n = _mixed_numbers(), 0
        for row, t in zip(rows, tensors, strict=True):
            end, last = n + t.numel(), first + t.numel()
            if not t.is_contiguous():
                numbers = element_numbers(t, dense_strides(t)).flatten().numpy()
                self._memory[0, n:end] = mixed[numbers % BLOCK] ^ _spread(_key(self._streams[row], numbers // BLOCK))
                n = end
            while n < end:
                number = last - end + n
                block, low = divmod(number & _UINT32, BLOCK)
                length = min(end - n, BLOCK - low)
                key = _spread(_key(self._streams[row], block)) if block else self._first_keys[row]
                np.bitwise_xor(mixed[low : low + length], key, out=self._memory[0, n : n + length])
                n += length
        word, bits = self._memory[:, :n]
        np.multiply(word, _FACTORS[0], out=word)
        np.bitwise_xor(word, np.right_shift(word, 13, out=bits), out=word)
        np.multiply(word, _FACTORS[1], out=word)
        for multiplier in _MULTIPLIERS:
            product = word if multiplier == 1 else np.multiply(word, multiplier, out=bits)
            yield torch.from_numpy(np.right_shift(product, 16, out=bits).view(np.int32))


def rounded(x: Tensor, bits: Tensor | int) -> Tensor:
    """float32 values rounded to bfloat16 numbers, still in float32: the pattern plus `bits`, its lower half cut off."""
    pattern = x.view(torch.int32)
    magnitude = pattern & 0x7FFFFFFF
    up = torch.where(magnitude >= 0x7F7F0000, HALF, bits).to(torch.int32)
    cut = ((pattern + up) & -65536).view(torch.float32)
    return torch.where(magnitude > 0x7F800000, x, cut)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 weight of a float32 master, and its remainder in a float16 tensor."""
    weight = rounded(master, HALF)
    return weight.bfloat16(), (master.view(torch.int32) - weight.view(torch.int32)).to(torch.int16).view(REMAINDER)


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the float32 master of a bfloat16 weight and its remainder."""
    remainder = remainder.view(torch.int16)
    remainder = torch.where(weight == 0, remainder.clamp(min=0), remainder)
    return (weight.float().view(torch.int32) + remainder).view(torch.float32)


def join_(weight: Tensor, remainder: Tensor) -> None:
    """Turn a float32 copy of CPU weights into masters in place, as `joined`."""
    pattern, signed = weight.view(torch.int32), remainder.view(torch.int16)
    pattern.add_(signed)
    if not _is_finite(weight.sum()):
        pattern.sub_(signed)
        weight.copy_(joined(weight, remainder))


def split_(master: Tensor, remainder: Tensor) -> None:
    """Make CPU masters numbers whose conversion to bfloat16 by torch is the weight of `split`; write the remainders."""
    pattern = master.view(torch.int32)
    if _is_finite(master.sum()):
        remainder.view(torch.int16).copy_(pattern)  # the lower half
        pattern.bitwise_or_(1)  # torch rounds ties to even; this makes them more than ties
    else:
        weight, exact = split(master)
        master.copy_(weight)
        remainder.view(torch.int16).copy_(exact.view(torch.int16))


def round_(x: Tensor, bits: Tensor) -> None:
    """Round CPU numbers in place, as `rounded`."""
    if _is_finite(x.dot(x)):  # no inf, no NaN, nothing near the largest number
        x.view(torch.int32).add_(bits).bitwise_and_(-65536)
    else:
        x.copy_(rounded(x, bits))


def _is_finite(number: Tensor) -> bool:
    return math.isfinite(number.numpy().item())
