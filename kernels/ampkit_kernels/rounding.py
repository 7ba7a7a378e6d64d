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
Every step that is not skipped adds an odd constant to the stream. Its mixed halves are keys of a 32-bit mixing function
(the finalizer of MurmurHash3) that is applied twice to the number: `mix(mix(number ^ key0) ^ key1)` gives 16 bits for
the weight and 16 for its first moment; with another last key it gives the bits for the second moment and its maximum.
Elements at a distance of 2**32 in one tensor share their bits. Nothing else is an input: a rerun, a resumed run, a
replayed CUDA graph and every replica of a weight round alike. During a step, an optimizer adds the number of a
DTensor's shard to the upper half of the stream.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

STEP = 0x9E3779B97F4A7C15 - 2**64  # added to a stream by a step: 2**64 over the golden ratio, as a signed number
HALF = 0x8000
REMAINDER = torch.float16  # the dtype of tensors that hold remainders
_UINT32 = 2**32 - 1
_FACTORS = 0x85EBCA6B, 0xC2B2AE35


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
    key0, key1, key2 = _keys(stream)
    numbers = element_numbers(like, dense_strides(like)) if numbers is None else numbers
    inner = _mix((numbers & _UINT32) ^ key0)
    first, second = _mix(inner ^ key1), _mix(inner ^ key2)
    return [first & 0xFFFF, first >> 16, second & 0xFFFF, second >> 16]


def _keys(stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = stream & _UINT32, (stream >> 32) & _UINT32
    key0 = _mix(low ^ _mix(high))
    key1 = _mix(high ^ key0)
    return key0, key1, _mix(low ^ key1)


def _mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * _FACTORS[0]) & _UINT32
    x = ((x ^ (x >> 13)) * _FACTORS[1]) & _UINT32
    return x ^ (x >> 16)


class RandomBits:
    """`random_bits` of the elements of CPU tensors in less time: in 32 bits, by NumPy, in memory that is used again.

    `_mix` is `_spread`, a middle part, `_spread`. After the first mix of a number the second `_spread` and the first
    one of the next mix cancel out, except for the key.
    """

    def __init__(self, streams: Sequence[Tensor], n: int) -> None:
        """Prepare for at most `n` elements at a time of parameters with these streams."""
        self._keys = _spread(torch.stack(_keys(torch.stack(list(streams)))).numpy().astype(np.uint32))
        self._numbers = _spread(np.arange(n, dtype=np.uint32))
        self._memory = np.empty((3, n), dtype=np.uint32)

    def draw(self, rows: Sequence[int], tensors: Sequence[Tensor], first: int = 0) -> Iterator[Tensor]:
        """Yield four int32 tensors of numbers for the elements of all tensors, each valid until the next is drawn.

        Args:
            rows: the tensors' places in the list of streams.
            tensors: parameters, or one piece of a parameter in the order of its memory.
            first: the number of a piece's first element: a multiple of a power of 2 that is at least its length.
        """
        sizes = [t.numel() for t in tensors]
        keys, (x, y, shifted) = self._keys[:, rows], self._memory[:, : sum(sizes)]
        if len(rows) == 1 and tensors[0].is_contiguous():
            numbers, keys = self._numbers[: sizes[0]], keys[:, 0]
            keys[0] ^= _spread(np.array(first & _UINT32, dtype=np.uint32))
        else:
            ends = np.cumsum(sizes)
            numbers = np.arange(ends[-1], dtype=np.uint32) - np.repeat((ends - sizes).astype(np.uint32), sizes)
            for t, end in zip(tensors, ends, strict=True):
                if not t.is_contiguous():
                    numbers[end - t.numel() : end] = element_numbers(t, dense_strides(t)).flatten().numpy()
            numbers, keys = _spread(numbers), [np.repeat(key, sizes) for key in keys]
        _mix_middle(np.bitwise_xor(numbers, keys[0], out=x), shifted)
        for key in keys[1:]:
            _mix_middle(np.bitwise_xor(x, key, out=y), shifted)
            np.right_shift(y, 16, out=shifted)
            np.bitwise_and(np.bitwise_xor(y, shifted, out=y), 0xFFFF, out=y)
            for bits in (y, shifted):
                yield torch.from_numpy(bits.view(np.int32))


def _spread(x: np.ndarray) -> np.ndarray:
    return x ^ (x >> np.uint32(16))


def _mix_middle(x: np.ndarray, shifted: np.ndarray) -> None:
    np.multiply(x, _FACTORS[0], out=x)
    np.bitwise_xor(x, np.right_shift(x, 13, out=shifted), out=x)
    np.multiply(x, _FACTORS[1], out=x)


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
