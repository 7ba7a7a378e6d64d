"""float32 results kept in bfloat16: rounded at random, or exactly, with the 16 bits that bfloat16 cuts off beside it.

bfloat16 is the upper half of a float32 pattern. Rounding to nearest loses an update below half its spacing, which is
1/512 to 1/256 of a weight, every time. Two ways not to lose it:

*Stochastic rounding* adds a number from 0 to 65,535 to the pattern and cuts the lower half off. A value goes up with
probability `lower half / 65536`, so that the mean of many roundings is the value itself, exactly; a value of bfloat16
stays. Beyond the largest finite number, where one neighbor is inf, values are rounded to nearest: none becomes inf that
float32's own conversion would not make inf. inf and NaN stay.

*Remainders* round to nearest, ties away from 0 (adding 0x8000 to the pattern), and keep what was cut off as a signed
int16: `pattern = (weight << 16) + remainder`, for every float32 but a NaN, whose remainder is 0. With ties to even the
two would not determine the pattern: a remainder of 0x8000 has two signs. So a weight differs from `master.bfloat16()`
at every other tie: one pattern in 131,072. 0 with a negative remainder, which only a write to the weight can leave,
counts as 0. Tensors hold these 16 bits as float16, which no weight beside them is: gloo and NCCL have no collectives of
int16, and a remainder that `torch.optim` has converted to the weight's dtype can be told from one that it has not.

Random numbers are a function of a *stream*, one int64 element per parameter, and the element's number in memory. Every
step that is not skipped adds an odd constant to the stream. Its halves, mixed, are keys of a 32-bit mixing function
(the finalizer of MurmurHash3) that is applied twice to the number: `mix(mix(number ^ key0) ^ key1)` gives 16 bits for
the weight and 16 for its first moment, another last key those for the second moment and its maximum. Elements 2**32
apart in one tensor share theirs. Nothing else goes in: a rerun, a resumed run, a replayed CUDA graph and every
replica of a weight round alike. For the time of a step, an optimizer adds the number of a DTensor's shard to the upper
half of the stream. All of it is done with integers, so a kernel and these functions give the same bits.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

STEP = 0x9E3779B97F4A7C15 - 2**64   # of a stream: 2**64 over the golden ratio, as a signed number
HALF = 0x8000
REMAINDER = torch.float16            # the dtype of tensors that hold remainders
_UINT32 = 2**32 - 1


def stream(seed: int, number: int, device: torch.device) -> Tensor:
    """The stream of parameter `number` of an optimizer: one int64 element."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return torch.full((), int.from_bytes(digest, "big", signed=True), dtype=torch.int64, device=device)


def element_numbers(like: Tensor, strides: Sequence[int], first: int = 0) -> Tensor:
    """The number in memory of every element of `like`, which begins with `first`; `strides` are `dense_strides`."""
    numbers = torch.full((), first, dtype=torch.int64, device=like.device)
    for size, stride in zip(like.shape, strides, strict=True):
        numbers = numbers.unsqueeze(-1) + torch.arange(size, device=like.device) * stride
    return numbers


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor; of one with gaps or repetitions, those of a dense copy."""
    return torch.empty_like(tensor, device="meta").stride()


def random_bits(stream: Tensor, like: Tensor, numbers: Tensor | None = None) -> list[Tensor]:
    """Four numbers from 0 to 65,535 for every element of `like`: int64 tensors of its shape.

    Args: numbers: those of the elements, of a `like` that is a part of a parameter.
    """
    low, high = stream & _UINT32, (stream >> 32) & _UINT32
    key0 = _mix(low ^ _mix(high))
    key1 = _mix(high ^ key0)
    key2 = _mix(low ^ key1)
    numbers = element_numbers(like, dense_strides(like)) if numbers is None else numbers
    inner = _mix((numbers & _UINT32) ^ key0)
    first, second = _mix(inner ^ key1), _mix(inner ^ key2)
    return [first & 0xFFFF, first >> 16, second & 0xFFFF, second >> 16]


def _mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _UINT32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _UINT32
    return x ^ (x >> 16)


def rounded(x: Tensor, bits: Tensor | int) -> Tensor:
    """float32 values as numbers of bfloat16, still in float32: the lower half of each pattern plus `bits`, cut off."""
    pattern = x.view(torch.int32)
    magnitude = pattern & 0x7FFFFFFF
    up = torch.where(magnitude >= 0x7F7F0000, HALF, bits).to(torch.int32)
    cut = ((pattern + up) & -65536).view(torch.float32)
    return torch.where(magnitude > 0x7F800000, x, cut)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 weight of a float32 master, and the remainder, as float16."""
    weight = rounded(master, HALF)
    return weight.bfloat16(), (master.view(torch.int32) - weight.view(torch.int32)).to(torch.int16).view(REMAINDER)


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of a bfloat16 weight and its remainder."""
    remainder = remainder.view(torch.int16)
    remainder = torch.where(weight == 0, remainder.clamp(min=0), remainder)
    return (weight.float().view(torch.int32) + remainder).view(torch.float32)
