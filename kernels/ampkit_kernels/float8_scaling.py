"""FP8 matrices: their formats (`Scaling`, `Quantized`), and `quantize` in plain PyTorch, for `reference`.

`triton_ops/float8_quantize` has the kernels. A scale is ``largest / amax`` of its group, the whole matrix or one row,
so no finite value is beyond FP8's range. If the amax is infinite the scale is 0, and ``0 * inf`` is NaN: an overflow
remains visible, whereas a plain cast to e4m3 turns inf into 448.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Quantized", "Scaling", "quantize"]

SMALLEST_AMAX = 1e-12  # of a group, so that zeros remain zeros and no scale is infinite


class Scaling(NamedTuple):
    """How a matrix is converted to FP8. `str()` gives, for example, `row e4m3 2^n`.

    Args:
        rowwise: one scale for each row; otherwise one for the matrix.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        power_of_2: round scales down to powers of 2.
    """

    rowwise: bool
    dtype: torch.dtype
    power_of_2: bool

    def __str__(self) -> str:
        dtype = "e4m3" if self.dtype is torch.float8_e4m3fn else "e5m2"
        return f"{'row' if self.rowwise else 'tensor'} {dtype}{' 2^n' if self.power_of_2 else ''}"


class Quantized(NamedTuple):
    """A matrix in FP8: ``data / scale`` approximates its values.

    Args:
        data: FP8, of the matrix's shape.
        scale: float32, the factor that the matrix was multiplied by: of shape () or (rows, 1).
    """

    data: Tensor
    scale: Tensor


def quantize(
    x: Tensor, along_rows: Scaling | None, along_columns: Scaling | None
) -> tuple[Quantized | None, Quantized | None]:
    """See `ampkit_kernels.quantize`; equal scalings for the whole matrix give two views of the same memory."""
    if along_rows is not None and along_rows == along_columns and not along_rows.rowwise:
        both = _quantized(x, along_rows)
        return both, Quantized(both.data.t(), both.scale)
    return (
        None if along_rows is None else _quantized(x, along_rows),
        None if along_columns is None else _quantized(x.t(), along_columns),
    )


def _quantized(x: Tensor, scaling: Scaling) -> Quantized:
    amax = x.abs().amax(-1, keepdim=True) if scaling.rowwise else x.abs().amax()
    scale = scale_of(amax, scaling)
    return Quantized((x.float() * scale).to(scaling.dtype), scale)


def scale_of(amax: Tensor, scaling: Scaling) -> Tensor:
    """Return the float32 factor for a group with this amax: 0 for inf, NaN for NaN."""
    # In float64, since compiled code divides float32 with an error of an ulp or two.
    scale = (torch.finfo(scaling.dtype).max / amax.double().clamp(min=SMALLEST_AMAX)).float()
    if not scaling.power_of_2:
        return scale
    power = torch.exp2(torch.floor(torch.log2(scale)))  # not a bit mask, which DTensor computes wrongly
    return torch.where(power > scale, power * 0.5, power)  # log2 rounds up right below a power of 2
