"""Rounding losses of FP8 in recorded calls, for each module, product and operand; on the device until they are read."""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampkit.matmul.float8_matmul import is_eager
from ampkit.text_tables import table
from ampkit_kernels import Quantized, Scaling

__all__ = ["Float8Loss", "Float8Losses", "Float8Notes"]

_HEADER = ("to 0", "SNR dB", "at end", "amax", "module", "GEMM", "operand", "shape", "scaling")
_NUMBERS = set(_HEADER[:4])


class Float8Loss(NamedTuple):
    """The rounding loss of one operand of one product, summed over all calls of a module."""

    module: str  # its path, or the line of the call
    gemm: str  # "output", "input gradient" or "weight gradient"
    operand: str  # "input", "weight" or "gradient"
    shape: tuple[int, ...]
    scaling: str  # "row e4m3 2^n"
    amax: float  # the largest magnitude before the cast; inf or NaN if an element is
    to_zero: float  # share of the elements that the cast rounded to 0
    at_end: float  # share of the elements at FP8's largest magnitude
    snr: float  # in decibels, 10 log10 of sum(x^2) / sum(error^2): of the median row or column, whichever is lower

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a row of the table."""
        shape = " x ".join(map(str, self.shape))
        to_zero, at_end = (f"{100 * share:.2f}%" for share in (self.to_zero, self.at_end))
        numbers = (to_zero, f"{self.snr:.1f}", at_end, f"{self.amax:.3g}")
        return *numbers, self.module, self.gemm, self.operand, shape, self.scaling


class Float8Losses(tuple[Float8Loss, ...]):
    """The losses of a record; prints as a table, operands that lost most to 0 first."""

    def __str__(self) -> str:
        if not self:
            return "no FP8 product was recorded; products in compiled code and of DTensors are omitted"
        worst_first = sorted(self, key=lambda loss: -loss.to_zero)
        return "\n".join(table([_HEADER, *(loss.cells() for loss in worst_first)], _NUMBERS))


class Float8Notes:
    """Collects the losses of a record."""

    def __init__(self) -> None:
        # Number of elements, amax, counts of those at 0 and at the end, sums of x^2 and error^2 by row and by column.
        self._sums: dict[tuple[Any, ...], tuple[int, Tensor, list[Tensor]]] = {}

    def note(
        self, module: str, gemm: str, operand: str, tensor: Tensor, form: Quantized, scaling: Scaling, transposed: bool
    ) -> None:
        """Add one operand; never synchronizes. Traced, fake and distributed tensors are omitted."""
        if not is_eager(tensor):
            return
        with torch.no_grad():
            exact = tensor.reshape(-1, tensor.shape[-1]).float()
            exact = exact.t() if transposed else exact
            data = form.data.float()
            squares = torch.stack([exact.double().square(), (data / form.scale - exact).double().square()])
            counts = ((data == 0) & (exact != 0)).sum(), (data.abs() == torch.finfo(scaling.dtype).max).sum()
            sums = [torch.stack(counts), squares.sum(2), squares.sum(1)]
            key = module, gemm, operand, tuple(form.data.shape), str(scaling)
            n, amax, earlier = self._sums.get(key, (0, exact.new_zeros(()), []))
            amax = torch.maximum(amax, exact.abs().amax().double())
            sums = [a + b for a, b in zip(sums, earlier, strict=True)] if earlier else sums
            self._sums[key] = n + exact.numel(), amax, sums

    def losses(self) -> Float8Losses:
        """Return the losses so far. Reads them from the device, which synchronizes."""
        rows = []
        for key, (n, amax, sums) in self._sums.items():
            (to_zero, at_end), *squares = (each.tolist() for each in sums)
            snr = min(_median_ratio(*each) for each in squares)
            rows.append(Float8Loss._make((*key, amax.item(), to_zero / n, at_end / n, snr)))
        return Float8Losses(rows)


def _median_ratio(signals: list[float], noises: list[float]) -> float:
    """Return the ratio in decibels of the median row or column, without the ones that are 0; inf without noise."""
    ratios = [10 * math.log10(x / e) if e else math.inf for x, e in zip(signals, noises, strict=True) if x]
    return statistics.median_low(ratios) if ratios else math.inf
