"""FP8 products: torch's product of two FP8 matrices, and the devices that compute it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from ampkit.torch_private import ScalingType, has_kernel, is_dtensor, is_traced, scaled_mm


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Compute ``(a * scale_a) @ (b * scale_b).T`` in `dtype`, of contiguous FP8 matrices a[m, k] and b[n, k].

    Scales are float32, of shape () or of shapes (m, 1) and (n, 1). With `fast`, tensor cores add in less precision.
    """
    if not (scale_a.dim() or scale_b.dim()):
        return _scaled(a, b, scale_a, scale_b, dtype, fast)
    if not fast or not _has_public(a):
        # With scales by rows, CUDA has no fast kernel without fast accumulation, and DTensors not every sharding.
        unit = torch.ones((), device=a.device)
        return (_scaled(a, b, unit, unit, torch.float32, fast) * scale_a * scale_b.t()).to(dtype)
    scale_a, scale_b = scale_a.expand(a.shape[0], 1).contiguous(), scale_b.expand(b.shape[0], 1).t().contiguous()
    return _scaled(a, b, scale_a, scale_b, torch.bfloat16, fast).to(dtype)


def _scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    if not _has_public(a):
        return scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=dtype, use_fast_accum=fast)
    kind = ScalingType.RowWise if scale_a.dim() else ScalingType.TensorWise
    return functional.scaled_mm(a, b.t(), scale_a, kind, scale_b, kind, output_dtype=dtype, use_fast_accum=fast)


@functools.cache
def _public_on_cpu() -> bool:
    return has_kernel("aten::_scaled_mm_v2", "CPU")


def _has_public(a: Tensor) -> bool:
    """Whether torch's public function takes this matrix: it refuses DTensors, and in torch 2.11 those on the CPU."""
    return not is_dtensor(a) and (a.device.type != "cpu" or _public_on_cpu())


def _wide_product(a: Tensor, b: Tensor, scale_a: Any, *rest: Any, **options: Any) -> Tensor:
    """Return the result of torch's operators, in the dtype of `a`. `aten::_scaled_mm_v2` takes lists of scales."""
    if isinstance(scale_a, list | tuple):
        scale_a, scale_b = scale_a[0], rest[2][0]
    else:
        scale_b = rest[0]
    return (a * scale_a) @ (b * scale_b)


# For operands in other dtypes than FP8, in reference computations.
WIDE_PRODUCTS = {"aten::_scaled_mm": _wide_product, "aten::_scaled_mm_v2": _wide_product}


def lacks_float8(device: torch.device) -> str:
    """Why a device does not compute FP8 products; "" if it does. On the CPU torch emulates them.

    A CUDA device on a machine without CUDA occurs in a program that is traced for another machine.
    """
    if device.type == "cpu" or (device.type == "cuda" and not torch.cuda.is_available()):
        return ""
    if device.type != "cuda":
        return f"no FP8 on {device.type}"
    return _lacks_float8(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _lacks_float8(index: int) -> str:
    if torch.version.hip is not None:
        return "FP8 on ROCm has not been verified"
    capability = torch.cuda.get_device_capability(index)
    is_below = capability < (8, 9)
    return f"no FP8: compute capability {capability[0]}.{capability[1]}, below 8.9" if is_below else ""


def is_eager(tensor: Tensor) -> bool:
    """Return whether operators on this tensor run eagerly: it is plain, and nothing traces or fakes operators."""
    return type(tensor) in (Tensor, Parameter) and not is_traced()
