"""The operations as Triton kernels: the only modules of this package that import Triton.

Each launcher has the arguments of the function of the same name in `reference`, and takes lists of strided float
tensors on one device, unchecked. Rows that no kernel can address as flat memory go to `reference`. `inverse_scale`,
`norm_and_clip_factor`, `update_scale_` and `tally_update_` save a scaler the launches that PyTorch needs for single
numbers; on the CPU there are none to save, so `reference` has no counterparts.
"""

from .adamw import adamw_
from .float8_quantize import quantize
from .norm import KERNEL_NORMS, norm_and_check, norm_and_clip_factor
from .scale import inverse_scale, tally_update_, update_scale_
from .sgd import sgd_
from .unscale import multiply_, unscale_
from .unscale_into import cast_, unscale_into_

__all__ = [
    "KERNEL_NORMS", "adamw_", "cast_", "inverse_scale", "multiply_", "norm_and_check",
    "norm_and_clip_factor", "quantize", "sgd_", "tally_update_", "unscale_", "unscale_into_", "update_scale_",
]
