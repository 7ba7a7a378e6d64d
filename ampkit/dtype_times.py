"""How fast a device computes in each dtype: a matrix product and a convolution, timed in this process.

`ampkit doctor` prints the times and the advice that follows from them; the demo trains in the dtype that they favor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Instructions that multiply in a 16-bit type, by their names in `torch.cpu.get_capabilities`.
CPU_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "avx10_2", "fp16_arith"),
}
# Compute capabilities from which an NVIDIA GPU multiplies in a 16-bit type on its tensor cores.
CUDA_CAPABILITIES = {torch.bfloat16: (8, 0), torch.float16: (7, 0)}
FASTER = 0.9  # of float32's time, from which a 16-bit type counts as faster
AS_FAST = 1.1  # of the time of the faster 16-bit type, up to which the other one counts as equally fast


@dataclass(frozen=True)
class DtypeTime:
    """The milliseconds of a matrix product and a convolution in one dtype.

    Attributes:
        dtype: The dtype of the operands.
        native: Whether the device has instructions for it; otherwise they are emulated. None where that is unknown.
        matmul_ms: Least time of a matrix product.
        convolution_ms: Least time of a convolution.
    """

    dtype: torch.dtype
    native: bool | None
    matmul_ms: float
    convolution_ms: float

    def times(self, other: DtypeTime) -> float:
        """This dtype's time as a multiple of another's, the geometric mean of product and convolution."""
        return math.sqrt(self.matmul_ms / other.matmul_ms * self.convolution_ms / other.convolution_ms)


def measure(device: torch.device, repeats: int = 9) -> list[DtypeTime]:
    """Time a matrix product and a convolution in each dtype; waits for the device.

    Args:
        device: The device to measure.
        repeats: Number of calls of each, taken in turns with the other dtypes; the least time counts.

    Returns:
        An entry for float32, bfloat16 and float16 each, in this order.
    """
    jobs = {dtype: list(_jobs(device, dtype)) for dtype in DTYPES}
    times: dict[tuple[torch.dtype, int], list[float]] = {}
    for turn in range(repeats + 1):
        for dtype, pair in jobs.items():
            for index, job in enumerate(pair):
                milliseconds = _timed(job, device)
                if turn:  # the first call warms up
                    times.setdefault((dtype, index), []).append(milliseconds)
    return [DtypeTime(dtype, is_native(device, dtype), min(times[dtype, 0]), min(times[dtype, 1])) for dtype in DTYPES]


def is_native(device: torch.device, dtype: torch.dtype) -> bool | None:
    """Whether a device has instructions that multiply in a dtype; None if that is unknown."""
    if dtype == torch.float32:
        return True
    if device.type == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name, False) for name in CPU_INSTRUCTIONS[dtype])
    if device.type == "cuda":
        is_rocm = torch.version.hip is not None
        return is_rocm or torch.cuda.get_device_capability(device) >= CUDA_CAPABILITIES[dtype]
    return None


def best_dtype(times: Sequence[DtypeTime]) -> torch.dtype:
    """The dtype to train in: the fastest, float32 unless a 16-bit type is faster, bfloat16 if both are alike."""
    single, bfloat16, float16 = times
    if min(bfloat16.times(single), float16.times(single)) > FASTER:
        return torch.float32
    return torch.bfloat16 if bfloat16.times(float16) <= AS_FAST else torch.float16


def advice(times: Sequence[DtypeTime]) -> str:
    """One sentence on which dtype to train in, with the ratios that speak for it."""
    single, bfloat16, float16 = times
    best = best_dtype(times)
    if best == torch.float32:
        ratios = f"bfloat16 takes {_ratio(bfloat16, single)} its time, float16 {_ratio(float16, single)}"
        return f"train in float32, no 16-bit dtype is faster here: {ratios}"
    if best == torch.float16:
        ratios = f"{_ratio(float16, single)} float32's time, and bfloat16 {_ratio(bfloat16, float16)} float16's"
        return f"train in float16 with a GradScaler: it takes {ratios}"
    if float16.times(bfloat16) <= AS_FAST:
        other = "float16, with a GradScaler, is as fast"
    else:
        emulated = "is emulated and " if float16.native is False else ""
        other = f"float16 {emulated}takes {_ratio(float16, bfloat16)} bfloat16's"
    return f"train in bfloat16: it takes {_ratio(bfloat16, single)} float32's time; {other}"


def _ratio(one: DtypeTime, other: DtypeTime) -> str:
    ratio = one.times(other)
    return f"{ratio:.2f} of" if ratio < 1 else f"{ratio:.1f} times" if ratio < 10 else f"{ratio:.0f} times"


def _jobs(device: torch.device, dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """A square matrix product and a 3x3 convolution, small on a CPU, where float16 may take 60 times as long."""
    size, batch, channels, side = (256, 4, 32, 28) if device.type == "cpu" else (4096, 32, 128, 56)
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    images = torch.randn(batch, channels, side, side, device=device).to(dtype)
    weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype)
    yield lambda: a @ b
    yield lambda: torch.nn.functional.conv2d(images, weight, padding=1)


def _timed(job: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call, including the wait for the device."""
    wait = (lambda: None) if device.type == "cpu" else lambda: torch.accelerator.synchronize(device)
    wait()
    start = time.perf_counter()
    job()
    wait()
    return 1e3 * (time.perf_counter() - start)
