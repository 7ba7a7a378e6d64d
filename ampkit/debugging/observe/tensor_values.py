"""The values of a tensor: its range, its inf and NaN, and a short description."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampkit.dtypes import dtype_name


def extremes(tensor: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value, in one pass over the tensor; both NaN if the tensor contains NaN."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    low, high = torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor)
    return low.item(), high.item()


def nonfinite_kinds(low: float, high: float) -> set[str]:
    """Return which of "nan", "inf" and "-inf" a tensor contains, given its smallest and its largest value."""
    contains = {"nan": low != low, "inf": high == math.inf, "-inf": low == -math.inf}
    return {name for name, present in contains.items() if present}


def largest_finite(values: Tensor) -> float:
    """Return the largest magnitude among finite elements, 0.0 without any."""
    low, high = extremes(values) if values.numel() else (0.0, 0.0)
    if math.isfinite(high - low):
        return max(abs(low), abs(high))
    return float(values.double().nan_to_num(0.0, 0.0, 0.0).abs().max())


def described(tensor: Tensor, name: str) -> str:
    """Return name, dtype, shape, largest finite magnitude, and whether a tensor has NaN or inf.

    Integers, which may be labels or lengths, have their range instead of the magnitude.
    """
    text = f"{name} {dtype_name(tensor.dtype)}{list(tensor.shape)}".lstrip()
    if not (tensor.is_floating_point() or tensor.is_complex()):
        low, high = (int(bound) for bound in torch.aminmax(tensor.long()))  # uint16 has no aminmax
        return f"{text} all {low}" if low == high else f"{text} from {low} to {high}"
    found = [name for name, mask in (("NaN", tensor.isnan()), ("inf", tensor.isinf())) if bool(mask.any())]
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return f"{text} up to {largest_finite(values):.4g}" + (f" with {' and '.join(found)}" if found else "")


def nonfinite_elements(tensor: Tensor) -> str:
    """Return how many elements are inf or NaN, and in which rows and columns, if these are few."""
    mask = ~torch.isfinite(tensor)
    text = f"{int(mask.sum())} of {tensor.numel()} elements"
    places = []
    for name, lines in (
        ("row", mask.reshape(mask.shape[0], -1).any(1) if mask.ndim else mask),
        ("column", mask.reshape(-1, mask.shape[-1]).any(0) if mask.ndim > 1 else mask.new_zeros(0)),
    ):
        found = lines.nonzero().flatten().tolist()
        if 0 < len(found) < min(4, lines.numel()):
            places.append(f"{name}{'s' if len(found) > 1 else ''} {', '.join(map(str, found))} of {lines.numel()}")
    return f"{text}, in {', '.join(places)}" if places else text
