"""Launch parameters of kernels (`Config`), and the device, stream and thread that a launch belongs to.

Each kernel's module has its own parameters, chosen by the compiler's reports for sm_80, sm_90 and sm_100: 128-bit
accesses, no spills, and from sm_90 on all programs of a grid resident together. `tests/kernels/aot_check.py` asserts
this; `benchmarks/gpu.sh` compares them with others on a device.
"""

import contextlib
import math
import threading
from dataclasses import dataclass

import torch

REGISTERS, WARPS = 65536, 64  # of a multiprocessor, sm_80 to sm_100
INTERPRETED_MULTIPROCESSORS = 2  # of the interpreter: few, so that tests cross from program to program
_NO_SWITCH = contextlib.nullcontext()
CURRENT_CUDA = torch.device("cuda")  # without an index: the current device of the thread


def resident_programs(registers: int, num_warps: int) -> int:
    """Return how many programs of a kernel a multiprocessor holds together; registers are per thread, allocated in
    eights.

    In a larger persistent grid some programs would wait until others have finished their whole share.
    """
    allocated = math.ceil(registers / 8) * 8
    return min(REGISTERS // (allocated * 32 * num_warps), WARPS // num_warps)


@dataclass(frozen=True, eq=False)
class Config:
    """Launch parameters of one kernel. Compared by identity, because every launch uses it in a cache key.

    Args:
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
    """Streaming multiprocessors of a CUDA device; for the interpreter, `INTERPRETED_MULTIPROCESSORS`."""
    if device.type == "cpu":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Make `device` current while launching: Triton launches on the current device, not on the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NO_SWITCH
    return torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Whether work launched on this device now goes into a CUDA graph; torch supports only the current device."""
    if device.type != "cuda":
        return False
    if device.index is None:
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    with on_device(device):
        return torch.cuda.is_current_stream_capturing()


def place(device: torch.device) -> tuple[torch.device, int, int]:
    """Return the device, its current stream, and the thread, to which a table of addresses belongs."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return device, stream, threading.get_ident()
