"""How a kernel is launched: block length, warps, chunk length, programs per multiprocessor.

The values were chosen from what the compiler reports for sm_80, sm_90 and sm_100 (128-bit accesses, no
spills, and from sm_90 on all programs of a grid resident at once, which the ahead-of-time check asserts);
`benchmarks/gpu.sh` compares them with others on a device.
"""

import contextlib
import threading
from dataclasses import dataclass

import torch

REGISTERS, WARPS = 65536, 64  # of a multiprocessor, sm_80 to sm_100
_NOTHING = contextlib.nullcontext()

# Stands in for a GPU's multiprocessors in the interpreter: few, so that tests cross from program to program.
INTERPRETED_MULTIPROCESSORS = 2


def resident_programs(registers: int, num_warps: int) -> int:
    """How many programs of a kernel a multiprocessor holds at once; registers are per thread, allocated in eights.

    In a larger persistent grid some programs would wait until others have finished their whole share.
    """
    each = -(-registers // 8) * 8 * 32 * num_warps
    return min(REGISTERS // each, WARPS // num_warps)


@dataclass(frozen=True, eq=False)
class Config:
    """Launch parameters of one kernel. Compared by identity, because every launch uses it in a cache key.

    block: elements that a program handles at a time; a power of two, at least 16.
    num_warps: warps per program.
    chunk: most elements of one tensor that form a unit of work; a multiple of `block`.
    programs_per_multiprocessor: size of the persistent grid.
    """

    block: int
    num_warps: int = 8
    chunk: int = 65536
    programs_per_multiprocessor: int = 4

    def programs(self, device: torch.device) -> int:
        """Programs of a full persistent grid on this device."""
        return multiprocessors(device) * self.programs_per_multiprocessor


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a small stand-in for the interpreter."""
    if device.type == "cpu":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Make `device` current while launching: Triton launches on the current device, not on the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on this device now goes into a CUDA graph; torch only answers for the current device."""
    if device.type != "cuda":
        return False
    with on_device(device):
        return torch.cuda.is_current_stream_capturing()


def place(device: torch.device) -> tuple[torch.device, int, int]:
    """Device, its current stream, and thread: what a table belongs to."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return device, stream, threading.get_ident()
