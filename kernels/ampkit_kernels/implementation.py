"""The choice between Triton and PyTorch for a device, and the reason: Triton on a CUDA device that can run it.

`impl="auto"` leaves the choice to this module; `"triton"` and `"reference"` are explicit requests, and an impossible
one raises. Triton is imported at its first use, never when the package is imported. Even on a supported device
Triton may be unable to compile: without a C compiler or a writable cache folder its first launch raises, in images
where PyTorch itself works. So one kernel is compiled before Triton is chosen.
"""

import functools
import importlib.util
import os
import textwrap
import warnings
from types import ModuleType

import torch
from torch.compiler import is_compiling

from . import reference

IMPLS = ("auto", "triton", "reference")
AUTO = ("cuda",)  # device types on which "auto" tries Triton; tests add "cpu", for the interpreter
MINIMUM_CAPABILITY = (8, 0)
HAS_TRITON = importlib.util.find_spec("triton") is not None


class TritonUnavailable(RuntimeError):
    """Raised for `impl="triton"` if Triton cannot run; the message has the reason."""


def interpreting() -> bool:
    """Whether Triton runs, or would run, in its interpreter: TRITON_INTERPRET as Triton itself reads it."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def why_not_triton(device: torch.device) -> str | None:
    """Say why the Triton kernels cannot run on a device.

    The first call for a supported CUDA device compiles one kernel; later calls look the answer up. Never synchronizes.

    Args:
        device: the device of the tensors. On a CPU the kernels run if TRITON_INTERPRET is set.

    Returns:
        A sentence with the reason, or None if the kernels can run.
    """
    # No trial inside torch.compile, which calls this while it traces and brings its own compiler.
    return _unsupported(device) or (None if device.type == "cpu" or is_compiling() else _problem(device))


def _unsupported(device: torch.device) -> str | None:
    """Why the kernels do not support this device or this environment; None if they do."""
    if not HAS_TRITON:
        return "Triton is not installed: pip install 'triton>=3.6'"
    if device.type == "cpu":
        if interpreting():
            return None
        return "the tensors are on the CPU: set TRITON_INTERPRET=1 before Triton is imported to run its interpreter"
    if device.type != "cuda":
        return f"the tensors are on {device.type}; the kernels run on CUDA devices"
    if interpreting():
        return (
            "TRITON_INTERPRET is set: the interpreter copies its arguments to the host but not the memory "
            "behind the addresses in a table; unset TRITON_INTERPRET, or move the tensors to the CPU"
        )
    if torch.version.hip is not None:
        return "the kernels have not been verified on ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < MINIMUM_CAPABILITY:
        own, least = (".".join(map(str, numbers)) for numbers in (capability, MINIMUM_CAPABILITY))
        return f"{torch.cuda.get_device_name(device)} has compute capability {own}; the kernels need {least} or newer"
    return None


@functools.cache
def _problem(device: torch.device) -> str | None:
    """Why Triton cannot compile for this CUDA device; None if it can.

    Uses only the host, so a CUDA graph may be captured at the same time.
    """
    try:
        from .triton_ops.unscale import compile_one

        compile_one(device)
    except Exception as error:  # the compiler, the linker, the file system and ptxas raise different types
        message = textwrap.shorten(f"{type(error).__name__}: {error}", 400)
        return (
            f"Triton cannot compile here ({message}); it needs a C compiler, Python's headers and a writable cache "
            "folder: set TRITON_CACHE_DIR to change the folder"
        )
    return None


@functools.cache
def _warn_of(problem: str) -> None:
    warnings.warn(f"ampkit uses PyTorch's operators instead of its Triton kernels: {problem}", stacklevel=4)


def uses_triton(impl: str, device: torch.device) -> bool:
    """Return whether a call with this `impl` on this device runs in Triton. Never synchronizes.

    Args:
        impl: "auto", "triton" or "reference".
        device: the device of the tensors.

    Raises:
        TritonUnavailable: `impl` is "triton", and Triton cannot run; the message has the reason.
        ValueError: `impl` is another string.

    >>> uses_triton("auto", torch.device("cpu"))
    False
    """
    if impl == "auto":
        # While code is traced no kernel is compiled on trial, so that answer is not kept.
        return device.type in AUTO and (_serves.__wrapped__(device) if is_compiling() else _serves(device))
    if impl == "triton":
        reason = why_not_triton(device)
        if reason:
            raise TritonUnavailable(f"impl='triton' cannot run here: {reason}")
        return True
    if impl == "reference":
        return False
    raise ValueError(f"unknown impl {impl!r}; expected 'auto', 'triton' or 'reference'")


@functools.cache
def _serves(device: torch.device) -> bool:
    """Whether "auto" selects Triton on a device; warns if Triton supports the device and cannot compile."""
    reason = why_not_triton(device)
    if reason is not None and _unsupported(device) is None:
        _warn_of(reason)
    return reason is None


def select(impl: str, device: torch.device) -> ModuleType:
    """Return the module whose functions compute: `triton_ops` or `reference`, with functions of the same names."""
    if not uses_triton(impl, device):
        return reference
    from . import triton_ops

    return triton_ops
