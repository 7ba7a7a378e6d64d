"""Multi-tensor operations for mixed precision: one launch where PyTorch makes many, and no host sync.

Every function takes lists of tensors on one device, device scalars as one-element float32 tensors, and a
keyword `impl`: `"auto"` (Triton on CUDA devices that can run it, PyTorch elsewhere), `"triton"` (raises
`TritonUnavailable` with the reason where it cannot run) or `"reference"` (PyTorch). Lists may be empty.
Importing this package does not import Triton. Names outside `__all__` are what `ampkit` needs to save host time.
"""

from . import reference, rounding
from .api import adamw_, cast_, multiply_, norm_and_check, quantize, sgd_, unscale_, unscale_into_
from .configs import is_capturing as is_capturing
from .dispatch import IMPLS as IMPLS
from .dispatch import TritonUnavailable, backend, why_not_triton
from .dispatch import uses_triton as uses_triton
from .float8_scaling import Quantized, Scaling
from .step_cache import StepCache as StepCache
from .tensors import FlatList as FlatList

__all__ = [
    "Quantized",
    "Scaling",
    "TritonUnavailable",
    "adamw_",
    "backend",
    "cast_",
    "multiply_",
    "norm_and_check",
    "quantize",
    "reference",
    "rounding",
    "sgd_",
    "unscale_",
    "unscale_into_",
    "why_not_triton",
]
