"""Every operation of this package as Triton kernels: the only modules that import Triton.

A launcher, the Python function that launches kernels, has the arguments of the function of the same name in
`reference`. It takes lists of strided float tensors on one device and validates nothing. Rows that no kernel can
address as flat memory go to `reference`.

The modules, in reading order; functions under `@jit_kernel` are launched, those under `@triton.jit` are called in them:

    unscale           `unscale_`, `multiply_`: the simplest kernel; read it first. `inverse_scale`
    chunks            device side: where a program's next chunk of a list starts, how blocks are loaded and stored
    pointer_table     host side: the table on the device that lets one launch walk a list of tensors
    launch            how a kernel is declared, and how lists are sorted into launches
    norm              `norm_and_check`, `norm_and_clip_factor`
    unscale_into      `unscale_into_`, `cast_`
    device_rounding   the formats of `..rounding` in kernels
    optimizer_step    `adamw_` and `sgd_`: two rules of one kernel
    float8_quantize   `quantize`
"""

from .float8_quantize import quantize
from .norm import norm_and_check, norm_and_clip_factor
from .optimizer_step import adamw_, sgd_
from .unscale import inverse_scale, multiply_, unscale_
from .unscale_into import cast_, unscale_into_

__all__ = [
    "adamw_",
    "cast_",
    "inverse_scale",
    "multiply_",
    "norm_and_check",
    "norm_and_clip_factor",
    "quantize",
    "sgd_",
    "unscale_",
    "unscale_into_",
]
