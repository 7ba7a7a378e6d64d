"""How an optimizer's hyperparameters reach its kernel: one row of coefficients per tensor, written on the device.

A small kernel per optimizer (`prepare_kernel`) computes the rows in float64, from kernel arguments and from optional
device scalars: a learning rate, factors on the gradient, `found_inf`.
"""

from typing import Any

import torch
from torch import Tensor

from .launch import on_device

_BLOCK = 128


def prepare(
    kernel: Any,
    device: torch.device,
    n: int,
    coefficients: Tensor,
    lr: float | Tensor,
    multiplier: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    **arguments: Any,
) -> None:
    """Launch a `prepare_kernel` for `n` rows of coefficients, with the arguments that all of them share, and others.

    The pointer of a scalar that is absent is not read.
    """
    lr_is_tensor = isinstance(lr, Tensor)
    with on_device(device):
        kernel[(-(-n // _BLOCK),)](
            coefficients_ptr=coefficients, n=n,
            lr_ptr=lr if lr_is_tensor else coefficients, lr=0.0 if lr_is_tensor else lr, HAS_LR=lr_is_tensor,
            multiplier_ptr=coefficients if multiplier is None else multiplier, HAS_MULTIPLIER=multiplier is not None,
            grad_scale_ptr=coefficients if grad_scale is None else grad_scale, HAS_GRAD_SCALE=grad_scale is not None,
            found_inf_ptr=coefficients if found_inf is None else found_inf, HAS_FOUND_INF=found_inf is not None,
            **arguments, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )
