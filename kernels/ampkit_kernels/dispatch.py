"""Which implementation handles a call, and why: Triton on a CUDA device that can run it, PyTorch elsewhere.

`impl="auto"` may choose; `"triton"` and `"reference"` are explicit requests, and one that cannot be met raises.
Triton is imported here at first use, never when the package is imported. On a device that the kernels support it must
also be able to compile, which is tried once: without a C compiler or a cache folder that can be written its first
launch raises, in images where PyTorch itself works.
"""

import functools
import importlib.util
import os
import textwrap
import warnings
from types import ModuleType

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import reference

IMPLS = ("auto", "triton", "reference")
MINIMUM_CAPABILITY = (8, 0)
HAS_TRITON = importlib.util.find_spec("triton") is not None


class TritonUnavailable(RuntimeError):
    """`impl="triton"` was asked for where it cannot run; the message says why."""


def interpreting() -> bool:
    """Whether Triton runs, or would run, in its interpreter: TRITON_INTERPRET as Triton itself reads it."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def why_not_triton(device: torch.device) -> str | None:
    """None where the Triton kernels can run on `device`, else a sentence with the reason.

    The first question about a CUDA device that they support compiles one of them. Nothing waits for the device.
    """
    # Compiled code asks while it is traced, and brings its own compiler.
    return _unsupported(device) or (None if device.type == "cpu" or is_compiling() else _fault(device))


def _unsupported(device: torch.device) -> str | None:
    """Why the kernels are not made for this device, or are not to run there."""
    if not HAS_TRITON:
        return "Triton is not installed: pip install 'triton>=3.6'"
    if device.type == "cpu":
        if interpreting():
            return None
        return (
            "the tensors are on the CPU: set TRITON_INTERPRET=1 before Triton is imported to interpret there"
        )
    if device.type != "cuda":
        return f"the tensors are on {device.type}; the kernels run on CUDA devices"
    if interpreting():
        return (
            "TRITON_INTERPRET is set: the interpreter copies its arguments to the host but not the memory "
            "that a pointer table names; unset TRITON_INTERPRET, or move the tensors to the CPU"
        )
    if torch.version.hip is not None:
        return "the kernels have not been verified on ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < MINIMUM_CAPABILITY:
        found, least = (".".join(map(str, numbers)) for numbers in (capability, MINIMUM_CAPABILITY))
        return f"{torch.cuda.get_device_name(device)} has compute capability {found}; the kernels need {least} or newer"
    return None


@functools.cache
def _fault(device: torch.device) -> str | None:
    """Why Triton cannot compile for this CUDA device; None where it can.

    Everything happens on the host, so a capture of the device may be going on.
    """
    try:
        from .triton_ops.scale import compile_one

        compile_one(device)
    except Exception as error:      # of the compiler, the linker, the file system, ptxas: each has its own
        said = textwrap.shorten(f"{type(error).__name__}: {error}", 400)
        return (
            f"Triton cannot compile here ({said}); it needs a C compiler, Python's headers, and a cache folder that it "
            "may write to: TRITON_CACHE_DIR names another"
        )
    return None


@functools.cache
def _warn_of(fault: str) -> None:
    warnings.warn(f"ampkit takes PyTorch's operators in place of its Triton kernels: {fault}", stacklevel=3)


def uses_triton(impl: str, device: torch.device) -> bool:
    """Whether a call with this `impl` on this device goes to Triton; raises when an explicit request cannot be met."""
    if impl == "auto":
        # The interpreter is for tests: "auto" never selects it.
        if device.type != "cuda":
            return False
        reason = why_not_triton(device)
        if reason is not None and _unsupported(device) is None:
            _warn_of(reason)
        return reason is None
    if impl == "triton":
        reason = why_not_triton(device)
        if reason:
            raise TritonUnavailable(f"impl='triton' cannot run here: {reason}")
        return True
    if impl == "reference":
        return False
    raise ValueError(f"unknown impl {impl!r}; expected 'auto', 'triton' or 'reference'")


def select(impl: str, device: torch.device) -> ModuleType:
    """The module whose functions compute on this device: `triton_ops` or `reference`, which have the same names."""
    if not uses_triton(impl, device):
        return reference
    from . import triton_ops

    return triton_ops


@functools.cache
def _backend(device: torch.device) -> ModuleType:
    return select("auto", device)


def backend(tensor: Tensor) -> ModuleType:
    """The module whose functions compute on this tensor's device: `triton_ops` where Triton runs, else `reference`.

    Both have `unscale_`, `norm_and_check`, `multiply_`, `cast_`, `unscale_into_` and `quantize`, with the
    arguments of the functions of this package's top level, without `impl`, and check none
    of them: the caller passes lists of strided float tensors on one device, and scalars of one float32 element there.
    The answer is cached by device. The first one for a CUDA device where Triton runs imports Triton.

    >>> import torch
    >>> backend(torch.ones(2)).__name__
    'ampkit_kernels.reference'
    """
    return reference if tensor.is_cpu else _backend(tensor.device)
