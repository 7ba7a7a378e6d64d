"""How a kernel is declared: `triton.jit`, compiled once per set of constants."""

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


def entry(function: Callable[..., None]) -> Any:
    """Compile one variant per set of `tl.constexpr` arguments, whatever the run-time arguments are.

    Triton would otherwise look at every integer and address for divisibility by 16 and compile another variant for
    each pattern: host time in every call, and a compilation in the middle of a CUDA graph capture, where loading code
    is not allowed. Nothing is lost: the kernels state the alignment that wide accesses need (`tl.multiple_of`).
    """
    parameters = inspect.signature(function).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.annotation is not tl.constexpr]
    return triton.jit(do_not_specialize=names)(function)
