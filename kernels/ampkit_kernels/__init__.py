"""Multi-tensor operations for mixed precision: one launch where PyTorch makes many, without host synchronization.

Every function takes lists of tensors on one device, device scalars as one-element float32 tensors, and a
keyword `impl`: `"auto"` (Triton on CUDA devices that can run it, PyTorch elsewhere), `"triton"` (raises
`TritonUnavailable` with the reason if it cannot run) or `"reference"` (PyTorch). Lists may be empty.
Importing this package does not import Triton. Names outside `__all__` save `ampkit` host time.

The modules, in reading order:

    api             the public functions: contract, validation, choice of the implementation
    tensor_lists    validation: which tensors a list may hold, and the views that kernels take
    implementation  the choice: Triton or PyTorch for a device, and why
    reference       every function in PyTorch: the CPU path, and the reference for the kernels
    rounding        bfloat16 weights that lose no updates: formats, and the arithmetic in PyTorch
    float8_scaling  FP8: formats, and `quantize` in PyTorch
    triton_ops      every function as Triton kernels; its docstring has the map
    step_cache      the launches of an optimizer's step, kept for the next step
    configs         block lengths and grids of kernels; which device, stream and thread a launch belongs to
"""

from . import reference, rounding
from .api import (
    adamw_,
    cast_,
    inverse_scale,
    multiply_,
    norm_and_check,
    norm_and_clip_factor,
    quantize,
    sgd_,
    unscale_,
    unscale_into_,
)
from .configs import CURRENT_CUDA as CURRENT_CUDA
from .configs import is_capturing as is_capturing
from .float8_scaling import Quantized, Scaling
from .implementation import IMPLS as IMPLS
from .implementation import TritonUnavailable, uses_triton, why_not_triton
from .step_cache import StepCache as StepCache
from .tensor_lists import FlatList as FlatList
from .tensor_lists import check_parallel as check_parallel

__all__ = [
    "Quantized",
    "Scaling",
    "TritonUnavailable",
    "adamw_",
    "cast_",
    "inverse_scale",
    "multiply_",
    "norm_and_check",
    "norm_and_clip_factor",
    "quantize",
    "reference",
    "rounding",
    "sgd_",
    "unscale_",
    "unscale_into_",
    "uses_triton",
    "why_not_triton",
]
